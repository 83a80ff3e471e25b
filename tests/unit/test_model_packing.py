"""Nothing crosses a document's border: every mixer, with dropless experts."""

import functools

import jax
import numpy as np
import pytest
import tiny

from moejax.data.batch import Batch
from moejax.model import language_model
from moejax.parallel.mesh import mesh_from

LENGTH, BORDER = 32, 15
POOLED = tiny.model("dsa", indexer=tiny.IndexerConfig(num_heads=2, head_dim=8, topk=4, pool=2, rotary_dim=4), vocab_size=128)
GATED = tiny.GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True, output_gate=True, window=5, sinks=True)
CONFIGS = {
    "gqa": tiny.model("gqa", "gqa", vocab_size=128),
    "gqa with window and sinks": tiny.model("gqa", vocab_size=128, gqa=GATED),
    "mla": tiny.model("mla", vocab_size=128),
    "dsa": tiny.model("dsa", vocab_size=128),
    "pooled dsa": POOLED,
    "gdn": tiny.model("gdn", vocab_size=128),
    "kda": tiny.model("kda", vocab_size=128),
    "kda, softplus": tiny.model("kda", vocab_size=128, kda=tiny.KDAConfig(num_heads=2, key_dim=8, value_dim=8, decay="softplus")),
}
HYBRID = tiny.model("kda", "dsa", "kda", "dsa", vocab_size=128)


@functools.cache
def compiled(config, polished):
    """Hidden states, and the loss's gradient to each token's embedding: document 2 has a token of the vocabulary for each place."""

    def run(params, batch):
        def loss(params):
            output = language_model.forward(config, params, batch)
            return language_model.cross_entropy_sums(output, batch).loss_sum, output.hidden_BLD

        (_, hidden_BLD), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return hidden_BLD, grads["embed"]["weight_VD"]

    return jax.jit(run, compiler_options={} if polished else tiny.QUICK_TO_COMPILE)


def second_document(config, first_tokens, *, polished, ids_L=None):
    """Hidden states of document 2, and the gradients to its inputs. Tokens below 64 are document 1's, the others document 2's."""
    tokens_L = np.concatenate([first_tokens, 64 + np.arange(LENGTH - BORDER)])
    ids_L = np.where(np.arange(LENGTH) < BORDER, 0, 1) if ids_L is None else ids_L
    mesh = mesh_from()
    with jax.set_mesh(mesh):
        hidden_BLD, grad_VD = compiled(config, polished)(
            tiny.lay(tiny.weights(config, bias=0.1), config, mesh), jax.device_put(Batch.build(tokens_L[None], ids_L[None]))
        )
    return np.asarray(hidden_BLD)[0, BORDER:], np.asarray(grad_VD)[64 : 64 + LENGTH - BORDER]


def check(config, *, polished=True):
    rng = np.random.default_rng(0)
    want = second_document(config, rng.integers(0, 64, BORDER), polished=polished)
    assert all(np.abs(array).max() > 1e-3 for array in want)
    for _ in range(3):
        got = second_document(config, rng.integers(0, 64, BORDER), polished=polished)
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    alone = second_document(config, np.zeros(BORDER, int), polished=polished, ids_L=np.where(np.arange(LENGTH) < BORDER, -1, 1))
    for ours, theirs in zip(alone, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.endswith(("sinks", "softplus"))])
def test_document_1_cannot_be_seen_in_document_2(name):
    check(CONFIGS[name], polished=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_document_1_cannot_be_seen_in_document_2_as_training_compiles_it(name):
    check(CONFIGS[name])


@pytest.mark.slow
def test_document_1_cannot_be_seen_in_document_2_of_a_deep_hybrid():
    check(HYBRID)
