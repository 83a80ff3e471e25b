"""Rows and batches: nothing lost, nothing doubled, borders where documents change."""

import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config.data import DataConfig
from moejax.data.batch import Batch
from moejax.data.mixture import open_splits
from moejax.data.packing import Packer, StateMismatchError, fill
from moejax.data.sources import DataError
from moejax.data.tokenizers import ByteTokenizer

LENGTHS = st.lists(st.integers(0, 40), max_size=30)
SIZES = st.fixed_dictionaries(
    {"seq_len": st.integers(2, 12), "pack_rows": st.integers(1, 4), "num_reading": st.integers(1, 5), "epoch": st.just(100)}
)


def numbered(lengths):
    """Documents whose tokens are all different: token = 100 * document + place."""
    return [100 * number + np.arange(length, dtype=np.int32) for number, length in enumerate(lengths)]


@settings(deadline=None, max_examples=100)
@given(LENGTHS, SIZES)
def test_every_token_appears_once_and_in_its_document_s_order(lengths, sizes):
    documents = numbered(lengths)
    rows = list(Packer(documents, **sizes))
    seen = np.concatenate([np.zeros(0, np.int32), *(piece for row in rows for piece in row)])
    np.testing.assert_array_equal(np.sort(seen), np.concatenate([np.zeros(0, np.int32), *documents]))
    for row in rows:
        assert 0 < sum(piece.size for piece in row) <= sizes["seq_len"]
        for piece in row:
            np.testing.assert_array_equal(piece, np.arange(piece[0], piece[0] + piece.size))
            length = lengths[piece[0] // 100]
            assert piece.size == min(sizes["seq_len"], length - piece[0] % 100)  # cut only at multiples of the row


@settings(deadline=None, max_examples=100)
@given(LENGTHS, SIZES)
def test_targets_stay_inside_their_document_and_padding_weighs_nothing(lengths, sizes):
    rows = [*Packer(numbered(lengths), **sizes), []]
    tokens_BL, ids_BL = fill(rows, sizes["seq_len"])
    batch = Batch.build(tokens_BL, ids_BL)
    batch.segments.verify()
    np.testing.assert_array_equal(batch.segments.ids_BL, ids_BL)
    for row, pieces in enumerate(rows):
        want_targets, want_weights, want_positions = [], [], []
        for number, piece in enumerate(pieces):
            want_targets += [*piece[1:], 0]
            want_weights += [1] * (piece.size - 1) + [0]
            want_positions += range(piece.size)
            assert (ids_BL[row] == number).sum() == piece.size
        free = sizes["seq_len"] - len(want_targets)
        np.testing.assert_array_equal(batch.targets_BL[row], want_targets + [0] * free)
        np.testing.assert_array_equal(batch.weights_BL[row], want_weights + [0] * free)
        np.testing.assert_array_equal(batch.positions_BL[row], want_positions + [0] * free)
        assert (ids_BL[row, sizes["seq_len"] - free :] == -1).all()


def as_lists(rows):
    return [[piece.tolist() for piece in row] for row in rows]


@settings(deadline=None, max_examples=50)
@given(LENGTHS, SIZES, st.integers(0, 20))
def test_a_restored_packer_goes_on_as_if_never_stopped(lengths, sizes, num_before):
    documents = numbered(lengths)
    first, second = Packer(documents, **sizes), Packer(documents, **sizes)
    begun = as_lists(itertools.islice(first, num_before))
    second.restore(json.loads(json.dumps(first.state())))
    assert begun + as_lists(second) == as_lists(Packer(documents, **sizes))


def test_a_piece_goes_to_the_first_open_row_with_room_and_the_fullest_makes_way():
    packer = Packer(numbered([6, 5, 3, 4, 7, 8, 2, 1]), seq_len=10, pack_rows=2, num_reading=1, epoch=8)
    rows = [[int(piece[0]) // 100 for piece in row] for row in packer]
    # 6 and 5 open rows; 3 joins the 6, 4 the 5: two nines. 7 displaces the first, 8 the second; 2 joins the 7, 1 fills it
    assert rows == [[0, 2], [1, 3], [4, 6, 7], [5]]


def test_rows_that_follow_each_other_come_from_different_documents():
    packer = Packer(numbered([40, 40, 40]), seq_len=10, pack_rows=1, num_reading=3, epoch=3)
    assert [int(row[0][0]) // 100 for row in packer] == [0, 1, 2] * 4


def test_an_epoch_of_empty_documents_is_an_error_and_one_less_is_not():
    class LateText:
        """Empty documents without end; number 7 is not."""

        read = 0

        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            self.read += 1
            return np.zeros(2 * (index == 7), np.int32)

    documents = LateText()
    with pytest.raises(DataError, match=r"7 documents one after the other, an epoch of data\.sources, have no token"):
        next(Packer(documents, seq_len=2, pack_rows=1, num_reading=1, epoch=7))
    assert documents.read == 7
    assert next(Packer(documents, seq_len=2, pack_rows=1, num_reading=1, epoch=8))[0].size == 2


@pytest.mark.parametrize("lengths", [[7, 2, 9, 9], [25, 25]], ids=["in an open row", "being read"])
def test_a_document_that_shrank_since_the_state_was_saved_is_an_error(lengths):
    packer = Packer(numbered(lengths), seq_len=10, pack_rows=2, num_reading=1, epoch=4)
    next(packer)
    fresh = Packer(numbered([1] * len(lengths)), seq_len=10, pack_rows=2, num_reading=1, epoch=4)
    with pytest.raises(StateMismatchError, match="its file has changed"):
        fresh.restore(packer.state())


def test_a_batch_is_a_pytree_whose_leaves_have_the_rows_first():
    batch = Batch.build(np.arange(10).reshape(2, 5), [[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]])
    assert {leaf.shape[0] for leaf in jax.tree.leaves(batch)} == {2}
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch))
    assert batch.tokens_BL.dtype == batch.targets_BL.dtype == batch.positions_BL.dtype == np.int32
    assert batch.weights_BL.dtype == np.float32
    np.testing.assert_array_equal(batch.weights_BL, [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.tokens_BL[1], [5, 6, 0, 0, 0])  # what lies under padding is not kept


def test_positions_continue_along_a_tree_of_prefixes():
    batch = Batch.build(np.array([[0, 1, 2, 3, 4, 3, 6]]), [[0, 0, 0, 1, 1, 2, 2]], parent=[{1: 0, 2: 0}])
    np.testing.assert_array_equal(batch.positions_BL, [[0, 1, 2, 3, 4, 3, 4]])


@pytest.mark.parametrize("tokens, ids", [(np.zeros((1, 3), int), np.zeros((1, 4), int)), (np.zeros((1, 3)), np.zeros((1, 3), int))])
def test_a_batch_of_wrong_shapes_or_types_is_refused(tokens, ids):
    with pytest.raises(ValueError, match="integer tokens"):
        Batch.build(tokens, ids)


def test_little_of_the_standard_library_s_rows_is_padding():
    tokenizer = ByteTokenizer()
    (heldout,) = open_splits(DataConfig())["heldout"]
    documents = [tokenizer.encode(heldout[index].text) for index in range(len(heldout))]
    rows = list(Packer(documents, seq_len=512, pack_rows=8, num_reading=16, epoch=len(documents)))
    used = sum(tokens_T.size for tokens_T in documents)
    assert 1 - used / (512 * len(rows)) < 0.02  # 0.5 % on Python 3.12
