"""No mesh changes a gradient: a whole model in float64, one layer of experts in float32."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import NamedSharding

from moejax.config.moe import AdaptiveConfig
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


CHAINS = {
    "hierarchical in chunks with roomy buffers": {"transport": "hierarchical", "node_size": 2, "overlap_chunks": 2, "capacity_factor": 8.0},
    "roomy buffers whose capacity moves": {"capacity_factor": 8.0, "adaptive": AdaptiveConfig(highest=8.0)},
    "similar rows that nobody needs": {"capacity_factor": 8.0, "overflow": "similar"},
}
"""Ways of the rows that must not change a number."""


def whole_model(changes=None, router=None, **sizes):
    moe = dataclasses.replace(CONFIG.moe, **changes or {}, router=dataclasses.replace(CONFIG.moe.router, **router or {}))
    config = dataclasses.replace(CONFIG, moe=moe)
    with jax.enable_x64(True):
        return tiny.gradients(config, LOSSES, tiny.weights(config, bias=0.1), tiny.batch(), **sizes)


@pytest.mark.parametrize("sizes", MESHES, ids=name)
def test_every_gradient_of_a_model_is_that_of_one_device(sizes):
    want_loss, want, want_report = whole_model()
    loss, grads, report = whole_model(**sizes)
    assert abs(loss / want_loss - 1) < 1e-12
    assert tiny.worst(grads, want)[0] < 1e-9, tiny.worst(grads, want)
    jax.tree.map(np.testing.assert_array_equal, report.layers, want_report.layers)


@pytest.mark.parametrize(
    "chain", [name if i == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(CHAINS)], ids=lambda name: name
)
def test_no_way_of_the_rows_changes_a_gradient_of_a_model(chain):
    want_loss, want, want_report = whole_model()
    loss, grads, report = whole_model(CHAINS[chain], fsdp=2, expert=4)
    assert abs(loss / want_loss - 1) < 1e-12
    assert tiny.worst(grads, want)[0] < 1e-9, tiny.worst(grads, want)
    for section, places in want_report.layers.items():
        for place, layer in places.items():
            got = report.layers[section][place]
            assert all((got[name] == array).all() for name, array in layer.items())
            assert not got["weight_lost"].any() and not got["dropped"].any()


@pytest.mark.slow
def test_the_soft_constraint_counts_over_all_devices():
    router = {"overload_strength": 1.0, "overload_threshold": 1.0}
    want_loss, want, want_report = whole_model(router=router)
    loss, grads, report = whole_model(router=router, fsdp=2, expert=4)
    assert abs(loss / want_loss - 1) < 1e-12 and abs(loss / whole_model()[0] - 1) > 1e-6
    assert tiny.worst(grads, want)[0] < 1e-9, tiny.worst(grads, want)
    layers, want_layers = jax.tree.leaves(report.layers), jax.tree.leaves(want_report.layers)
    for ours, theirs in zip(layers, want_layers, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


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
