"""The loss of 8,192 tokens x 163,840 columns x 7,168, compiled for H200s: what a device holds beside its results."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config.mesh import MeshConfig
from moejax.losses.cross_entropy import cross_entropy
from moejax.model.language_model import Output, cross_entropy_sums
from moejax.parallel.axes import ROWS, sharding
from moejax.parallel.mesh import make_mesh
from moejax.plan.schedule import exchanges
from moejax.plan.targets import TARGETS, compile_for, devices

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


def with_cotangent(num: int, **options):
    """The loss and the gradients of its first `num` arrays for a cotangent that is known only when it runs."""

    def run(cotangent, *arrays):
        loss, pull = jax.vjp(lambda *some: cross_entropy(*some, *arrays[num:], **options).loss_sum, *arrays[:num])
        return loss, pull(cotangent)

    return run


@pytest.mark.parametrize("gradients", ["forward", "recompute"])
def test_beyond_the_head_s_gradient_at_most_600_mb_are_held_the_hidden_states_gradient_among_them(gradients):
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    assert held_bytes(with_cotangent(2, z_coef=1e-4, gradients=gradients), scalar, *shapes()) - HEAD_BYTES <= BAR
    assert held_bytes(with_cotangent(1, z_coef=1e-4, gradients=gradients), scalar, *shapes()) <= BAR  # a frozen head has none


def test_a_tied_head_holds_no_more():
    hidden, head, *rest = shapes()

    def run(hidden_BLD, embed_VD, targets_BL, weights_BL):
        return jax.value_and_grad(lambda hidden, embed: cross_entropy(hidden, embed.T, targets_BL, weights_BL, tied=True).loss_sum, (0, 1))(
            hidden_BLD, embed_VD
        )

    assert held_bytes(run, hidden, jax.ShapeDtypeStruct((V, D), head.dtype), *rest) - HEAD_BYTES <= BAR


def test_on_8_devices_each_holds_its_part_of_the_head_and_scatters_a_piece_beside_a_matmul():
    mesh = make_mesh(MeshConfig(fsdp=8), devices(TARGETS["h200"], 8))
    rows, head = NamedSharding(mesh, ROWS), sharding(mesh, ("embed", "vocab"))
    like = lambda shape, dtype, where: jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def run(hidden_BLD, unembed_DV, targets_BL, weights_BL):
        batch = types.SimpleNamespace(targets_BL=targets_BL, weights_BL=weights_BL)
        loss = lambda hidden, unembed: cross_entropy_sums(Output(hidden, unembed, {}), batch).loss_sum
        return jax.value_and_grad(loss, (0, 1))(hidden_BLD, unembed_DV)

    places = (NamedSharding(mesh, P()), (rows, head))
    inputs = like((8, T, D), jnp.bfloat16, rows), like((D, V), jnp.float32, head)
    with jax.set_mesh(mesh):
        lowered = jax.jit(run, out_shardings=places).lower(*inputs, like((8, T), jnp.int32, rows), like((8, T), jnp.float32, rows))
        program = lowered.compile()
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes - HEAD_BYTES / 8 <= BAR
    (scattered,) = exchanges(program, "reduce-scatter")
    assert scattered.operand_bytes == 4 * D * 2304 and scattered.meanwhile
