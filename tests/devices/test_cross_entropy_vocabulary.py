"""A head that is spread over devices, columns or rows of it: each device streams its own, and the sums meet."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.losses.cross_entropy import cross_entropy

B, L, D, V = 2, 7, 6, 20
PLACES = {
    "columns over 4": {"head": P(None, "tensor"), "vocab_axis": "tensor"},
    "rows over 2": {"head": P("fsdp", None), "width_axes": ("fsdp",)},
    "both": {"head": P("fsdp", "tensor"), "vocab_axis": "tensor", "width_axes": ("fsdp",)},
    "both, tied": {"head": P("fsdp", "tensor"), "vocab_axis": "tensor", "width_axes": ("fsdp",), "tied": True},
}


def arrays():
    rng = np.random.default_rng(0)
    targets_BL = rng.integers(0, V, (B, L))
    targets_BL[0, :4] = 0, 4, 5, V - 1  # first and last columns of devices
    targets_BL[1] = -100  # nothing to learn for half of the devices
    return rng.standard_normal((B, L, D)), rng.standard_normal((D, V)), targets_BL, rng.random((B, L))


def one_device(*arrays, **options):
    sums = cross_entropy(*arrays, z_coef=0.1, logit_cap=4.0, **options)
    return 3.0 * sums.loss_sum, sums.weight_sum


def spread(place, check_vma, **options):
    """The same loss with rows over 2 devices and the head over 4, 2 or 8."""
    place = dict(place)
    head = place.pop("head")

    def local(*arrays):
        loss = one_device(*arrays, **place, **options)
        return loss if "width_axes" in place else jax.lax.psum(loss, "fsdp")

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor"))
    in_specs = (P("fsdp"), head, P("fsdp"), P("fsdp"))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma)


PIECES, WHOLE = (3, 2), (0, V)
QUICK = [(PIECES, "forward", True), (PIECES, "recompute", False), (WHOLE, "forward", False)]


@pytest.mark.parametrize("chunks, gradients, check_vma", [*QUICK, pytest.param(WHOLE, "recompute", True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", PLACES)
def test_eight_devices_give_the_values_and_gradients_of_one(place, chunks, gradients, check_vma):
    options = {"chunk_tokens": chunks[0], "chunk_vocab": chunks[1], "gradients": gradients}
    with jax.enable_x64(True):
        both = lambda loss: jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 3), has_aux=True))(*map(jnp.asarray, arrays()))
        got, want = both(spread(PLACES[place], check_vma, **options)), both(one_device)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13 * np.abs(theirs).max())


def test_no_device_ever_holds_the_whole_head_or_its_gradient():
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in map(jnp.asarray, arrays())]
    loss = lambda *arrays: spread(PLACES["both"], True, chunk_vocab=2)(*arrays)[0]
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().as_text()
    assert f"[{D // 2},{V // 4}]" in text
    assert not re.search(rf"\[{D},({V}|{V // 4})\]", text)
