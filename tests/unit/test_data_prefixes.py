"""Samples that begin alike stand in a row as a tree: none lost, none doubled, every token with its one target."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config.data import DataConfig, SourceConfig
from moejax.config.errors import ConfigError
from moejax.data import prefixes
from moejax.data.batch import Batch
from moejax.data.loader import Loader, StateMismatchError
from moejax.data.markov import MarkovModel
from moejax.data.mixture import open_splits
from moejax.data.packing import Packer, fill_trees
from moejax.data.prefixes import EMPTY, Part, Sharing, branches, common

STEMS = ([0] * 6, [0] * 6 + [1] * 5, [2] * 4)
SAMPLES = st.lists(
    st.tuples(st.sampled_from(STEMS), st.lists(st.integers(0, 2), max_size=6)).map(lambda pair: np.array(pair[0] + pair[1], np.int32)),
    max_size=25,
)
SHARING = st.builds(Sharing, min_shared=st.integers(2, 6), row_segments=st.integers(3, 9))
SIZES = st.fixed_dictionaries(
    {"seq_len": st.integers(18, 40), "pack_rows": st.integers(1, 4), "num_reading": st.integers(1, 5), "epoch": st.just(100)}
)


def ways(batch: Batch) -> list[np.ndarray]:
    """Row positions of every document of a batch, from its first token to its last, as [row, position] pairs."""
    found = []
    for row, (ids_L, before_L) in enumerate(zip(batch.segments.ids_BL, batch.segments.previous_BL, strict=True)):
        for end in sorted(set(np.flatnonzero(ids_L >= 0).tolist()) - set(before_L.tolist())):
            way = [end]
            while before_L[way[-1]] >= 0:
                way.append(int(before_L[way[-1]]))
            found.append(np.array([(row, at) for at in reversed(way)]))
    return found


def texts(batch: Batch) -> list[list[int]]:
    """Documents of a batch, sorted."""
    return sorted(batch.tokens_BL[tuple(way.T)].tolist() for way in ways(batch))


def batch_of(rows, seq_len: int, sharing: Sharing) -> Batch:
    return Batch.build(*fill_trees(rows, seq_len, sharing.min_shared), num_segments=sharing.row_segments)


@settings(deadline=None, max_examples=150)
@given(SAMPLES, SIZES, SHARING)
def test_every_sample_is_one_way_through_a_tree_and_every_token_knows_what_follows(samples, sizes, sharing):
    rows = [*Packer(samples, sharing=sharing, **sizes), []]
    batch = batch_of(rows, sizes["seq_len"], sharing)
    batch.segments.verify()
    assert texts(batch) == sorted(sample.tolist() for sample in samples)
    times_BL, weights_BL = np.zeros((2, *batch.tokens_BL.shape), int)
    for way in ways(batch):
        at = tuple(way.T)
        times_BL[at] += 1
        weights_BL[tuple(way[:-1].T)] += 1
        np.testing.assert_array_equal(batch.targets_BL[tuple(way[:-1].T)], batch.tokens_BL[tuple(way[1:].T)])
        np.testing.assert_array_equal(batch.positions_BL[at], np.arange(len(way)))
    np.testing.assert_array_equal(batch.segments.copies_BL, times_BL)
    np.testing.assert_array_equal(batch.weights_BL, weights_BL)
    assert np.isin(batch.segments.ids_BL, np.arange(-1, sharing.row_segments - 1)).all()


@settings(deadline=None, max_examples=60)
@given(SAMPLES, SIZES, SHARING, st.integers(0, 6))
def test_a_restored_packer_goes_on_as_if_never_stopped(samples, sizes, sharing, num_before):
    first, second = (Packer(samples, sharing=sharing, **sizes) for _ in range(2))
    as_lists = lambda rows: [[piece.tolist() for piece in row] for row in rows]
    begun = as_lists(itertools.islice(first, num_before))
    second.restore(json.loads(json.dumps(first.state())))
    assert begun + as_lists(second) == as_lists(Packer(samples, sharing=sharing, **sizes))


class CountsAnew(Packer):
    """The rule by which rows are chosen, counted from their pieces each time."""

    def _fitting(self, piece):
        sharing = self._sharing
        begin = lambda sample: sample[: sharing.min_shared].tolist() if sample.size >= sharing.min_shared else None
        shared = lambda others: max((common(piece, other) for other in others if begin(piece) and begin(piece) == begin(other)), default=0)
        company = [piece, *(other for other in self._heads() if shared([other]))]
        company = company if self._count(company) >= 0 else [piece]
        for row in sorted(self._open, key=lambda row: -shared(row.pieces)):
            if self._count([*row.pieces, *([piece] if shared(row.pieces) else company)]) >= 0:
                return row, sharing.forest([*row.pieces, piece])
        return None, sharing.forest([piece])

    def _count(self, pieces):
        parts = branches(pieces, self._sharing.min_shared)
        tokens, segments = self._seq_len - sum(part.stop - part.start for part in parts), self._sharing.row_segments - 1 - len(parts)
        return tokens if segments > 0 else min(tokens, segments)

    def _room(self, pieces, forest):
        return self._count(pieces)


@settings(deadline=None, max_examples=150)
@given(SAMPLES, SIZES, SHARING)
def test_rows_are_chosen_as_if_their_forests_were_counted_anew_for_each_piece(samples, sizes, sharing):
    as_lists = lambda packer: [[piece.tolist() for piece in row] for row in packer]
    assert as_lists(Packer(samples, sharing=sharing, **sizes)) == as_lists(CountsAnew(samples, sharing=sharing, **sizes))


@settings(deadline=None, max_examples=150)
@given(SAMPLES, SHARING)
def test_a_forest_planted_one_by_one_is_that_of_all_samples(samples, sharing):
    forest = EMPTY
    for number in range(len(samples)):
        forest = sharing.plant(forest, samples[: number + 1])
    spread = lambda forest: [(tree.members, tree.start, tree.stop, spread(tree.branches)) for tree in forest.trees.values()]
    parts = branches(samples, sharing.min_shared)
    assert spread(forest) == spread(sharing.forest(samples))
    assert (forest.tokens, forest.parts) == (sum(part.stop - part.start for part in parts), len(parts))


def test_a_piece_is_compared_with_few_of_those_that_are_there(monkeypatch):
    compared = []
    monkeypatch.setattr(prefixes, "common", lambda one_T, other_T: compared.append(1) or common(one_T, other_T))
    rng = np.random.default_rng(0)
    samples = [np.append(stem_T, rng.integers(0, 99, 9)).astype(np.int32) for stem_T in rng.integers(0, 99, (40, 30)) for _ in range(6)]
    sizes = {"seq_len": 800, "pack_rows": 6, "num_reading": 12, "epoch": 240}
    assert len(list(Packer(samples, sharing=Sharing(min_shared=20, row_segments=60), **sizes))) > 2
    assert len(compared) < 4 * len(samples)  # not with each open row's


def test_branches_by_hand():
    stem, branch = list(range(10, 16)), list(range(20, 25))
    samples = [[1, 2], [*stem, 7, 7], [*stem, *branch, 8], [3], [*stem, *branch, 9, 9], stem, [*stem[:3], 5]]
    parts = branches([np.array(sample, np.int32) for sample in samples], min_shared=4)
    assert parts == [
        Part(0, 0, 2, None),
        Part(1, 0, 5, None),  # six tokens are common to four samples: five, and each goes on with the sixth
        Part(1, 5, 8, 1),
        Part(2, 5, 10, 1),
        Part(2, 10, 12, 3),
        Part(4, 10, 13, 3),
        Part(5, 5, 6, 1),  # ends where the others go on
        Part(3, 0, 1, None),
        Part(6, 0, 4, None),  # three common tokens are too few
    ]


def test_a_piece_goes_to_the_row_it_shares_most_with():
    rows = Packer(
        [np.array(tokens, np.int32) for tokens in ([1] * 8, [2] * 14, [2] * 10 + [3] * 2)],
        seq_len=20,
        pack_rows=2,
        num_reading=1,
        epoch=3,
        sharing=Sharing(min_shared=4, row_segments=8),
    )
    # the third would just fill the first row; in the second it adds three tokens to a stem of nine
    assert [[int(piece[-1]) for piece in row] for row in rows] == [[1], [2, 3]]


def test_a_row_without_a_free_segment_is_handed_out():
    samples = [np.full(3, number, np.int32) for number in range(6)]
    packer = Packer(samples, seq_len=100, pack_rows=2, num_reading=1, epoch=6, sharing=Sharing(min_shared=2, row_segments=4))
    assert [len(row) for row in packer] == [3, 3]


def test_branches_that_begin_with_different_tokens_are_refused():
    with pytest.raises(ValueError, match="segments that continue segment 0 begin with tokens 3 and 5"):
        Batch.build(np.arange(7)[None], [[0, 0, 0, 1, 1, 2, 2]], parent=[{1: 0, 2: 0}])


def test_more_segments_than_asked_for_are_refused():
    with pytest.raises(ValueError, match="a row has 3 segments, padding runs included, and num_segments=2"):
        Batch.build(np.zeros((1, 3), int), [[0, 1, -1]], parent=[{}], num_segments=2)


@pytest.fixture
def config(tmp_path):
    """Sixty prompts of 40 bytes with four answers each, a record for each answer."""
    rng = np.random.default_rng(0)
    letters = lambda num: "".join(rng.choice(list("abcdefgh"), num))
    records = [prompt + letters(rng.integers(3, 20)) for prompt in (letters(40) for _ in range(60)) for _ in range(4)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    return DataConfig(
        sources=(SourceConfig(kind="jsonl", path=str(tmp_path / "answers.jsonl")),),
        seq_len=128,
        batch_size=4,
        shuffle_block=4,
        heldout_percent=20,
        share_prefixes=True,
        min_shared=20,
        row_segments=8,
    )


def written(config: DataConfig) -> DataConfig:
    return dataclasses.replace(config, share_prefixes=False, min_shared=64, row_segments=32)


def whole(config: DataConfig) -> Batch:
    """The held-out data as one batch."""
    return jax.tree.map(lambda *rows: np.concatenate(rows), *Loader(config, split="heldout"))


def test_the_loader_shares_what_it_would_have_written_out(config):
    shared, plain = whole(config), whole(written(config))
    assert texts(shared) == texts(plain)
    assert shared.weights_BL.sum() == plain.weights_BL.sum()
    used = [int((batch.segments.ids_BL >= 0).sum()) for batch in (shared, plain)]
    assert used[0] < 0.6 * used[1]  # four answers of 40 + 11 tokens on average: 39 + 4 * 12 of 4 * 51


def test_answers_to_one_prompt_meet_only_where_they_stay_together(config):
    apart = dataclasses.replace(config, shuffle_block=1)
    used = []
    for each in (config, apart):
        loader = Loader(each, split="train")
        batches = list(itertools.islice(loader, 6))
        loader.close()
        used.append(np.mean([batch.segments.multiplicity().sum() / (batch.segments.ids_BL >= 0).sum() for batch in batches]))
    assert used[0] > 2.2 > 1.4 > used[1] >= 1  # at most 2.34: four times 40 + 11 tokens, in 39 + 4 * 12


def test_a_block_is_held_out_as_a_whole(config):
    train, heldout = ({split[index].text[:40] for index in range(len(split))} for (split,) in open_splits(config).values())
    assert len(train) + len(heldout) == 60 and not train & heldout


def test_no_document_is_lost_where_the_last_block_is_short(config):
    short = 0
    for size in (7, 9, 11, 13, 17):
        (documents,) = open_splits(blocks := dataclasses.replace(written(config), shuffle_block=size, heldout_percent=50))["heldout"]
        short += any(len(documents.block(number)) < size for number in range(documents.num_blocks))
        assert texts(whole(blocks)) == sorted(list(documents[index].text.encode()) for index in range(len(documents)))
    assert short


def test_a_stream_of_shared_prefixes_goes_on_where_it_was_left_and_is_the_same_for_all_processes(config):
    loader = Loader(config, split="train")
    batches, state = list(itertools.islice(loader, 3)), None
    state = json.loads(json.dumps(loader.state()))
    batches += list(itertools.islice(loader, 3))
    loader.close()
    halves = []
    for process_index in range(2):
        part = Loader(config, split="train", process_index=process_index, process_count=2)
        part.restore(state)
        halves.append(list(itertools.islice(part, 3)))
        part.close()
    for want, *rows in zip(batches[3:], *halves, strict=True):
        jax.tree.map(lambda want, *rows: np.testing.assert_array_equal(np.concatenate(rows), want), want, *rows)
    other = Loader(written(config), split="train")
    with pytest.raises(StateMismatchError, match=r"prefixes: saved \[20, 8\], now None"):
        other.restore(state)
    other.close()


def test_a_prompt_is_read_and_not_learned_shared_or_not(config, tmp_path):
    records = [json.loads(line)["text"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    lines = (json.dumps({"question": text[:40], "answer": text[40:]}) + "\n" for text in records)
    (tmp_path / "chat.jsonl").write_text("".join(lines))
    chat = SourceConfig(kind="jsonl", path=str(tmp_path / "chat.jsonl"), field="answer", prompt_field="question")
    config = dataclasses.replace(config, sources=(chat,), heldout_percent=50)
    shared, plain = whole(config), whole(written(config))
    assert texts(shared) == texts(plain) and {bytes(text).decode() for text in texts(shared)} <= set(records)
    assert shared.segments.multiplicity().max() > 1
    for batch in (shared, plain):
        assert batch.weights_BL.sum() == sum(len(text) - 40 for text in texts(batch))
        for way in ways(batch):
            at = tuple(way[:-1].T)
            np.testing.assert_array_equal(batch.weights_BL[at] > 0, np.arange(1, len(way)) >= 40)
            np.testing.assert_array_equal(batch.targets_BL[at], batch.tokens_BL[tuple(way[1:].T)])
    model = MarkovModel.fit([b"abcdefgh" * 5])
    np.testing.assert_allclose(model.batch_nats(shared), model.batch_nats(plain), rtol=1e-12)


def test_all_batches_have_one_shape(config):
    shapes = {tuple(leaf.shape for leaf in jax.tree.leaves(batch)) for batch in itertools.islice(Loader(config, split="train"), 8)}
    assert len(shapes) == 1


def test_the_markov_baseline_scores_each_document_as_if_it_were_written_out(config):
    model = MarkovModel.fit([b"abcdefgh" * 5, b"aabbccdd"])
    np.testing.assert_allclose(model.batch_nats(whole(config)), model.batch_nats(whole(written(config))), rtol=1e-12)


def test_settings_of_shared_prefixes_without_them_are_refused():
    with pytest.raises(ConfigError, match=r"data\.min_shared=5 would be ignored: data\.share_prefixes is off"):
        DataConfig(min_shared=5)
    with pytest.raises(ConfigError, match=r"data\.min_shared=1 must be at least 2"):
        DataConfig(share_prefixes=True, min_shared=1)
    with pytest.raises(ConfigError, match=r"data\.min_shared=512 must be less than data\.seq_len=512"):
        DataConfig(share_prefixes=True, min_shared=512, seq_len=512)
    DataConfig(share_prefixes=True, min_shared=511, seq_len=512)
    DataConfig(seq_len=32)  # min_shared is not used
