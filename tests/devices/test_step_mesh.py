"""No mesh changes a gradient: a whole model in float64, one layer of experts in float32."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import NamedSharding

from moejax.config.training import LossConfig
from moejax.model.context import Context, Switches
from moejax.model.feed_forward import MixtureOfExperts
from moejax.parallel.axes import ROWS, sharding
from moejax.parallel.mesh import mesh_from

CONFIG = tiny.model("kda", "dsa", precision=tiny.FLOAT64)
LOSSES = LossConfig(balance="global", balance_coef=0.1, router_z_coef=0.1, z_coef=0.01, index="sparse", index_coef=0.3)
SLOW = [{"expert": 8}, {"fsdp": 8}, {"data": 8}, {"data": 2, "fsdp": 2, "expert": 2}]
MESHES = [{"fsdp": 2, "expert": 4}, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in SLOW)]
name = lambda sizes: " x ".join(f"{axis}{size}" for axis, size in sizes.items())


def whole_model(**sizes):
    with jax.enable_x64(True):
        return tiny.gradients(CONFIG, LOSSES, tiny.weights(CONFIG, bias=0.1), tiny.batch(), **sizes)


@pytest.mark.parametrize("sizes", MESHES, ids=name)
def test_every_gradient_of_a_model_is_that_of_one_device(sizes):
    want_loss, want, want_report = whole_model()
    loss, grads, report = whole_model(**sizes)
    assert abs(loss / want_loss - 1) < 1e-12
    assert tiny.worst(grads, want)[0] < 1e-9, tiny.worst(grads, want)
    jax.tree.map(np.testing.assert_array_equal, report.layers, want_report.layers)


@functools.cache
def layer_of_experts(**sizes):
    """Loss and gradients, weights' and input's, of one float32 layer for a fixed cotangent of its output."""
    config, mesh = dataclasses.replace(CONFIG, precision=tiny.FLOAT32), mesh_from(**sizes)
    graph, state = nnx.split(nnx.eval_shape(lambda: MixtureOfExperts(config, rngs=nnx.Rngs(0))))
    rng, batch = np.random.default_rng(0), tiny.batch()
    place = lambda param: sharding(mesh, param.get_metadata()["out_sharding"])
    draw = lambda shape: rng.normal(0, 0.3, shape).astype(np.float32)
    state = jax.tree.map(
        lambda param: param.replace(jax.device_put(draw(param.shape), place(param))),
        state,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    x_BLD, dy_BLD, batch = jax.device_put((draw((8, 16, 16)), draw((8, 16, 16)), batch), NamedSharding(mesh, ROWS))

    @jax.jit
    def run(state, x_BLD, dy_BLD, batch):
        def loss(state, x_BLD):
            context = Context(segments=batch.segments, positions_BL=batch.positions_BL, switches=Switches())
            return jax.numpy.vdot(nnx.merge(graph, state)(x_BLD, context)[0], dy_BLD)

        return jax.value_and_grad(loss, (0, 1))(state, x_BLD)

    with jax.set_mesh(mesh):
        return jax.device_get(run(state, x_BLD, dy_BLD, batch))


@pytest.mark.parametrize(
    "sizes", [{"expert": 2}, {"expert": 8}, {"fsdp": 2, "expert": 4}, pytest.param({"expert": 4}, marks=pytest.mark.slow)], ids=name
)
def test_every_gradient_of_a_float32_layer_is_that_of_one_device(sizes):
    _, want = layer_of_experts()
    _, grads = layer_of_experts(**sizes)
    assert tiny.worst(grads, want)[0] < 1e-6, tiny.worst(grads, want)
