"""The chain from dispatch to combine on pretended devices: every transport and mesh equals the definition, values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from moejax_kernels import grouped_mlp

from moejax.config.model import MoEConfig
from moejax.moe.expert_parallel import expert_parallel
from moejax.parallel.axes import ROWS
from moejax.parallel.axes import spec as spec_of
from moejax.parallel.mesh import mesh_from

EXPERTS, CHOSEN, WIDTH, HIDDEN, BATCH, LENGTH = 16, 3, 8, 4, 8, 12
AXES = {"gate_EDF": ("expert", "embed", "mlp"), "up_EDF": ("expert", "embed", "mlp"), "down_EFD": ("expert", "mlp", "embed")}
CONFIG = MoEConfig(num_experts=EXPERTS, experts_per_token=CHOSEN)
MESHES = ({}, {"expert": 2}, {"expert": 4}, {"expert": 8}, {"fsdp": 2, "expert": 4}, {"data": 2, "fsdp": 2, "expert": 2})
HIERARCHICAL = ({"expert": 4}, {"expert": 8}, {"fsdp": 2, "expert": 4})
CHOICES = ("skewed", "one device's experts", "none but the first row's")
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
"""Of each tensor's peak: rounding of sums of tens of terms in another order."""


def arrays(dtype: str, choice: str = "skewed", seed: int = 0):
    """x, ids, probs, weights, and a cotangent; the last row is half padding."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)
    popularity_E = 1 / np.arange(1, EXPERTS + 1)
    if choice == "one device's experts":
        popularity_E[CHOSEN:] = 0
    draw = lambda: rng.choice(EXPERTS, CHOSEN, replace=False, p=popularity_E / popularity_E.sum())
    ids_BLK = np.array([[draw() for _ in range(LENGTH)] for _ in range(BATCH)], np.int32)
    ids_BLK[-1, LENGTH // 2 :] = -1
    if choice == "none but the first row's":
        ids_BLK[1:] = -1
    weights = {
        "gate_EDF": normal(EXPERTS, WIDTH, HIDDEN),
        "up_EDF": normal(EXPERTS, WIDTH, HIDDEN),
        "down_EFD": normal(EXPERTS, HIDDEN, WIDTH),
    }
    return normal(BATCH, LENGTH, WIDTH), ids_BLK, rng.random((BATCH, LENGTH, CHOSEN)).astype(dtype), weights, normal(BATCH, LENGTH, WIDTH)


def apply_experts(weights, x_WD, sizes_x):
    return grouped_mlp(x_WD, weights["gate_EDF"], weights["up_EDF"], weights["down_EFD"], sizes_x)


@functools.cache
def compiled(config: MoEConfig, mesh):
    def run(x_BLD, ids_BLK, probs_BLK, weights, dy_BLD, control):
        def layer(x_BLD, probs_BLK, weights):
            placed = {name: (weights[name], spec_of(axes)) for name, axes in AXES.items()}
            return expert_parallel(x_BLD, ids_BLK, probs_BLK, placed, apply_experts=apply_experts, config=config, control=control)

        y_BLD, pull, report = jax.vjp(layer, x_BLD, probs_BLK, weights, has_aux=True)
        return y_BLD, pull(dy_BLD), report

    return jax.jit(run)


def run(config: MoEConfig, inputs, control=None, **sizes):
    """Values, gradients of x, probs and weights, and the report, on the host."""
    mesh = mesh_from(**sizes)
    x, ids, probs, weights, dy = inputs
    rows = NamedSharding(mesh, ROWS)
    placed = {name: jax.device_put(weights[name], NamedSharding(mesh, spec_of(axes))) for name, axes in AXES.items()}
    with jax.set_mesh(mesh):
        return jax.device_get(
            compiled(config, mesh)(*jax.device_put((x, ids, probs), rows), placed, jax.device_put(dy, rows), control or {})
        )


def definition(inputs):
    """Token after token, expert after expert, and its gradients by autodiff."""
    x, ids, probs, weights, dy = inputs

    @jax.jit
    def dense(x_BLD, probs_BLK, weights):
        of_expert = lambda gate, up, down: (jax.nn.silu(x_BLD @ gate) * (x_BLD @ up)) @ down
        every_EBLD = jax.vmap(of_expert)(weights["gate_EDF"], weights["up_EDF"], weights["down_EFD"])
        weight_BLE = jnp.sum((ids[..., None] == jnp.arange(EXPERTS)) * probs_BLK[..., None], 2)
        return jnp.einsum("EBLD,BLE->BLD", every_EBLD, weight_BLE)

    y_BLD, pull = jax.vjp(dense, x, probs, weights)
    return y_BLD, pull(dy)


def check(ours, theirs, tolerance):
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-30))


def cases():
    for config, meshes in (
        (CONFIG, MESHES),
        (dataclasses.replace(CONFIG, overlap_chunks=3), MESHES[3:5]),
        *((dataclasses.replace(CONFIG, transport="hierarchical", node_size=size), HIERARCHICAL) for size in (2, 4)),
        (dataclasses.replace(CONFIG, transport="hierarchical", node_size=2, overlap_chunks=2), HIERARCHICAL[1:2]),
    ):
        for sizes in meshes:
            yield config, sizes


def label(value) -> str:
    if isinstance(value, MoEConfig):
        return f"{value.transport} {value.node_size or ''} {value.overlap_chunks} chunks"
    return " x ".join(f"{axis} {size}" for axis, size in value.items()) or "one device"


@pytest.mark.parametrize(("config", "sizes"), list(cases()), ids=label)
def test_every_transport_on_every_mesh_equals_the_definition(config, sizes):
    with jax.enable_x64():
        inputs = arrays("float64")
        *got, report = run(config, inputs, **sizes)
        check(got, definition(inputs), TOLERANCE["float64"])
        assert report["dropped"] == 0


@pytest.mark.parametrize("transport", ["all_to_all", "hierarchical"])
@pytest.mark.parametrize("choice", CHOICES)
def test_float32_and_awkward_choices_equal_the_definition(transport, choice):
    """All tokens to one device's experts, and devices whose tokens choose nothing, among them."""
    config = dataclasses.replace(CONFIG, transport=transport, node_size=2 if transport == "hierarchical" else 0)
    inputs = arrays("float32", choice)
    *got, report = run(config, inputs, fsdp=2, expert=4)
    check(got, definition(inputs), TOLERANCE["float32"])
    assert report["dropped"] == 0
    empty = np.bincount(inputs[1][inputs[1] >= 0], minlength=EXPERTS) == 0
    assert not any(array[empty].any() for array in got[1][2].values()), "an expert that nobody chose gets gradient 0"
