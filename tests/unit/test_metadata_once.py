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
HYBRID = tiny.model(*("kda", "gqa") * UNITS)
CONFIGS = {
    "kda, gqa": HYBRID,
    "dsa": tiny.model(*("dsa",) * UNITS),
    "gdn, mla": tiny.model(*("gdn", "mla") * UNITS),
}
RUNNING = {"cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp", "reduce_window", "sort", "scan", "while"}
"""What borders are made with: each of its results depends on a whole row."""


CALLS = {"jit", "custom_vjp_call", "custom_jvp_call", "remat2", "checkpoint"}
"""Hand all they are given to what is inside."""


@dataclasses.dataclass
class Found:
    """What the layers of a program compute from segments, positions and constants alone."""

    scans: list[str] = dataclasses.field(default_factory=list)
    """Of layers: forward and backward."""
    running: set[str] = dataclasses.field(default_factory=set)
    """Primitives of RUNNING."""
    read: set[str] = dataclasses.field(default_factory=set)
    """Fields of Segments that a layer's operation reads."""
    largest: int = 0
    """Numbers of the largest result."""


def metadata_work(config, batch, *, rebuild: bool) -> Found:
    """Looks at the step's forward and backward scan over layers, and all that is inside."""
    losses = LOSSES if "dsa" in config.mixers else dataclasses.replace(LOSSES, index="none")
    switches = switches_for(losses, rebuild=rebuild)

    def step(segments, positions_BL, params, tokens_BL):
        of_batch = dataclasses.replace(batch, segments=segments, positions_BL=positions_BL, tokens_BL=tokens_BL)
        run = lambda params: objective(config, losses, params, of_batch, totals(of_batch), switches)
        return jax.value_and_grad(run, has_aux=True)(params)

    with jax.set_mesh(mesh_from()):
        jaxpr = jax.make_jaxpr(step)(batch.segments, batch.positions_BL, language_model.shapes(config), batch.tokens_BL).jaxpr
    names = [field.name for field in dataclasses.fields(Segments) if getattr(batch.segments, field.name) is not None] + ["positions_BL"]
    sources = [frozenset({name}) for name in names]
    found = Found()
    _follow(jaxpr, sources + [None] * (len(jaxpr.invars) - len(sources)), found, in_layer=False)
    return found


def _follow(jaxpr, given, found: Found | None, *, in_layer: bool) -> list:
    """Where each result of a jaxpr comes from: the fields that alone it is made of (none: a constant), or None: from other things too.

    Args:
      given: the same of its inputs.
      found: where to note what layers do; None: nowhere.
    """
    origins = dict(zip(jaxpr.invars, given, strict=True)) | dict.fromkeys(jaxpr.constvars, frozenset())
    of = lambda var: frozenset() if isinstance(var, core.Literal) else origins[var]
    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [of(var) for var in eqn.invars]
        outputs = [_joined(inputs)] * len(eqn.outvars)
        if name == "optimization_barrier":
            outputs = inputs
        elif name == "scan":
            opens = not in_layer and eqn.params["length"] == UNITS
            if opens and found:
                found.scans.append("backward" if eqn.params["reverse"] else "forward")
            consts, carry, _ = map(list, eqn.params["ft_in"].update(range(len(inputs))).unpack())
            outputs = _loop(_open(eqn.params["jaxpr"]), inputs, len(consts), len(carry), found, in_layer=in_layer or opens)
        elif name == "while":
            first = eqn.params["body_nconsts"]
            inputs = inputs[eqn.params["cond_nconsts"] :]
            outputs = _loop(_open(eqn.params["body_jaxpr"]), inputs, first, len(inputs) - first, found, in_layer=in_layer)
        elif inner := list(_inner(eqn.params)):
            results = [_follow(each, inputs[len(inputs) - len(each.invars) :], found, in_layer=in_layer) for each in inner]
            outputs = [_joined([*each, *inputs[:1]] if name == "cond" else each) for each in zip(*results, strict=True)]
        origins |= zip(eqn.outvars, outputs, strict=True)
        if found and in_layer and name not in CALLS:
            found.read |= set().union(*(each for each in inputs if each))
            if any(outputs) and None not in outputs:  # the loop over an attention's tiles begins and ends by the borders, and carries more
                found.running |= {name} & RUNNING
                found.largest = max(found.largest, *(math.prod(var.aval.shape) for var in eqn.outvars))
    return [of(var) for var in jaxpr.outvars]


def _loop(body, inputs, first: int, num_carry: int, found, *, in_layer: bool) -> list:
    """What leaves a loop: what is carried comes from where it came from at the start and from where the body has it."""
    inputs, outputs = list(inputs), None
    while outputs is None or any(inputs[first + at] != outputs[at] for at in range(num_carry)):
        if outputs is not None:
            inputs[first : first + num_carry] = [_joined(pair) for pair in zip(inputs[first:], outputs[:num_carry], strict=False)]
        outputs = _follow(body, inputs, None, in_layer=in_layer)
        outputs[:num_carry] = [_joined(pair) for pair in zip(inputs[first:], outputs[:num_carry], strict=False)]
    return _follow(body, inputs, found, in_layer=in_layer) if found else outputs


def _joined(origins):
    """Of what is made of all of them."""
    return None if None in origins else frozenset().union(*origins)


def _inner(params):
    """Jaxprs among the parameters of an equation."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else [value]:
            if isinstance(each, core.ClosedJaxpr | core.Jaxpr):
                yield _open(each)


def _open(jaxpr):
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def long_batch() -> Batch:
    rng = np.random.default_rng(0)
    ids_BL = np.sort(rng.integers(0, 9, (2, LENGTH)), 1)
    ids_BL[1, -100:] = -1
    return Batch.build(rng.integers(0, 64, ids_BL.shape), ids_BL)


def check_nothing_is_built(found: Found) -> None:
    assert found.scans == ["forward", "backward"] and "ids_BL" in found.read and found.largest
    assert not found.running
    assert "cu_seqlens_BN" not in found.read
    assert found.largest < LENGTH**2 / 2  # a mask of one of the two rows has twice that, the largest tile half of it


@pytest.mark.parametrize("mixers", ["kda, gqa", "dsa", pytest.param("gdn, mla", marks=pytest.mark.slow)])
def test_no_layer_builds_borders_or_masks_of_whole_rows_and_one_that_is_asked_to_does(mixers):
    config = CONFIGS[mixers]
    check_nothing_is_built(metadata_work(config, long_batch(), rebuild=False))
    again = metadata_work(config, long_batch(), rebuild=True)
    with pytest.raises(AssertionError):
        check_nothing_is_built(again)
    assert again.running >= {"cummax", "cummin", "sort"}


def test_no_layer_builds_the_borders_of_trees():
    ids_BL = np.repeat(np.arange(8), LENGTH // 8)[None]
    tree = Batch.build(np.zeros_like(ids_BL), ids_BL, parent=[{1: 0, 2: 0, 5: 4}], num_segments=16)
    check_nothing_is_built(metadata_work(HYBRID, tree, rebuild=False))


def test_borders_built_inside_a_program_are_those_of_the_host():
    segments = long_batch().segments
    jax.tree.map(np.testing.assert_array_equal, jax.jit(Segments.rebuilt)(segments), segments)


def test_a_tree_cannot_be_rebuilt():
    segments = Segments.build(np.array([[0, 0, 1, 2]]), parent=[{1: 0, 2: 0}])
    with pytest.raises(ValueError, match="segments with parents cannot be rebuilt"):
        segments.rebuilt()


@pytest.mark.slow
def test_loss_and_gradients_do_not_depend_on_where_borders_are_built():
    config = tiny.model("kda", "kda")
    batch, params = tiny.batch(), tiny.weights(config, bias=0.1)
    losses = dataclasses.replace(LOSSES, index="none")

    def run(rebuild):
        switches = switches_for(losses, rebuild=rebuild)
        loss = lambda params, batch: objective(config, losses, params, batch, totals(batch), switches)
        with jax.set_mesh(mesh_from()):
            return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=tiny.QUICK_TO_COMPILE)(params, batch))

    jax.tree.map(np.testing.assert_array_equal, run(True), run(False))
