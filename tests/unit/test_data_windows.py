"""Lanes: every document whole in one lane, window behind window, and the same after a restart."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config.data import DataConfig
from moejax.data.batch import NOTHING
from moejax.data.loader import Loader
from moejax.data.packing import StateMismatchError
from moejax.data.sources import DataError
from moejax.data.windows import Lanes

LENGTHS = st.lists(st.integers(0, 40), max_size=30)
SIZES = st.fixed_dictionaries(
    {"seq_len": st.integers(2, 12), "pack_rows": st.integers(1, 4), "num_lanes": st.integers(1, 5), "epoch": st.just(100)}
)


def numbered(lengths):
    """Documents whose tokens are all different: token = 100 * document + place."""
    return [100 * number + np.arange(length, dtype=np.int32) for number, length in enumerate(lengths)]


@settings(deadline=None, max_examples=100)
@given(LENGTHS, SIZES)
def test_a_lane_holds_documents_one_after_the_other_and_cuts_only_those_that_fit_no_row(lengths, sizes):
    documents, size = numbered(lengths), sizes["seq_len"]
    batches = list(Lanes(documents, **sizes))
    seen = [piece for batch in batches for row in batch for piece in row.pieces]
    everything = np.concatenate([np.zeros(0, np.int32), *documents])
    np.testing.assert_array_equal(np.sort(np.concatenate([np.zeros(0, np.int32), *seen])), everything)
    for lane in zip(*batches, strict=True):
        unfinished = NOTHING  # the token that the lane's next row must begin with
        for row in lane:
            assert sum(piece.size for piece in row.pieces) <= size
            first = row.pieces[0][0] if row.pieces else None
            assert first == unfinished if unfinished >= 0 else row.start == 0
            for number, piece in enumerate(row.pieces):
                np.testing.assert_array_equal(piece, np.arange(piece[0], piece[0] + piece.size))
                begins, length = piece[0] % 100, lengths[piece[0] // 100]
                assert begins == (row.start if number == 0 else 0)
                if begins + piece.size < length:  # cut: it fits no row, fills this one, and goes on in the next
                    assert length > size and sum(part.size for part in row.pieces) == size
                    assert row.pieces[-1] is piece and row.following == piece[-1] + 1
            ended = not row.pieces or row.pieces[-1][-1] % 100 == lengths[row.pieces[-1][0] // 100] - 1
            assert not ended or row.following == NOTHING
            unfinished = row.following
        assert unfinished == NOTHING


@settings(deadline=None, max_examples=50)
@given(LENGTHS, SIZES, st.integers(0, 6))
def test_a_restored_position_goes_on_alike(lengths, sizes, num_before):
    lanes = Lanes(numbered(lengths), **sizes)
    list(itertools.islice(lanes, num_before))
    again = Lanes(numbered(lengths), **sizes)
    again.restore(json.loads(json.dumps(lanes.state())))
    for ours, theirs in itertools.zip_longest(again, lanes):
        assert [(row.start, row.following) for row in ours] == [(row.start, row.following) for row in theirs]
        for pair in zip(ours, theirs, strict=True):
            assert [piece.tolist() for piece in pair[0].pieces] == [piece.tolist() for piece in pair[1].pieces]


def test_documents_that_changed_are_errors():
    sizes = {"seq_len": 4, "pack_rows": 1, "num_lanes": 1}
    lanes = Lanes(numbered([9, 3]), **sizes, epoch=9)
    next(lanes)
    with pytest.raises(StateMismatchError, match="document 0 of the stream has 4 tokens, and had 5 or more"):
        Lanes(numbered([4, 3]), **sizes, epoch=9).restore(lanes.state())
    with pytest.raises(DataError, match="2 documents one after the other"):
        next(Lanes(numbered([0, 0, 5]), **sizes, epoch=2))


def test_a_batch_goes_on_where_the_one_before_ended():
    """Real text: positions and targets of a lane run on over the batches' borders."""
    config = DataConfig(seq_len=64, batch_size=4, windows=True)
    loader = Loader(config, split="train")
    batches = list(itertools.islice(loader, 12))
    state = json.loads(json.dumps(loader.state()))
    for before, after in itertools.pairwise(batches):
        goes_on_B = after.positions_BL[:, 0] > 0
        assert goes_on_B.any()
        np.testing.assert_array_equal(after.positions_BL[goes_on_B, 0], before.positions_BL[goes_on_B, -1] + 1)
        np.testing.assert_array_equal(after.tokens_BL[goes_on_B, 0], before.targets_BL[goes_on_B, -1])
        np.testing.assert_array_equal(before.weights_BL[:, -1] > 0, goes_on_B)
        before.segments.verify()
    again = Loader(config, split="train")
    again.restore(state)
    np.testing.assert_array_equal(next(again).tokens_BL, next(loader).tokens_BL)
    halves = [Loader(config, split="train", process_index=index, process_count=2) for index in range(2)]
    for batch in batches[:3]:
        np.testing.assert_array_equal(np.concatenate([next(half).positions_BL for half in halves]), batch.positions_BL)
    plain = Loader(DataConfig(seq_len=64, batch_size=4), split="train")
    with pytest.raises(StateMismatchError, match="windows: saved True, now None"):
        plain.restore(state)
    for each in (loader, again, plain, *halves):
        each.close()
