"""The layout that is compared before any tensor is read."""

import jax
import jax.numpy as jnp
import optax
import pytest

from moejax.checkpoint.layout import LayoutError, check, layout


def state(width=4, dtype=jnp.float32, optimizer=None):
    params = {"embed": {"weight_VD": jnp.zeros((8, width), dtype)}}
    return {"params": params, "moments": (optimizer or optax.adamw(1e-3)).init(params)}


def test_the_layout_is_the_same_for_arrays_and_their_shapes():
    shapes = jax.eval_shape(state)
    assert layout(shapes, "adamw") == layout(state(), "adamw")
    assert layout(shapes, "adamw")["arrays"]["params/embed/weight_VD"] == "float32[8,4]"


@pytest.mark.parametrize(
    ("other", "optimizer", "words"),
    [
        (lambda: state(width=5), "adamw", ["params/embed/weight_VD: stored float32[8,4], the run has float32[8,5]"]),
        (lambda: state(dtype=jnp.bfloat16), "adamw", ["params/embed/weight_VD: stored float32[8,4], the run has bfloat16[8,4]"]),
        (lambda: state(optimizer=optax.sgd(1.0)), "sgd", ["optimizer: stored adamw, the run has sgd", "the run has nothing"]),
        (state, "muon", ["optimizer: stored adamw, the run has muon"]),
        (lambda: state() | {"more": jnp.zeros(2)}, "adamw", ["more: stored nothing, the run has float32[2]"]),
    ],
)
def test_the_first_differences_are_listed(other, optimizer, words):
    with pytest.raises(LayoutError) as error:
        check(layout(state(), "adamw"), layout(other(), optimizer), where="runs/a/checkpoints/3")
    assert [word for word in [*words, "runs/a/checkpoints/3", "nothing was read"] if word not in str(error.value)] == []


def test_many_differences_are_cut_short():
    stored, wanted = ({f"{name}{i:02}": jnp.zeros(1) for i in range(20)} for name in "ab")
    with pytest.raises(LayoutError, match="and 32 more"):
        check(layout(stored, "sgd"), layout(wanted, "sgd"), where="here")
