"""The hub's key of every weight, and how its layout differs from ours."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moejax.config.model import LayerKind, ModelConfig
from moejax.config.run import layer_plan


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Between the hub's layout of a tensor and ours, which is `shape`."""

    inputs: int = 0
    """A matrix: our first `inputs` dims are contracted; the hub stores [out, in]. 0: no transpose."""
    shape: tuple[int, ...] = ()
    """Shape on the hub where it is neither [out, in] nor ours; -1 is our size."""

    def to_ours(self, hub: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The hub's tensor in our shape. Zero padding at the end of a vector (Kimi K3's A_log) is cut off.

        Raises:
          ValueError: the sizes do not fit, or what would be cut off is not zero.
        """
        size = math.prod(shape)
        if hub.ndim == 1 and hub.size > size:
            if hub[size:].any():
                raise ValueError(f"has {hub.size} entries where {size} are expected, and the rest is not zero padding")
            hub = hub[:size]
        if hub.size != size:
            raise ValueError(f"has shape {hub.shape}, which does not fit {shape}")
        if self.inputs and hub.shape != self.to_hub_shape(shape):
            raise ValueError(f"has shape {hub.shape}, expected {self.to_hub_shape(shape)}")
        return (hub.T if self.inputs else hub).reshape(shape)

    def to_hub_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The hub's shape of a tensor that is `shape` here."""
        if self.inputs:
            return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])
        return tuple(math.prod(shape) if size == -1 else size for size in self.shape) if self.shape else shape

    def to_hub(self, ours: np.ndarray, hub_shape: tuple[int, ...] | None) -> np.ndarray:
        """Our tensor in the hub's layout; `hub_shape` is that of the file it came from, if it came from one."""
        natural = self.to_hub_shape(ours.shape)
        out = ours.reshape(math.prod(ours.shape[: self.inputs]), -1).T if self.inputs else ours
        if hub_shape is None or math.prod(hub_shape) == ours.size:
            # safetensors writes the bytes of a transposed view in their old order, without a word
            return np.ascontiguousarray(out.reshape(natural if hub_shape is None else hub_shape))
        padded = np.zeros(hub_shape, ours.dtype)
        padded[: ours.size] = ours.reshape(-1)
        return padded


PLAIN, MATRIX, FROM_HEADS = Layout(), Layout(inputs=1), Layout(inputs=2)
CONV, ROW, HEADS_4D, FLAT = Layout(shape=(-1, 1, 4)), Layout(shape=(1, -1)), Layout(shape=(1, 1, -1, 1)), Layout(shape=(-1,))
Rules = dict[str, tuple[tuple[str, ...], Layout]]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the hub."""

    keys: tuple[str, ...]
    """Its names: the hub's first, then others that files use."""
    path: tuple[str, ...]
    """Our leaf."""
    index: tuple[int, ...]
    """Where in the leaf: place in the stack, expert."""
    layout: Layout


def _rules(layout_of: dict[str, tuple[str, Layout]], prefix: str = "") -> Rules:
    return {path: ((prefix + key,), layout) for path, (key, layout) in layout_of.items()}


GQA = {
    "q_DHX": ("q_proj.weight", MATRIX),
    "k_DGC": ("k_proj.weight", MATRIX),
    "v_DGC": ("v_proj.weight", MATRIX),
    "out_HCD": ("o_proj.weight", FROM_HEADS),
    "q_norm/scale_D": ("q_norm.weight", PLAIN),
    "k_norm/scale_D": ("k_norm.weight", PLAIN),
    "sinks_H": ("sinks", PLAIN),
}
MLA = {
    "q_down_DR": ("q_a_proj.weight", MATRIX),
    "q_norm/scale_D": ("q_a_layernorm.weight", PLAIN),
    "q_up_RHC": ("q_b_proj.weight", MATRIX),
    "q_DHC": ("q_proj.weight", MATRIX),
    "kv_down_DR": ("kv_a_proj_with_mqa.weight", MATRIX),
    "kv_norm/scale_D": ("kv_a_layernorm.weight", PLAIN),
    "kv_up_RHX": ("kv_b_proj.weight", MATRIX),
    "out_HMD": ("o_proj.weight", FROM_HEADS),
    "gate_DHM": ("g_proj.weight", MATRIX),
}
INDEXER = {
    "q_RJC": ("wq_b.weight", MATRIX),
    "k_DC": ("wk.weight", MATRIX),
    "k_norm_scale_C": ("k_norm.weight", PLAIN),
    "k_norm_bias_C": ("k_norm.bias", PLAIN),
    "weight_DJ": ("weights_proj.weight", MATRIX),
    "pool_gate_DC": ("index_kpool_compress_gate", MATRIX),
    "pool_bias_PC": ("index_kpool_compress_ape", PLAIN),
}
KDA = {
    "q_DGC": ("q_proj.weight", MATRIX),
    "k_DGC": ("k_proj.weight", MATRIX),
    "v_DHM": ("v_proj.weight", MATRIX),
    "q_conv_X4": ("q_conv1d.weight", CONV),
    "k_conv_X4": ("k_conv1d.weight", CONV),
    "v_conv_X4": ("v_conv1d.weight", CONV),
    "decay_down_DR": ("f_a_proj.weight", MATRIX),
    "decay_up_RHC": ("f_b_proj.weight", MATRIX),
    "A_log_H": ("A_log", PLAIN),
    "dt_bias_HC": ("dt_bias", FLAT),
    "beta_DH": ("b_proj.weight", MATRIX),
    "gate_DHM": ("g_proj.weight", MATRIX),
    "gate_down_DR": ("g_a_proj.weight", MATRIX),
    "gate_up_RHM": ("g_b_proj.weight", MATRIX),
    "out_norm_scale_M": ("o_norm.weight", PLAIN),
    "out_HMD": ("o_proj.weight", FROM_HEADS),
}
GDN = {
    "qkvz_DGX": ("in_proj_qkvz.weight", MATRIX),
    "ba_DGX": ("in_proj_ba.weight", MATRIX),
    "conv_X4": ("conv1d.weight", CONV),
    "A_log_H": ("A_log", PLAIN),
    "dt_bias_H": ("dt_bias", PLAIN),
    "out_norm_scale_M": ("norm.weight", PLAIN),
    "out_HMD": ("out_proj.weight", FROM_HEADS),
}
DENSE = {"gate_DF": ("gate_proj.weight", MATRIX), "up_DF": ("up_proj.weight", MATRIX), "down_FD": ("down_proj.weight", MATRIX)}
MHC = {"mix_XZ": ("fn", PLAIN), "base_X": ("base", PLAIN), "scale_3": ("scale", PLAIN)}
BLOCK_MIX = {"norm/scale_D": ("norm.weight", PLAIN), "query_D": ("proj.weight", ROW)}
OLD_STYLE = ("mixtral", "kimi_linear", "kimi_k3")
"""Families whose sparse layers are called block_sparse_moe, with experts' w1 (gate), w3 (up) and w2 (down)."""


def _mixer_rules(config: ModelConfig, kind: str, family: str) -> Rules:
    base = {"gqa": GQA, "mla": MLA, "kda": KDA, "gdn": GDN}.get(kind)
    if kind == "kda" and family == "kimi_linear":
        base = KDA | {"A_log_H": ("A_log", HEADS_4D)}
    if base is not None:
        return _rules(base, "linear_attn." if kind == "gdn" else "self_attn.")
    chosen = {f"base/{path}": rule for path, rule in (MLA if config.indexer.base == "mla" else GQA).items()}
    index = {f"indexer/{path}": (f"indexer.{key}", layout) for path, (key, layout) in INDEXER.items()}
    return _rules(chosen | (index if kind == "dsa" else {}), "self_attn.")


def _feed_forward_rules(kind: str, family: str) -> Rules:
    old = family in OLD_STYLE
    block = "block_sparse_moe." if old else "mlp."
    if kind == "dense":
        # transformers saves Kimi Linear's dense layer under block_sparse_moe, the hub has mlp
        return {
            path: (tuple(place + key for place in ("mlp.", "block_sparse_moe.")[: 2 if old else 1]), layout)
            for path, (key, layout) in DENSE.items()
        }
    gate, up, down = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
    experts = {
        f"experts/{path}": (f"experts.*.{key}.weight", MATRIX) for path, key in (("gate_EDF", gate), ("up_EDF", up), ("down_EFD", down))
    }
    shared = "shared_expert." if family == "qwen3_next" else "shared_experts."
    return _rules(
        experts
        | {f"shared/{path}": (shared + key, layout) for path, (key, layout) in DENSE.items()}
        | {
            "router/weight_DE": ("gate.weight", MATRIX),
            "router/bias_E": ("gate.e_score_correction_bias", PLAIN),
            "shared_gate_D1": ("shared_expert_gate.weight", MATRIX),
            "latent_down_DZ": ("routed_expert_down_proj.weight", MATRIX),
            "latent_up_ZD": ("routed_expert_up_proj.weight", MATRIX),
            "latent_norm/scale_D": ("routed_expert_norm.weight", PLAIN),
        },
        block,
    )


def layer_rules(config: ModelConfig, kind: LayerKind, family: str) -> Rules:
    """Rules of one layer, keyed by our path in it; those of switches that are off find no leaf."""
    rules: Rules = {
        "mixer_norm/scale_D": (("input_layernorm.weight",), PLAIN),
        "feed_forward_norm/scale_D": (("post_attention_layernorm.weight",), PLAIN),
    }
    parts = (
        ("mixer", _mixer_rules(config, kind.mixer, family)),
        ("feed_forward", _feed_forward_rules(kind.feed_forward, family)),
        ("mixer_residual", _residual_rules(config, "hc_attn_", "self_attention_res_")),
        ("feed_forward_residual", _residual_rules(config, "hc_ffn_", "mlp_res_")),
    )
    return rules | {f"{part}/{path}": rule for part, found in parts for path, rule in found.items()}


def _residual_rules(config: ModelConfig, mhc: str, attnres: str) -> Rules:
    kind = config.residual.kind
    return {"plain": {}, "mhc": _rules(MHC, mhc), "block_attnres": _rules(BLOCK_MIX, attnres)}[kind]


def entries(config: ModelConfig, family: str, leaves: set[tuple[str, ...]], prefix: str, head_prefix: str) -> Iterator[Entry]:
    """Every hub tensor of a model whose weights are `leaves`.

    Args:
      prefix: what stands before `embed_tokens`, e.g. "model.".
      head_prefix: what stands before `lm_head`, e.g. "".
    """
    top: Rules = {
        "embed/weight_VD": ((prefix + "embed_tokens.weight",), PLAIN),
        "final_norm/scale_D": ((prefix + "norm.weight",), PLAIN),
        "unembed/weight_DV": ((head_prefix + "lm_head.weight",), MATRIX),
    }
    top |= {f"final_residual/{path}": rule for path, rule in _rules(BLOCK_MIX, prefix + "output_attn_res_").items()}
    for path, (keys, layout) in top.items():
        if tuple(path.split("/")) in leaves:
            yield Entry(keys, tuple(path.split("/")), (), layout)
    plan = layer_plan(config)
    for layer, kind in enumerate(config.layers()):
        section, place, stack = plan.place(layer)
        index = () if stack is None else (stack,)
        for path, (keys, layout) in layer_rules(config, kind, family).items():
            leaf = (section, str(place), *path.split("/"))
            if leaf not in leaves:
                continue
            full = tuple(f"{prefix}layers.{layer}.{key}" for key in keys)
            if "*" not in full[0]:
                yield Entry(full, leaf, index, layout)
                continue
            for expert in range(config.moe.num_experts):
                yield Entry(tuple(key.replace("*", str(expert)) for key in full), leaf, (*index, expert), layout)
