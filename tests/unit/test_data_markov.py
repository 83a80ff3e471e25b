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
from moejax.data.packing import fill


def steps(text):
    return ((bytes(2) + text)[at : at + 3] for at in range(len(text)))


def by_definition(train, test):
    """Mean nats of all bytes but the first of each text, with dictionaries, a document preceded by two zero bytes."""
    counts, totals = collections.Counter(), collections.Counter()
    for text in train:
        for step in steps(text):
            counts[step] += 1
            totals[step[:2]] += 1
    nats = [-math.log((counts[step] + 0.1) / (totals[step[:2]] + 25.6)) for text in test for step in list(steps(text))[1:]]
    return sum(nats) / len(nats)


def nats_per_target(model, texts):
    """Of a batch with one text a row."""
    rows = [[np.frombuffer(text, np.uint8).astype(np.int32)] for text in texts]
    nats, count = model.batch_nats(Batch.build(*fill(rows, max(map(len, texts)))))
    return nats / count


def test_many_documents_agree_with_dictionaries_also_when_counted_in_chunks(monkeypatch):
    monkeypatch.setattr(markov, "_CHUNK_BYTES", 4000)
    random = np.random.default_rng(0)
    texts = [bytes(random.integers(0, 4, random.integers(0, 400)).astype(np.uint8) * 85) for _ in range(40)]  # zero bytes among them
    model = MarkovModel.fit(texts[:25])
    assert nats_per_target(model, texts[25:]) == pytest.approx(by_definition(texts[:25], texts[25:]), rel=1e-12)


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
    model = markov.fit_baseline(DataConfig())
    loader = Loader(DataConfig(), split="heldout")
    nats, count = np.sum([model.batch_nats(batch) for batch in loader], axis=0)
    loader.close()
    assert 1.7 < nats / count < 2.0  # 1.84 on Python 3.12
