"""One call of each op, with its inputs, its cotangents and the work that it has to do."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from moejax_kernels import (
    attention,
    causal_conv,
    gated_activation,
    gated_delta,
    group_ranks,
    grouped_matmul,
    grouped_mlp,
    index_kl,
    index_topk,
    kda,
    logit_gradients,
    logit_sums,
    permute,
    sparse_attention,
    unpermute,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """An op at one shape."""

    run: Callable
    """`run(implementation, **inputs)` -> output or tuple of outputs."""
    inputs: dict
    """Arrays by name, or trees of them; gradients of the floating arrays are taken."""
    cotangents: tuple
    """Of the outputs; empty: the op has no gradients."""
    unit: str
    """What the work is counted in: FLOP, or bytes that have to be moved."""
    forward: float
    """Work of the forward pass."""
    backward: float = 0.0
    """Work of the backward pass, recomputation left out."""
    still: tuple[str, ...] = ()
    """Names of floating inputs that have no gradient."""
    exact: bool = False
    """Integer outputs have one right value; else they are sets of chosen keys, where almost equal scores may swap."""

    @property
    def floats(self) -> list[str]:
        """Names of the inputs that have gradients."""
        arrays = {name: array for name, array in self.inputs.items() if isinstance(array, jax.Array) and name not in self.still}
        return [name for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)]

    def program(self, implementation, *, backward: bool):
        """A function of the inputs alone: the outputs, and with `backward` the gradients by name too."""

        def forward_only(inputs):
            out = self.run(implementation, **inputs)
            return out if isinstance(out, tuple) else (out,)

        def both(inputs):
            out, pull = jax.vjp(lambda some: forward_only(inputs | some), {name: inputs[name] for name in self.floats})
            return out, pull(tuple(like.astype(o.dtype) for like, o in zip(self.cotangents, out, strict=True)))[0]

        return jax.jit(both if backward else lambda inputs: (forward_only(inputs), {}))


def _normal(shapes: dict, seed: int = 0) -> dict:
    """Arrays of these shapes; None stays away."""
    random = np.random.default_rng(seed)
    shapes = {name: like for name, like in shapes.items() if like is not None}
    return {name: jnp.asarray(random.standard_normal(like.shape, np.float32), like.dtype) for name, like in shapes.items()}


def _segments(case):
    return case.segments() if hasattr(case, "segments") else None


def _pairs(case, most: int | None = None) -> int:
    """Visible pairs of a query and a key, at most `most` keys a query."""
    lengths = [length for length in getattr(case, "documents", (case.length,)) if length > 0]
    rows = getattr(case, "rows", 1)
    return rows * sum(int(np.minimum(np.arange(1, length + 1), most or length).sum()) for length in lengths)


def _delta(op, case, dtype) -> Call:
    """FLOPs of the chunked form (64 tokens): five products with a chunk's matrices, three with the state; backward twice that."""
    *arrays, state_BHCM = case.arrays(dtype, seed=0, decay_per_channel=op is kda)
    names = "q_BLGC", "k_BLGC", "v_BLHM", "g_BLHC" if op is kda else "g_BLH", "beta_BLH"
    inputs = dict(zip(names, arrays, strict=True))
    inputs[names[3]] = inputs[names[3]].astype(jnp.float32)
    C, M, heads = case.key_dim, case.value_dim, case.rows * case.tokens * case.heads
    forward = 2 * heads * (64 * (3 * C + 2 * M) + 3 * C * M)
    run = lambda implementation, **inputs: op(**inputs, segments=case.segments(), implementation=implementation)
    cotangents = jnp.ones_like(inputs["v_BLHM"]), jnp.ones_like(state_BHCM)
    return Call(run=run, inputs=inputs, cotangents=cotangents, unit="FLOP", forward=forward, backward=2 * forward)


def _attention(case, dtype) -> Call:
    q, k, v, sinks, do = case.arrays(dtype, seed=0)
    inputs = {"q_BLHC": q, "k_BSGC": k, "v_BSGM": v} | ({} if sinks is None else {"sinks_H": sinks})
    scale = case.key_dim**-0.5
    run = functools.partial(_run, attention, scale=scale, segments=case.segments(), window=case.window)
    per_channel = 2 * _pairs(case, case.window) * case.heads
    C, M = case.key_dim, case.value_dim
    forward, backward = per_channel * (C + M), per_channel * (2 * C + 2 * M)
    return Call(run=run, inputs=inputs, cotangents=(do,), unit="FLOP", forward=forward, backward=backward)


def _run(op, implementation, **inputs):
    return op(**inputs, implementation=implementation)


def _sparse_inputs(case, dtype):
    arrays = case.arrays(dtype, seed=0) if hasattr(case, "arrays") else _normal({**case.shapes(dtype), "ids": None, "dkl": None})
    arrays["cotangent"] = arrays.pop("do", arrays.get("cotangent"))
    return arrays


def _sparse_ids(case, arrays):
    choose = functools.partial(index_topk, topk=case.topk, segments=_segments(case))
    return jax.jit(choose)(arrays["index_q"], arrays["index_k"], arrays["index_w"])


def _index_topk(case, dtype) -> Call:
    arrays = _sparse_inputs(case, dtype)
    inputs = {"index_q_BLJC": arrays["index_q"], "index_k_BSC": arrays["index_k"], "index_w_BLJ": arrays["index_w"]}
    run = functools.partial(_run, index_topk, topk=case.topk, segments=_segments(case))
    return Call(run=run, inputs=inputs, cotangents=(), unit="FLOP", forward=2 * _pairs(case) * case.index_heads * case.index_dim)


def _sparse_attention(case, dtype) -> Call:
    arrays = _sparse_inputs(case, dtype)
    inputs = {"q_BLHC": arrays["q"], "k_BLGC": arrays["k"], "ids_BLK": _sparse_ids(case, arrays)}
    latent = "v" not in arrays
    fixed = {"v_BLGM": None, "value_dim": case.value_dim} if latent else {}
    inputs |= {} if latent else {"v_BLGM": arrays["v"]}
    run = functools.partial(_run, sparse_attention, scale=case.key_dim**-0.5, segments=_segments(case), **fixed)
    per_channel = 2 * _pairs(case, case.topk) * case.heads
    forward, backward = per_channel * (case.key_dim + case.value_dim), per_channel * (2 * case.key_dim + 2 * case.value_dim)
    return Call(run=run, inputs=inputs, cotangents=(arrays["cotangent"],), unit="FLOP", forward=forward, backward=backward)


def _index_kl(case, dtype) -> Call:
    """Gradients reach the index inputs alone."""
    arrays = _sparse_inputs(case, dtype)
    inputs = {"index_q_BLJC": arrays["index_q"], "index_k_BLC": arrays["index_k"], "index_w_BLJ": arrays["index_w"]}
    inputs |= {"q_BLHC": arrays["q"], "k_BLGC": arrays["k"], "ids_BLK": _sparse_ids(case, arrays)}
    run = functools.partial(_run, index_kl, scale=case.key_dim**-0.5, segments=_segments(case))
    index = 2 * _pairs(case, case.topk) * case.index_heads * case.index_dim
    forward = 2 * _pairs(case, case.topk) * case.heads * case.key_dim + index
    ones_BL = jnp.ones(arrays["q"].shape[:2], jnp.float32)
    still = "q_BLHC", "k_BLGC"
    return Call(run=run, inputs=inputs, cotangents=(ones_BL,), unit="FLOP", forward=forward, backward=2 * index, still=still)


def _grouped_matmul(case, dtype) -> Call:
    x_RD, w_EDF, group_sizes_E, dy_RF = case.arrays(dtype, seed=0)
    inputs = {"x_RD": x_RD, "w_EDF": w_EDF, "group_sizes_E": group_sizes_E}
    forward = 2 * sum(case.sizes) * case.width * case.hidden
    run = functools.partial(_run, grouped_matmul)
    return Call(run=run, inputs=inputs, cotangents=(dy_RF,), unit="FLOP", forward=forward, backward=2 * forward)


def _grouped_mlp(case, dtype) -> Call:
    """FLOPs of the three products."""
    x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, dy_RD = case.arrays(dtype, seed=0)
    inputs = {"x_RD": x_RD, "gate_EDF": gate_EDF, "up_EDF": up_EDF, "down_EFD": down_EFD, "group_sizes_E": group_sizes_E}
    forward = 3 * 2 * sum(case.sizes) * case.width * case.hidden
    run = functools.partial(_run, grouped_mlp)
    return Call(run=run, inputs=inputs, cotangents=(dy_RD,), unit="FLOP", forward=forward, backward=2 * forward)


def _causal_conv(case, dtype) -> Call:
    """Forward reads x and writes y; backward reads x and dy and writes dx."""
    x_BLD, weight_D4, _ = case.arrays(dtype, seed=0)
    run = lambda implementation, **inputs: causal_conv(**inputs, segments=case.segments(), implementation=implementation)[0]
    inputs, one = {"x_BLD": x_BLD, "weight_D4": weight_D4}, x_BLD.nbytes
    return Call(run=run, inputs=inputs, cotangents=(jnp.ones_like(x_BLD),), unit="B", forward=2 * one, backward=3 * one)


def _gated_activation(case, dtype) -> Call:
    """Forward reads gate and up and writes y; backward reads both and dy and writes two gradients."""
    arrays = _normal(dict(zip(("gate_RF", "up_RF"), case.shapes(dtype), strict=True)))
    run = functools.partial(_run, gated_activation, **dict(case.options))
    one = arrays["up_RF"].nbytes
    return Call(run=run, inputs=arrays, cotangents=(jnp.ones_like(arrays["up_RF"]),), unit="B", forward=3 * one, backward=5 * one)


def _permute(case, dtype) -> Call:
    """Reads the rows' tokens and writes the rows, and the other way round."""
    x_TD, y_RD, _ = case.arrays(dtype, seed=0)
    inputs = {"x_TD": x_TD, "plan": case.plan(seed=0)}
    backward = y_RD.nbytes + x_TD.nbytes
    run = functools.partial(_run, permute)
    return Call(run=run, inputs=inputs, cotangents=(y_RD,), unit="B", forward=2 * y_RD.nbytes, backward=backward)


def _unpermute(case, dtype) -> Call:
    """Reads the rows and writes the tokens; backward reads both rows and gradient and writes the rows' gradient."""
    x_TD, y_RD, probs_TK = case.arrays(dtype, seed=0)
    inputs = {"y_RD": y_RD, "probs_TK": probs_TK.astype(jnp.float32), "plan": case.plan(seed=0)}
    forward = y_RD.nbytes + x_TD.nbytes
    run = functools.partial(_run, unpermute)
    return Call(run=run, inputs=inputs, cotangents=(x_TD,), unit="B", forward=forward, backward=3 * y_RD.nbytes)


def _group_ranks(case, dtype) -> Call:
    """Reads the ids and writes as many ranks, and a count for each group; no activations, so `dtype` does not matter."""
    inputs, forward = {"ids_R": case.ids(seed=0)}, 4 * (2 * case.rows + case.groups)
    run = functools.partial(_run, group_ranks, num_groups=case.groups)
    return Call(run=run, inputs=inputs, cotangents=(), unit="B", forward=forward, exact=True)


def _logits(op, case, dtype) -> Call:
    """One product; what is made of it is little beside that."""
    inputs = case.arrays(dtype, seed=0)
    if op is logit_sums:
        inputs = {name: inputs[name] for name in ("hidden_TD", "weight_DV", "targets_T")}
    run = lambda implementation, **inputs: op(**inputs, **case.options, implementation=implementation)
    return Call(run=run, inputs=inputs, cotangents=(), unit="FLOP", forward=2 * case.tokens * case.columns * case.width)


CALLS = {
    "kda": functools.partial(_delta, kda),
    "gated_delta": functools.partial(_delta, gated_delta),
    "attention": _attention,
    "index_topk": _index_topk,
    "sparse_attention": _sparse_attention,
    "index_kl": _index_kl,
    "grouped_matmul": _grouped_matmul,
    "grouped_mlp": _grouped_mlp,
    "causal_conv": _causal_conv,
    "gated_activation": _gated_activation,
    "group_ranks": _group_ranks,
    "logit_gradients": functools.partial(_logits, logit_gradients),
    "logit_sums": functools.partial(_logits, logit_sums),
    "permute": _permute,
    "unpermute": _unpermute,
}
"""Op -> function of a case and the dtype of activations."""
