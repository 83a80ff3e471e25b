"""Golden values of hub models, and how far ours may be from them.

tests/golden/models holds tiny checkpoints with values that PyTorch computed in float64 (transformers 5.24; for Kimi K3 a step-by-step
definition). Errors are relative to each tensor's peak.
"""

import pathlib

import jax
import numpy as np
from safetensors.numpy import load_file

import moejax
from moejax.parallel.mesh import mesh_from

MODELS = pathlib.Path(__file__).parent / "golden" / "models"
ATTENTION_ONLY = ("mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v32")
HYBRID = ("qwen3_next", "kimi_linear", "kimi_k3", "glm5_next_text")
FAMILIES = ATTENTION_ONLY + HYBRID

TOLERANCES = {  # of logits, of gradients
    ("float64", "attention"): (1e-9, 1e-6),  # stored gradients are rounded to float32
    ("float64", "hybrid"): (1e-9, 1e-6),
    ("float32", "attention"): (1e-5, 1e-5),
    ("float32", "hybrid"): (1e-4, 2e-3),  # gated delta rules amplify roundings: the libraries themselves are off by 3e-5 and 8e-4
}
ROUNDED_ROUTERS = {"qwen3_moe": (2 * 4.2e-8, 1e-6), "qwen3_next": (2 * 2.33e-6, 2 * 8.4e-6)}
"""Tolerances of the two families whose golden values are not float64 throughout: transformers' Qwen routers call
`softmax(..., dtype=torch.float)`, which rounded the weights of the experts to float32. Shown by solving for the weights at the first token,
where logits depend on them alone: all 96 differences vanish to 1e-14, and layer 0's solutions are float32 numbers. The tolerance is twice
the measured distance, which is also transformers' own distance once that cast is lifted; against those values (float64.npz, made by
tests/golden/float64_routers.py) the tolerance of all others holds."""


def tolerance(family: str, dtype: str, source: str) -> tuple[float, float]:
    """Of logits and of gradients."""
    if dtype == "float64" and not source and family in ROUNDED_ROUTERS:
        return ROUNDED_ROUTERS[family]
    return TOLERANCES[dtype, "attention" if family in ATTENTION_ONLY else "hybrid"]


def distance(ours, theirs) -> float:
    """Largest difference, relative to the peak of what is right; where that is 0 throughout, any difference is too much."""
    difference, peak = np.abs(np.asarray(ours) - theirs).max(), np.abs(theirs).max()
    return float(difference / peak) if peak else (np.inf if difference else 0.0)


def check(family: str, dtype: str, mesh: dict | None = None, *, source: str = "") -> None:
    """Compares logits, loss and gradients with the golden values; `source` names the files of float64 routers."""
    io, found = (np.load(MODELS / family / name) for name in ("io.npz", f"{source}.npz" if source else "io.npz"))
    grads = load_file(MODELS / family / (f"{source}_grads.safetensors" if source else "grads.safetensors"))
    of_logits, of_grads = tolerance(family, dtype, source)
    with jax.enable_x64(dtype == "float64"):
        model = moejax.load_hf(MODELS / family, dtype=dtype, mesh=mesh_from(**mesh) if mesh else None)
        logits_BLV = model(io["input_ids"])
        loss, our_grads = model.loss_and_grads(io["input_ids"])
    assert logits_BLV.dtype == loss.dtype == dtype
    assert distance(logits_BLV, found["logits"]) < of_logits
    assert abs(float(loss) - found["loss"]) < of_logits * found["loss"]
    compare_gradients(model.to_hf(our_grads), grads, of_grads)


def compare_gradients(named: dict, grads: dict, limit: float) -> None:
    """Same keys and shapes as the file, every tensor within the limit, zeros exact."""
    text = {key: grad for key, grad in grads.items() if ".visual." not in key}
    assert named.keys() == text.keys()
    assert {key: grad.shape for key, grad in named.items()} == {key: grad.shape for key, grad in text.items()}
    errors = {}
    for key, grad in text.items():
        # A buffer without gradient. transformers' files hold a copy of its value here; their description says zero, which is right.
        right = np.zeros_like(grad) if key.endswith("e_score_correction_bias") else grad
        errors[key] = distance(named[key], right)
    assert {key: error for key, error in errors.items() if not error < limit} == {}
