"""Every family on one device against values of other libraries: logits, loss and the gradient of every tensor."""

import golden_models
import jax
import numpy as np
import pytest
from golden_models import FAMILIES, MODELS, ROUNDED_ROUTERS, distance

import moejax


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_equals_the_golden_values(family):
    golden_models.check(family, "float64")


@pytest.mark.parametrize("family", ROUNDED_ROUTERS)
def test_float64_equals_the_library_once_its_router_is_float64_too(family):
    golden_models.check(family, "float64", source="float64")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_the_documents_alone(family):
    """Compiles nothing anew: shapes are those of the float64 test, padding fills the row of a document alone."""
    tokens_BL = np.load(MODELS / family / "io.npz")["input_ids"][:2]
    length, border = tokens_BL.shape[1], 23
    with jax.enable_x64(True):
        model = moejax.load_hf(MODELS / family, dtype="float64")

        def run(tokens_L, ids_L):
            pad = lambda array, value: np.pad(array, (0, length - array.size), constant_values=value)
            inputs = np.stack([pad(tokens_L, 0), np.zeros(length, int)]), np.stack([pad(ids_L, -1), np.full(length, -1)])
            loss, grads = model.loss_and_grads(*inputs)
            return np.asarray(model(*inputs))[0], float(loss), model.to_hf(grads)

        tokens_L, ids_L = tokens_BL[0], np.arange(length) // border > 0
        packed, alone = (
            run(tokens_L, ids_L.astype(int)),
            [run(tokens_L[ids_L == which], np.zeros(sum(ids_L == which), int)) for which in (False, True)],
        )
    pairs = border - 1, length - border - 1
    mean = lambda first, second: (pairs[0] * first + pairs[1] * second) / sum(pairs)
    assert distance(packed[0][:border], alone[0][0][:border]) < 1e-9
    assert distance(packed[0][border:], alone[1][0][: length - border]) < 1e-9
    assert abs(packed[1] - mean(alone[0][1], alone[1][1])) < 1e-9
    golden_models.compare_gradients(packed[2], {key: mean(grad, alone[1][2][key]) for key, grad in alone[0][2].items()}, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_the_golden_values(family):
    golden_models.check(family, "float32")
