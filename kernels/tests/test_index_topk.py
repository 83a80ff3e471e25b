"""index_topk: the golden selection, ties, pools, tiles, borders."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels import query_blocks
from moejax_kernels.index_topk import cases, index_topk, xla
from moejax_kernels.segments import Segments

BOTH = pytest.mark.parametrize("implementation", ["reference", "xla"])
GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "ops"
run = jax.jit(index_topk, static_argnames=("topk", "implementation"))


@pytest.fixture(autouse=True)
def several_blocks_and_tiles(monkeypatch):
    monkeypatch.setattr(query_blocks, "BLOCK_NUMBERS", 1)
    monkeypatch.setattr(query_blocks, "MIN_QUERIES", 50)
    monkeypatch.setattr(xla, "TILE", 64)


def selected(ids_BLK, num_keys):
    """Bool [B, L, S]; also checks that -1 comes last and that no id comes twice."""
    ids_BLK = np.asarray(ids_BLK)
    assert ids_BLK.dtype == np.int32
    assert (np.diff((ids_BLK < 0).astype(int), axis=2) >= 0).all()
    mask = np.zeros((*ids_BLK.shape[:2], num_keys), int)
    for row, at, slot in np.argwhere(ids_BLK >= 0):
        mask[row, at, ids_BLK[row, at, slot]] += 1
    assert mask.max() <= 1
    return mask.astype(bool)


def sorted_choice(index_q, index_k, index_w, allowed_BLS, topk):
    """The definition with numpy's stable sort: by falling score, of equal scores the lower first."""
    scores = np.einsum("blj,bljs->bls", index_w, np.maximum(np.einsum("bljc,bsc->bljs", index_q, index_k), 0))
    order = np.argsort(np.where(allowed_BLS, -scores, np.inf), axis=2, kind="stable")[:, :, :topk]
    return np.where(np.take_along_axis(allowed_BLS, order, 2), order, -1)


@BOTH
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["gqa", "mqa", "topk_over_length"])
def test_the_golden_keys_are_chosen(name, dtype, implementation):
    golden = np.load(GOLDEN / f"sparse_{name}.npz")
    with jax.enable_x64(dtype == "float64"):
        arrays = (jnp.asarray(golden[f"index_{letter}"], dtype) for letter in "qkw")
        segments = Segments.build(golden["segment_ids"].astype(np.int32))
        ids_BLK = run(*arrays, topk=int(golden["topk"]), segments=segments, implementation=implementation)
        assert ids_BLK.shape[2] == golden["topk"]
        np.testing.assert_array_equal(selected(ids_BLK, golden["selected"].shape[2]), golden["selected"])


@BOTH
def test_of_equal_scores_the_lower_position_wins_across_tiles_and_signs_of_zero(implementation):
    """Small integers tie all the time; where no head is active, a negative weight makes -0 and a positive one 0."""
    random = np.random.default_rng(0)
    index_q, index_k, index_w = (random.integers(-1, 2, shape).astype(np.float32) for shape in ((1, 150, 2, 2), (1, 150, 2), (1, 150, 2)))
    ids_BLK = run(index_q, index_k, index_w, topk=20, implementation=implementation)
    np.testing.assert_array_equal(ids_BLK, sorted_choice(index_q, index_k, index_w, np.tri(150, dtype=bool)[None], 20))


@BOTH
def test_pools_become_visible_with_their_last_token_and_only_in_their_document(implementation):
    """Pools of 4 tokens, started anew in each document; ids count pools."""
    lengths, pool = (30, 3, 97, 20), 4
    ids_L = np.repeat([0, 1, 2, -1], lengths)
    ends = [start + at for start, length in zip(np.cumsum((0, *lengths)), lengths[:3]) for at in range(pool - 1, length, pool)]  # noqa: B905
    key_end_BS = np.array([[*ends, -1, -1]], np.int32)
    random = np.random.default_rng(1)
    index_q, index_w = random.standard_normal((1, 150, 2, 4)), random.standard_normal((1, 150, 2))
    index_k = random.standard_normal((1, key_end_BS.shape[1], 4))
    at_L = np.arange(150)
    end_document_S = np.where(key_end_BS[0] < 0, -2, ids_L[key_end_BS[0]])
    allowed_LS = (key_end_BS >= 0) & (key_end_BS <= at_L[:, None]) & (ids_L[:, None] >= 0) & (ids_L[:, None] == end_document_S)
    with jax.enable_x64(True):
        got = run(
            index_q, index_k, index_w, topk=5, segments=Segments.build(ids_L[None]), key_end_BS=key_end_BS, implementation=implementation
        )
    np.testing.assert_array_equal(got, sorted_choice(index_q, index_k, index_w, allowed_LS[None], 5))


@BOTH
def test_a_tree_chooses_among_the_keys_of_its_ancestors(implementation):
    ids_L, parent = np.repeat([0, 1, 2], (60, 50, 40)), [{1: 0, 2: 0}]
    random = np.random.default_rng(2)
    index_q, index_k, index_w = (random.standard_normal(shape) for shape in ((1, 150, 2, 4), (1, 150, 4), (1, 150, 2)))
    related_LL = (ids_L[:, None] == ids_L) | (ids_L == 0)
    with jax.enable_x64(True):
        segments = Segments.build(ids_L[None], parent=parent)
        got = run(index_q, index_k, index_w, topk=9, segments=segments, implementation=implementation)
        own_ends = run(
            index_q,
            index_k,
            index_w,
            topk=9,
            segments=segments,
            key_end_BS=np.arange(150, dtype=np.int32)[None],
            implementation=implementation,
        )
    np.testing.assert_array_equal(got, sorted_choice(index_q, index_k, index_w, (np.tri(150, dtype=bool) & related_LL)[None], 9))
    np.testing.assert_array_equal(got, own_ends)


@BOTH
@pytest.mark.parametrize("case", cases.SMALL[:2], ids=str)
def test_another_document_has_exactly_no_influence(case, implementation):
    arrays, other = case.arrays("float32", seed=3), case.arrays("float32", seed=4)
    second = sum(map(abs, case.documents[:2]))
    index = [np.asarray(arrays[name]) for name in ("index_q", "index_k", "index_w")]
    changed = [
        np.concatenate([50 * np.asarray(other[name])[:, :second], old[:, second:]], axis=1)
        for name, old in zip(("index_q", "index_k", "index_w"), index, strict=True)
    ]
    before, after = (
        np.asarray(run(*inputs, topk=case.topk, segments=case.segments(), implementation=implementation)) for inputs in (index, changed)
    )
    np.testing.assert_array_equal(before[:, second:], after[:, second:])
    assert (before[:, second:] == -1).any()


def test_no_gradient_reaches_the_inputs():
    arrays = cases.SMALL[0].arrays("float32", seed=5)
    loss = lambda *index: jnp.sum(index_topk(*index, topk=3, implementation="xla").astype(jnp.float32))
    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(arrays["index_q"], arrays["index_k"], arrays["index_w"]):
        assert not np.asarray(gradient).any()


def test_long_rows_never_hold_all_scores(monkeypatch):
    monkeypatch.undo()
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    lowered = run.lower(shape(1, 16384, 2, 8), shape(1, 16384, 8), shape(1, 16384, 2), topk=64, implementation="xla")
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 4 * 16384**2 / 20


def test_bad_inputs_say_what_would_work():
    index_q, index_k, index_w = jnp.zeros((1, 6, 2, 4)), jnp.zeros((1, 6, 4)), jnp.zeros((1, 6, 2))
    with pytest.raises(ValueError, match=r"S=3 keys for L=6 tokens \(index_k_BSC is \(1, 3, 4\)\). Give one key per token, or key_end_BS"):
        index_topk(index_q, index_k[:, :3], index_w, topk=2)
    with pytest.raises(ValueError, match="topk=0 must be a whole number of at least 1"):
        index_topk(index_q, index_k, index_w, topk=0)
    with pytest.raises(ValueError, match=r"topk=2\.5 must be a whole number"):
        index_topk(index_q, index_k, index_w, topk=2.5)
    with pytest.raises(ValueError, match=r"index_w_BLJ is \(1, 6, 3\), so J=3, but index_q_BLJC \(1, 6, 2, 4\) has J=2"):
        index_topk(index_q, index_k, jnp.zeros((1, 6, 3)), topk=2)
    with pytest.raises(ValueError, match="key_end_BS must hold integers, got float32"):
        index_topk(index_q, index_k, index_w, topk=2, key_end_BS=jnp.zeros((1, 6)))
