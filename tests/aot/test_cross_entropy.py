"""The loss of 8,192 tokens x 163,840 columns x 7,168, compiled for one H200: what it holds beside its results."""

import jax
import jax.numpy as jnp
import pytest

from moejax.losses.cross_entropy import cross_entropy
from moejax.plan.targets import TARGETS, compile_for

pytestmark = pytest.mark.aot
T, V, D = 8192, 163840, 7168
HEAD_BYTES = 4 * D * V
"""The head's gradient in float32, 4.70 GB."""
BAR = 0.6e9


def shapes():
    like = jax.ShapeDtypeStruct
    return like((1, T, D), jnp.bfloat16), like((D, V), jnp.float32), like((1, T), jnp.int32), like((1, T), jnp.float32)


def held_bytes(function, *inputs) -> int:
    """Temporaries and results."""
    memory = compile_for(TARGETS["h200"], function, *inputs)[1].memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def with_cotangent(argnums, **options):
    """The loss and its gradients for a cotangent that is known only when it runs."""

    def run(cotangent, *arrays):
        of = lambda *some: cross_entropy(*(dict(enumerate(arrays)) | dict(zip(argnums, some, strict=True))).values(), **options).loss_sum
        loss, pull = jax.vjp(of, *(arrays[at] for at in argnums))
        return loss, pull(cotangent)

    return run


@pytest.mark.parametrize("gradients", ["forward", "recompute"])
def test_beyond_the_head_s_gradient_at_most_600_mb_are_held_the_hidden_states_gradient_among_them(gradients):
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    assert held_bytes(with_cotangent((0, 1), z_coef=1e-4, gradients=gradients), scalar, *shapes()) - HEAD_BYTES <= BAR
    assert held_bytes(with_cotangent((0,), z_coef=1e-4, gradients=gradients), scalar, *shapes()) <= BAR  # a frozen head has none


def test_a_tied_head_holds_no_more():
    hidden, head, *rest = shapes()

    def run(hidden_BLD, embed_VD, targets_BL, weights_BL):
        return jax.value_and_grad(lambda hidden, embed: cross_entropy(hidden, embed.T, targets_BL, weights_BL, tied=True).loss_sum, (0, 1))(
            hidden_BLD, embed_VD
        )

    assert held_bytes(run, hidden, jax.ShapeDtypeStruct((V, D), head.dtype), *rest) - HEAD_BYTES <= BAR
