"""The mean over documents, and what logits the loss and the samples see."""

import dataclasses

import jax
import numpy as np
import tiny

from moejax.config.training import LossConfig
from moejax.model import language_model
from moejax.parallel.mesh import mesh_from

CONFIG = tiny.model("gqa", precision=tiny.FLOAT64, logit_cap=3.0, tie_embeddings=True)
SEQUENCES = LossConfig(z_coef=0.01, average="sequences", chunk_tokens=5, chunk_vocab=24)
SPREAD = {"fsdp": 2, "expert": 2, "accumulation": 2}
"""The head lies in four parts, the rows of each microbatch too."""


def odd_batch():
    """Documents of different lengths, some with unequal weights, one that is ignored by label and one by weight."""
    batch = tiny.batch()
    weights_BL = batch.weights_BL * np.random.default_rng(1).choice([0.0, 0.5, 1.0], batch.weights_BL.shape)
    targets_BL = np.where(batch.segments.ids_BL == 1, -100, batch.targets_BL)
    targets_BL[4:] = batch.targets_BL[4:]
    weights_BL[0] = np.where(batch.segments.ids_BL[0] == 0, 0, weights_BL[0])
    return dataclasses.replace(batch, targets_BL=targets_BL.astype(np.int32), weights_BL=weights_BL.astype(np.float32))


def by_document(batch):
    """Weights that give each document with a target 1 in all, and the number of such documents."""
    weights_BL, number = np.where(batch.targets_BL == -100, 0, batch.weights_BL).astype(np.float64), 0
    for weights_L, ids_L in zip(weights_BL, batch.segments.ids_BL, strict=True):
        for document in set(ids_L):
            total = weights_L[ids_L == document].sum()
            if total:
                weights_L[ids_L == document] /= total
                number += 1
    return weights_BL, number


def run(losses, batch, **kwargs):
    with jax.enable_x64(True):
        return tiny.gradients(CONFIG, losses, tiny.weights(CONFIG), batch, **kwargs)


def test_every_document_counts_the_same_on_every_mesh_and_in_microbatches():
    batch = odd_batch()
    weights_BL, number = by_document(batch)
    got = run(SEQUENCES, batch, **SPREAD)
    want = run(LossConfig(z_coef=0.01, chunk_vocab=64, gradients="recompute"), dataclasses.replace(batch, weights_BL=weights_BL))
    assert weights_BL.sum() == number > 8
    assert abs(float(got[0] - want[0])) <= 1e-12 * float(want[0])
    assert tiny.worst(got[1], want[1])[0] < 1e-12, tiny.worst(got[1], want[1])

    with jax.enable_x64(True), jax.set_mesh(mesh_from()):
        logits_BLV = np.asarray(jax.jit(lambda params: language_model.logits(CONFIG, params, batch))(tiny.weights(CONFIG)))
    assert np.abs(logits_BLV).max() < CONFIG.logit_cap
    lse_BL = np.log(np.exp(logits_BLV).sum(-1))
    nll_BL = lse_BL - np.take_along_axis(logits_BLV, np.maximum(batch.targets_BL, 0)[..., None], -1)[..., 0]
    loss = np.sum(weights_BL * (nll_BL + 0.01 * lse_BL**2)) / number
    assert abs(float(got[0]) - loss) < 1e-12 * loss
    assert abs(float(got[2].nll) - np.sum(weights_BL * nll_BL)) < 1e-12 * number


def test_a_batch_that_is_ignored_as_a_whole_has_no_loss_and_no_gradient():
    batch = tiny.batch()
    loss, grads, report = run(SEQUENCES, dataclasses.replace(batch, targets_BL=np.full_like(batch.targets_BL, -100)), **SPREAD)
    assert loss == 0 and report.nll == 0
    assert not any(grad.any() for grad in jax.tree.leaves(grads))
