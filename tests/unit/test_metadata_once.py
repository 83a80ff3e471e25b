"""Borders of documents are built once, on the host: no layer builds them anew, unless it is asked to."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import tiny
from jax.extend import core
from moejax_kernels.segments import Segments

from moejax.config.training import LossConfig
from moejax.data.batch import Batch
from moejax.model import language_model
from moejax.model.objective import objective, switches_for, totals
from moejax.parallel.mesh import mesh_from

LENGTH, UNITS = 2048, 3
LOSSES = LossConfig(balance="sequence", router_z_coef=0.1, bias_update="quantile", index="sparse")
CONFIG = tiny.model(*("kda", "gqa", "gdn", "mla") * UNITS)
SPARSE = tiny.model(*("dsa",) * UNITS)
RUNNING = {"cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp", "reduce_window", "sort", "scan", "while"}
"""What borders are made with: each of its results depends on a whole row."""


@dataclasses.dataclass
class Found:
    """What the layers of a program compute from segments and positions alone."""

    running: set[str] = dataclasses.field(default_factory=set)
    """Primitives of RUNNING."""
    largest: int = 0
    """Numbers of the largest result."""
    reads_cu_seqlens: bool = False


def metadata_work(config, batch, *, rebuild: bool) -> Found:
    """Looks at the step's forward and backward scan over layers, and all that is inside."""
    losses = LOSSES if "dsa" in config.mixers else dataclasses.replace(LOSSES, index="none")
    switches = switches_for(losses, rebuild=rebuild)

    def step(segments, positions_BL, params, tokens_BL):
        of_batch = dataclasses.replace(batch, segments=segments, positions_BL=positions_BL, tokens_BL=tokens_BL)
        run = lambda params: objective(config, losses, params, of_batch, totals(of_batch), switches)
        return jax.value_and_grad(run, has_aux=True)(params)

    arguments = batch.segments, batch.positions_BL, language_model.shapes(config), batch.tokens_BL
    with jax.set_mesh(mesh_from()):
        jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
    metadata = jaxpr.invars[: len(jax.tree.leaves(arguments[:2]))]
    fields = [field.name for field in dataclasses.fields(Segments) if getattr(batch.segments, field.name) is not None]
    found, scans = Found(), []
    _walk(jaxpr, set(metadata), {metadata[fields.index("cu_seqlens_BN")]}, found, scans, in_layer=False)
    assert scans == [UNITS, UNITS], "the scans over layers, forward and backward"
    return found


def _walk(jaxpr, pure, cu_seqlens, found: Found, scans, *, in_layer: bool) -> None:
    """Follows what depends on `pure` variables and constants alone; adds those results to `pure`."""
    known = lambda var: isinstance(var, core.Literal) or var in pure or var in constant
    constant = set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        opens_layers = name == "scan" and eqn.params["length"] == UNITS and not in_layer
        if opens_layers:
            scans.append(UNITS)
        for inner in _inner(eqn.params):
            given = eqn.invars[len(eqn.invars) - len(inner.invars) :]  # of a cond and a while the first are something else
            passed = lambda variables, given=given, inner=inner: {
                var for var, of in zip(inner.invars, given, strict=True) if not isinstance(of, core.Literal) and of in variables
            }
            _walk(inner, passed(pure), passed(cu_seqlens), found, scans, in_layer=in_layer or opens_layers)
        found.reads_cu_seqlens |= in_layer and any(not isinstance(var, core.Literal) and var in cu_seqlens for var in eqn.invars)
        if name == "optimization_barrier":
            pure |= {out for out, of in zip(eqn.outvars, eqn.invars, strict=True) if known(of)}
        elif not all(map(known, eqn.invars)):
            continue
        elif not any(not isinstance(var, core.Literal) and var in pure for var in eqn.invars):
            constant |= set(eqn.outvars)
        else:
            pure |= set(eqn.outvars)
            if in_layer:
                found.running |= {name} & RUNNING
                found.largest = max(found.largest, *(math.prod(out.aval.shape) for out in eqn.outvars))


def _inner(params):
    """Jaxprs among the parameters of an equation."""
    for parameter, value in params.items():
        if parameter == "cond_jaxpr":  # one number, whether a while goes on
            continue
        for each in value if isinstance(value, tuple | list) else [value]:
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def long_batch() -> Batch:
    rng = np.random.default_rng(0)
    ids_BL = np.sort(rng.integers(0, 9, (2, LENGTH)), 1)
    ids_BL[1, -100:] = -1
    return Batch.build(rng.integers(0, 64, ids_BL.shape), ids_BL)


@pytest.mark.parametrize("config", [CONFIG, SPARSE], ids=["linear and softmax attention", "sparse attention"])
def test_no_layer_builds_borders_or_masks_of_whole_rows_and_one_that_is_asked_to_does(config):
    batch = long_batch()
    once, again = (metadata_work(config, batch, rebuild=rebuild) for rebuild in (False, True))
    assert once.running == set()
    assert not once.reads_cu_seqlens
    assert once.largest < LENGTH**2 / 2  # two rows: a mask of one would have twice that; tiles are far below
    assert again.running >= {"cummax", "cummin", "sort"}


def test_borders_built_inside_a_program_are_those_of_the_host():
    segments = long_batch().segments
    jax.tree.map(np.testing.assert_array_equal, jax.jit(Segments.rebuilt)(segments), segments)


def test_a_tree_cannot_be_rebuilt():
    segments = Segments.build(np.array([[0, 0, 1, 2]]), parent=[{1: 0, 2: 0}])
    with pytest.raises(ValueError, match="segments with parents cannot be rebuilt"):
        segments.rebuilt()


def test_loss_and_gradients_do_not_depend_on_where_borders_are_built():
    config = tiny.model("kda", "gqa", "kda", "gqa")
    batch, params = tiny.batch(), tiny.weights(config, bias=0.1)
    losses = dataclasses.replace(LOSSES, index="none")

    def run(rebuild):
        switches = switches_for(losses, rebuild=rebuild)
        loss = lambda params, batch: objective(config, losses, params, batch, totals(batch), switches)
        with jax.set_mesh(mesh_from()):
            return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=tiny.QUICK_TO_COMPILE)(params, batch))

    jax.tree.map(np.testing.assert_array_equal, run(True), run(False))
