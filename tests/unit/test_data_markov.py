"""The order-2 baseline against hand counts and the definition."""

import collections
import math

import numpy as np
import pytest

from moejax.config.data import DataConfig
from moejax.data import markov
from moejax.data.batch import Batch
from moejax.data.loader import Loader
from moejax.data.markov import MarkovModel


def steps(text):
    return ((bytes(2) + text)[at : at + 3] for at in range(len(text)))


def by_definition(train, test):
    """Mean nats with dictionaries, a document preceded by two zero bytes."""
    counts, totals = collections.Counter(), collections.Counter()
    for text in train:
        for step in steps(text):
            counts[step] += 1
            totals[step[:2]] += 1
    nats = [-math.log((counts[step] + 0.1) / (totals[step[:2]] + 25.6)) for text in test for step in steps(text)]
    return sum(nats) / len(nats)


def test_a_hand_counted_example():
    model = MarkovModel.fit([b"aab", b"ac"])
    # after (0, 0): a twice; after (0, a): a, c once each; after (a, a): b once
    want = -(math.log(2.1 / 27.6) + math.log(1.1 / 27.6) + math.log(1.1 / 26.6)) / 3
    assert model.nats_per_byte([b"aab"]) == pytest.approx(want, rel=1e-12)
    assert model.nats_per_byte([b"z"]) == pytest.approx(-math.log(0.1 / 27.6), rel=1e-12)
    assert model.nats_per_byte([b"", b"z"]) == model.nats_per_byte([b"z"])
    with pytest.raises(ValueError, match="no bytes"):
        model.nats_per_byte([b""])


def test_many_documents_agree_with_dictionaries_also_when_counted_in_chunks(monkeypatch):
    monkeypatch.setattr(markov, "_CHUNK_BYTES", 4000)
    random = np.random.default_rng(0)
    texts = [bytes(random.integers(0, 4, random.integers(0, 400)).astype(np.uint8) * 85) for _ in range(40)]  # zero bytes among them
    model = MarkovModel.fit(texts[:25])
    assert model.nats_per_byte(texts[25:]) == pytest.approx(by_definition(texts[:25], texts[25:]), rel=1e-12)


def test_a_batch_is_scored_on_exactly_the_targets_that_the_loss_counts():
    model = MarkovModel.fit([b"aab", b"ac"])
    tokens_BL = [[97, 97, 98, 97, 99, 7], [97, 98, 0, 0, 0, 0]]
    batch = Batch.build(np.array(tokens_BL), np.array([[0, 0, 0, 1, 1, -1], [0, 0, -1, -1, -1, -1]]))
    nats, count = model.batch_nats(batch)
    pairs = [(1.1, 27.6), (1.1, 26.6), (1.1, 27.6), (0.1, 27.6)]  # a after (0, a); b after (a, a); c after (0, a); b after (0, a)
    assert count == 4
    assert nats == pytest.approx(-sum(math.log(top / bottom) for top, bottom in pairs), rel=1e-12)


def test_tokens_that_are_no_bytes_are_refused():
    batch = Batch.build(np.array([[1, 256]]), np.array([[0, 0]]))
    with pytest.raises(ValueError, match="holds token 256"):
        MarkovModel.fit([b"a"]).batch_nats(batch)


def test_the_standard_library_s_baseline_is_about_1_8_nats_a_byte():
    config = DataConfig()
    model = markov.fit_baseline(config)
    baseline = markov.heldout_baseline(config, model)
    assert 1.7 < baseline < 2.0  # 1.84 on Python 3.12
    loader = Loader(config, split="heldout")
    nats, count = np.sum([model.batch_nats(batch) for batch in loader], axis=0)
    loader.close()
    assert nats / count == pytest.approx(baseline, abs=0.02)  # first bytes of pieces are not targets, second ones have less context
