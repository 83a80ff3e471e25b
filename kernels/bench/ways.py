"""What each op is measured against: the same result by other means, as (compiled function, arguments) by name."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from measure import value_and_gradients
from moejax_kernels import (
    attention,
    causal_conv,
    gated_activation,
    gated_delta,
    grouped_matmul,
    grouped_mlp,
    index_topk,
    kda,
    sparse_attention,
)


def delta(case, op):
    """KDA or GDN: ours, the plain chunked form under autodiff, the step-by-step scan under autodiff."""
    per_channel = op is kda
    arrays = case.arrays(jnp.float32, seed=0, decay_per_channel=per_channel)
    cotangents = jnp.ones_like(arrays[2]), jnp.ones_like(arrays[5])
    segments = case.segments()

    def named(implementation, **options):
        def run(q, k, v, g, beta, state):
            return op(q, k, v, g, beta, initial_state_BHCM=state, segments=segments, implementation=implementation, **options)

        return value_and_gradients(run, arrays, cotangents)

    ways = {"ours": named("xla")}
    if per_channel:
        ways["ours, g >= -5"] = named("xla", min_log_decay=-5.0)
    if segments is None:
        ways["plain chunks"] = value_and_gradients(plain_chunks, arrays, cotangents)
    ways["scan"] = named("reference")
    return ways


def plain_chunks(q_BLHC, k_BLHC, v_BLHM, g, beta_BLH, state_BHCM, chunk=64):
    """The textbook form (formulas 1.3), 64 tokens at a time, with the decays between all pairs of 16 rows; XLA differentiates it."""
    B, L, H, C = q_BLHC.shape
    g_BLHC = jnp.broadcast_to(g.reshape(B, L, H, -1), (B, L, H, C))
    split = lambda x: x.reshape(B, L // chunk, chunk, H, -1).transpose(1, 0, 3, 2, 4)
    q, k, v, g, beta = map(split, (q_BLHC * C**-0.5, k_BLHC, v_BLHM, g_BLHC, beta_BLH))
    strict, causal = np.tri(chunk, k=-1, dtype=bool), np.tri(chunk, dtype=bool)
    total = jnp.cumsum(g, axis=-2)

    def pairs(x):
        """sum_c x_ic k_jc exp(total_ic - total_jc), measured from the first row of i's sub-block of 16."""
        rows = []
        for start in range(0, chunk, 16):
            first = total[..., start : start + 1, :]
            upper = x[..., start : start + 16, :] * jnp.exp(total[..., start : start + 16, :] - first)
            rows.append(upper @ (k * jnp.exp(jnp.minimum(first - total, 80.0))).swapaxes(-1, -2))
        return jnp.concatenate(rows, axis=-2)

    lower = jnp.where(strict, beta * pairs(k), 0)
    eye = jnp.broadcast_to(jnp.eye(chunk), lower.shape)
    solve = jax.scipy.linalg.solve_triangular(eye + lower, eye, lower=True, unit_diagonal=True) * beta.swapaxes(-1, -2)
    w, u, mixed = solve @ (jnp.exp(total) * k), solve @ v, jnp.where(causal, pairs(q), 0)

    def step(state, chunk_arrays):
        q, k, w, u, mixed, total = chunk_arrays
        written = u - w @ state
        o = (q * jnp.exp(total)) @ state + mixed @ written
        last = total[..., -1:, :]
        return jnp.exp(last).swapaxes(-1, -2) * state + (k * jnp.exp(last - total)).swapaxes(-1, -2) @ written, o

    state_BHCM, o = lax.scan(step, state_BHCM, (q, k, w, u, mixed, total))
    return o.transpose(1, 0, 3, 2, 4).reshape(v_BLHM.shape), state_BHCM


def sparse(case):
    """Choosing the keys and attending to them, against attention over all keys under a mask."""
    arrays, segments = case.arrays(jnp.float32, seed=0), case.segments()
    names = "q", "k", "v", "index_q", "index_k", "index_w"
    scale = case.key_dim**-0.5

    def ours(q, k, v, index_q, index_k, index_w):
        ids = index_topk(index_q, index_k, index_w, topk=case.topk, segments=segments, implementation="xla")
        return sparse_attention(q, k, v, ids, scale=scale, segments=segments, implementation="xla")

    def dense(q, k, v):
        """The definition of attention: all scores at once, masked, under autodiff."""
        return attention(q, k, v, scale=scale, segments=segments, implementation="reference")

    def blocks(q, k, v):
        return attention(q, k, v, scale=scale, segments=segments, implementation="xla")

    inputs, cotangent = tuple(arrays[name] for name in names), arrays["cotangent"]
    return {
        "ours": value_and_gradients(ours, inputs, cotangent),
        "masked dense attention": value_and_gradients(dense, inputs[:3], cotangent),
        "our dense attention": value_and_gradients(blocks, inputs[:3], cotangent),
    }


def grouped(case):
    """Ours, `jax.lax.ragged_dot`, and one dense matmul of as many rows with one weight."""
    x_RD, w_EDF, group_sizes_E, dy_RF = case.arrays(jnp.float32, seed=0)
    ways = {
        "ours": value_and_gradients(
            lambda x, w, sizes: grouped_matmul(x, w, sizes, implementation="xla"), (x_RD, w_EDF, group_sizes_E), dy_RF
        ),
    }
    if len(case.sizes) <= 64:  # more groups only to see the memory; ragged_dot holds [E, R, D] at once
        ways["dense matmul"] = value_and_gradients(jnp.matmul, (x_RD, w_EDF[0]), dy_RF)
        ways["ragged_dot"] = value_and_gradients(lax.ragged_dot, (x_RD, w_EDF, group_sizes_E), dy_RF)
    return ways


def experts(case):
    """Ours in one loop, and the same of three grouped matmuls and the activation, which keep everything between them."""
    *arrays, group_sizes_E, dy_RD = case.arrays(jnp.float32, seed=0)
    product = lambda rows, weights, sizes: grouped_matmul(rows, weights, sizes, implementation="xla")

    def ours(x, gate, up, down, sizes):
        return grouped_mlp(x, gate, up, down, sizes, implementation="xla")

    def separate_ops(x, gate, up, down, sizes):
        h = gated_activation(product(x, gate, sizes), product(x, up, sizes), kind="swiglu", implementation="xla")
        return product(h, down, sizes)

    return {
        "ours": value_and_gradients(ours, (*arrays, group_sizes_E), dy_RD),
        "separate ops": value_and_gradients(separate_ops, (*arrays, group_sizes_E), dy_RD),
    }


def conv(case):
    """Ours, and XLA's convolution with a group per channel."""
    x_BLD, weight_D4, _ = case.arrays(jnp.float32, seed=0)
    segments = case.segments()

    def ours(x, weight):
        return causal_conv(x, weight, segments=segments, implementation="xla")[0]

    def general(x, weight):
        y = lax.conv_general_dilated(
            x, weight.T[:, None, :], (1,), ((3, 0),), dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=weight.shape[0]
        )
        return jax.nn.silu(y)

    return {
        "ours": value_and_gradients(ours, (x_BLD, weight_D4), jnp.ones_like(x_BLD)),
        "conv_general_dilated": value_and_gradients(general, (x_BLD, weight_D4), jnp.ones_like(x_BLD)),
    }


WAYS = {
    "kda": lambda case: delta(case, kda),
    "gated_delta": lambda case: delta(case, gated_delta),
    "sparse_attention": sparse,
    "grouped_matmul": grouped,
    "grouped_mlp": experts,
    "causal_conv": conv,
}
