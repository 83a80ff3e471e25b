"""index_kl's Triton kernels in Triton's interpreter: losses and gradients of the definition, chosen keys and all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.index_kl import index_kl
from moejax_kernels.segments import Segments

FORWARD, BACKWARD = 1e-5, 1e-4
"""RMS of the error over RMS of the value: float32 sums in another order."""
LEAST = 0.1
"""RMS that errors are measured by at least: a loss is a difference of numbers around 1, which may be nearly the same."""
PACKED = np.repeat([0, 1, -1, 2], (1, 4, 1, 3))[None]


def draw(seed, *, length, heads, key_heads, width, index_heads, index_width):
    random = np.random.default_rng(seed)
    sizes = (heads, width), (key_heads, width), (index_heads, index_width), (index_width,), (index_heads,)
    # numbers of the index so large that its softmax is neither flat nor one key's alone
    return [
        jnp.asarray(random.standard_normal((1, length, *size)) * factor, jnp.float32)
        for size, factor in zip(sizes, (1, 1, 0.2, 1, 1), strict=True)
    ]


def run(arrays, ids, dkl, segments, implementation):
    loss = lambda *arrays: index_kl(*arrays, ids, scale=0.1, segments=segments, implementation=implementation)
    kl, transpose = jax.vjp(loss, *arrays)
    return kl, *transpose(dkl)


def close(ours, theirs):
    for number, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error = np.sqrt(np.mean((got - want) ** 2))
        assert error <= (BACKWARD if number else FORWARD) * max(np.sqrt(np.mean(want**2)), LEAST)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_losses_and_gradients_match_the_definition(packed, chosen):
    """Ids of the next document, of later tokens and of padding are among the chosen, and fewer keys are visible than asked for."""
    segments = Segments.build(PACKED) if packed else None
    length = PACKED.shape[1] if packed else 5
    sizes = dict(heads=4, key_heads=2, width=96) if packed else dict(heads=17, key_heads=1, width=64)
    arrays = draw(0, length=length, index_heads=3, index_width=64, **sizes)
    random = np.random.default_rng(1)
    ids = np.array([[random.permutation(length)[:4] for _ in range(length)]], np.int32)
    ids[0, ::3, 2:] = -1
    dkl = jnp.asarray(random.standard_normal((1, length)), jnp.float32)
    got, want = (run(arrays, jnp.asarray(ids) if chosen else None, dkl, segments, name) for name in ("triton_gpu", "reference"))
    close(got, want)
    assert not np.asarray(got[1]).any()
    assert not np.asarray(got[2]).any()
    if packed:
        assert not np.asarray(got[0])[PACKED < 0].any()


@pytest.mark.parametrize("chosen", [True, False])
def test_another_document_has_exactly_no_influence(chosen):
    segments = Segments.build(PACKED)
    arrays, other = (draw(seed, length=9, heads=2, key_heads=1, width=64, index_heads=2, index_width=64) for seed in (2, 3))
    changed = [jnp.concatenate([new[:, :6], old[:, 6:]], axis=1) for new, old in zip(other, arrays, strict=True)]
    ids = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (1, 9, 9)) if chosen else None
    dkl = jnp.zeros((1, 9)).at[:, 6:].set(1.0)
    before, after = (run(inputs, ids, dkl, segments, "triton_gpu") for inputs in (arrays, changed))
    for ours, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(ours[:, 6:], theirs[:, 6:])
    for gradient in after[1:]:
        assert not np.asarray(gradient)[:, :6].any()
