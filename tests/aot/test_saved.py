"""What each op keeps for its backward pass on a GPU, in bytes a token: docs/kernels.md says it, and this is where it comes from.

python tests/aot/test_saved.py     # writes the table
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from moejax_kernels import (
    attention,
    causal_conv,
    gated_activation,
    gated_delta,
    grouped_matmul,
    grouped_mlp,
    index_kl,
    kda,
    permute,
    sparse_attention,
    unpermute,
)
from moejax_kernels.attention.cases import REAL as ATTENTION
from moejax_kernels.causal_conv.cases import REAL as CONV
from moejax_kernels.gated_activation.cases import REAL as ACTIVATION
from moejax_kernels.gated_delta.cases import REAL as GATED_DELTA
from moejax_kernels.grouped_matmul.cases import REAL as GROUPED
from moejax_kernels.grouped_mlp.cases import REAL as MLP
from moejax_kernels.kda.cases import REAL as KDA
from moejax_kernels.permute.cases import REAL as PERMUTE
from moejax_kernels.sparse_attention.cases import REAL as SPARSE

from moejax.plan import targets

pytestmark = pytest.mark.aot
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "kernels.md"
MARK = "<!-- written by tests/aot/test_saved.py -->\n"
BF16 = jnp.bfloat16


def named(cases, name):
    return next(case for case in cases if str(case) == name)


def kept(function, *shapes) -> int:
    """Bytes of what `jax.vjp` holds between the passes; an array that is held twice counts once for each."""
    with jax.set_mesh(targets.one_gpu(targets.TARGETS["h200"])):
        pull = jax.eval_shape(lambda *arrays: jax.vjp(function, *arrays)[1], *shapes)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


def of_delta(op, case):
    inputs = case.shapes(BF16, decay_per_channel=op is kda)
    return inputs, kept(functools.partial(op, segments=case.segments(), implementation="triton_gpu"), *inputs), case.rows * case.tokens


def of_attention(case):
    inputs = case.shapes(BF16)[:3]
    call = functools.partial(attention, scale=0.1, segments=case.segments(), implementation="triton_gpu")
    return inputs, kept(call, *inputs), case.rows * case.length


def of_sparse(case):
    shapes = case.shapes(BF16)
    inputs = shapes["q"], shapes["k"], shapes["ids"]
    call = lambda q, k, ids: sparse_attention(q, k, None, ids, scale=0.1, value_dim=case.value_dim, implementation="triton_gpu")
    return inputs, kept(call, *inputs), case.length


def of_index_kl(case, chosen):
    shapes = case.shapes(BF16)
    inputs = tuple(shapes[name] for name in ("index_q", "index_k", "index_w", "q", "k", *(("ids",) if chosen else ())))
    call = lambda index_q, index_k, index_w, q, k, ids=None: index_kl(
        q, k, index_q, index_k, index_w, ids, scale=0.1, implementation="triton_gpu"
    )
    return inputs, kept(call, *inputs), case.length


def of_grouped(case):
    x_RD, w_EDF, sizes_E, _ = case.shapes(BF16)
    bytes_kept = kept(functools.partial(grouped_matmul, implementation="triton_gpu"), x_RD, w_EDF, sizes_E)
    return (x_RD,), bytes_kept - w_EDF.size * w_EDF.dtype.itemsize, case.rows


def of_mlp(case):
    x_RD, *weights, sizes_E, _ = case.shapes(BF16)
    bytes_kept = kept(functools.partial(grouped_mlp, implementation="triton_gpu"), x_RD, *weights, sizes_E)
    return (x_RD,), bytes_kept - sum(w.size * w.dtype.itemsize for w in weights), case.rows


def of_conv(case):
    x_BLD, weight_D4, _ = case.shapes(BF16)
    call = functools.partial(causal_conv, segments=case.segments(), implementation="triton_gpu")
    return (x_BLD,), kept(call, x_BLD, weight_D4), case.rows * case.tokens


def of_activation(case):
    inputs = case.shapes(BF16)
    return inputs, kept(functools.partial(gated_activation, **dict(case.options), implementation="triton_gpu"), *inputs), case.rows


def of_permute(case, back):
    x_TD, y_RD, probs_TK, plan = case.shapes(BF16)
    if back:
        call = lambda y_RD, probs_TK, plan: unpermute(y_RD, plan, probs_TK, implementation="triton_gpu")
        return (y_RD, probs_TK), kept(call, y_RD, probs_TK, plan), case.tokens
    return (x_TD,), kept(lambda x_TD, plan: permute(x_TD, plan, implementation="triton_gpu"), x_TD, plan), case.tokens


def rows():
    """Op, name of the case, what is counted, inputs, bytes kept, and how many tokens or rows there are."""
    yield "kda", "kimi_k3", "token", *of_delta(kda, named(KDA, "kimi_k3"))
    yield "gated_delta", "qwen3_next", "token", *of_delta(gated_delta, named(GATED_DELTA, "qwen3_next"))
    yield "attention", "mixtral", "token", *of_attention(named(ATTENTION, "mixtral"))
    yield "sparse_attention", "deepseek_v32", "token", *of_sparse(named(SPARSE, "deepseek_v32"))
    yield "index_kl, chosen keys", "deepseek_v32", "token", *of_index_kl(named(SPARSE, "deepseek_v32"), True)
    yield "index_kl, all keys", "deepseek_v32", "token", *of_index_kl(named(SPARSE, "deepseek_v32"), False)
    yield "causal_conv", "kimi_k3", "token", *of_conv(named(CONV, "kimi_k3"))
    yield "grouped_matmul, beside the weights", "kimi_k3_on_64_devices", "row", *of_grouped(named(GROUPED, "kimi_k3_on_64_devices"))
    yield "grouped_mlp, beside the weights", "kimi_k3_on_64_devices", "row", *of_mlp(named(MLP, "kimi_k3_on_64_devices"))
    yield "gated_activation", "kimi_k3", "row", *of_activation(named(ACTIVATION, "kimi_k3"))
    yield "permute", "kimi_k3", "token", *of_permute(named(PERMUTE, "kimi_k3"), False)
    yield "unpermute", "kimi_k3", "token", *of_permute(named(PERMUTE, "kimi_k3"), True)


def table() -> str:
    lines = ["| op | shape of | per | its inputs, bytes | kept, bytes |\n|---|---|---|---|---|\n"]
    for op, model, unit, inputs, bytes_kept, count in rows():
        given = sum(like.size * like.dtype.itemsize for like in inputs)
        lines.append(f"| {op} | {model} | {unit} | {given / count:,.0f} | {bytes_kept / count:,.0f} |\n")
    return "".join(lines)


def test_the_page_says_what_is_kept():
    assert PAGE.read_text().partition(MARK)[2] == table(), "docs/kernels.md is out of date: python tests/aot/test_saved.py"


def test_kda_keeps_no_more_than_inputs_two_matrices_and_the_states():
    case = named(KDA, "kimi_k3")
    inputs, bytes_kept, count = of_delta(kda, case)
    given = sum(like.size * like.dtype.itemsize for like in inputs)
    matrices, states = 2 * 64 * 2 * case.heads, case.heads * case.key_dim * case.value_dim * 2 / 64  # bfloat16
    borders = 2 * 4  # int32 labels and first positions
    assert bytes_kept / count <= given / count + matrices + states + borders


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + table())
