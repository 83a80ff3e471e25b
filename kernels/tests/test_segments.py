"""Segments that do not belong to their ids are refused, whatever of them is wrong."""

import dataclasses

import numpy as np
import pytest
from moejax_kernels.segments import Segments, StaleSegmentsError

IDS_BL = np.array([[0, 0, 0, 1, 1, 2, 2, -1], [0, 0, 1, 1, 1, 1, 1, 1], [-1, 3, 3, -1, 4, 5, 5, 5]], np.int32)
PARENT = [{1: 0, 2: 1}, {}, {5: 3}]


@pytest.mark.parametrize("parent", [None, PARENT], ids=["documents", "trees"])
def test_every_array_is_checked_and_the_row_that_is_wrong_is_named(parent):
    fresh = Segments.build(IDS_BL, parent)
    fresh.verify()
    for field in dataclasses.fields(fresh):
        array = getattr(fresh, field.name)
        if array is None:
            continue
        changed = array.copy()
        changed.reshape(3, -1)[1, -1] ^= True
        with pytest.raises(StaleSegmentsError, match=r"segments are stale: in rows \[1\]"):
            dataclasses.replace(fresh, **{field.name: changed}).verify()


def test_borders_of_other_ids_are_refused_though_ids_and_checksum_agree():
    fresh = Segments.build(IDS_BL)
    other = Segments.build(np.roll(IDS_BL, 1, axis=0))
    for name in ("starts_BL", "ends_BL", "cu_seqlens_BN"):
        with pytest.raises(StaleSegmentsError, match=f"rows .* {name} is not what was built"):
            dataclasses.replace(fresh, **{name: getattr(other, name)}).verify()


def test_a_tree_without_its_ancestors_is_refused():
    with pytest.raises(StaleSegmentsError, match="ancestor_BUU"):
        dataclasses.replace(Segments.build(IDS_BL, PARENT), ancestor_BUU=None).verify()


def test_an_index_without_a_tree_does_not_pass():
    tree = Segments.build(IDS_BL, PARENT)
    with pytest.raises(StaleSegmentsError, match="previous_BL"):
        dataclasses.replace(tree, index_BL=None, ancestor_BUU=None).verify()
