import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.segments import Segments

from moejax.losses import balance

switch_balance, sequence_balance = jax.jit(balance.switch_balance), jax.jit(balance.sequence_balance)
router_z_sum = jax.jit(balance.router_z_sum)
global_balance = jax.jit(balance.global_balance, static_argnames="num_chosen")

E, K = 6, 2
IDS_BL = np.array([[0, 0, 0, 1, 1, 3, 3, 3, -1, -1], [0] * 10, [-1] * 10])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def route(seed, shape):
    scores_BLE = np.random.default_rng(seed).dirichlet(np.ones(E), shape)
    return scores_BLE, np.argsort(-scores_BLE, axis=-1)[..., :K].astype(np.int32)


def by_definition(scores_TE, ids_TK):
    share_E = np.bincount(ids_TK.ravel(), minlength=E) / ids_TK.size
    return E * np.sum(share_E * scores_TE.mean(0))


def test_switch_sums_the_definition_over_rows():
    scores_BLE, ids_BLK = route(0, IDS_BL.shape)
    loss_sum, num = switch_balance(scores_BLE, ids_BLK, Segments.build(IDS_BL))
    want = sum(by_definition(scores_BLE[row][real], ids_BLK[row][real]) for row, real in ((0, IDS_BL[0] >= 0), (1, IDS_BL[1] >= 0)))
    np.testing.assert_allclose(loss_sum, want, rtol=1e-12)
    assert num == 2


def test_sequence_sums_the_definition_over_documents():
    scores_BLE, ids_BLK = route(1, IDS_BL.shape)
    loss_sum, num = sequence_balance(scores_BLE, ids_BLK, Segments.build(IDS_BL))
    documents = [(0, IDS_BL[0] == 0), (0, IDS_BL[0] == 1), (0, IDS_BL[0] == 3), (1, IDS_BL[1] == 0)]
    want = sum(by_definition(scores_BLE[row][mine], ids_BLK[row][mine]) for row, mine in documents)
    np.testing.assert_allclose(loss_sum, want, rtol=1e-12)
    assert num == len(documents)


def test_with_one_document_a_row_sequence_equals_switch_gradients_too():
    scores_BLE, ids_BLK = route(2, (2, 9))
    segments = Segments.whole(2, 9)
    got, want = (
        jax.jit(jax.value_and_grad(lambda scores, loss=loss: loss(scores, ids_BLK, segments).loss_sum))(scores_BLE)
        for loss in (sequence_balance, switch_balance)
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-12)


def whole_batch(scores_BLE, ids_BLK, ids_BL, *, rows):
    valid_BL = ids_BL >= 0
    counts_E = np.bincount(ids_BLK[valid_BL].ravel(), minlength=E)
    return (
        sum(
            global_balance(scores_BLE[part], Segments.build(ids_BL[part]), counts_E=counts_E, num_tokens=valid_BL.sum(), num_chosen=K)
            for part in rows
        )
        / valid_BL.sum()
    )


def test_global_is_the_definition_over_the_batch_however_it_is_split():
    ids_BL = np.full((2, 100), -1)
    ids_BL[0] = 0
    ids_BL[1, :10] = 0  # microbatches of 100 and 10 valid tokens
    scores_BLE, ids_BLK = route(3, ids_BL.shape)
    joined, parts = ([slice(0, 2)], [slice(0, 1), slice(1, 2)])
    want = by_definition(scores_BLE[ids_BL >= 0], ids_BLK[ids_BL >= 0])
    np.testing.assert_allclose(whole_batch(scores_BLE, ids_BLK, ids_BL, rows=joined), want, rtol=1e-12)
    np.testing.assert_allclose(whole_batch(scores_BLE, ids_BLK, ids_BL, rows=parts), want, rtol=1e-12)

    def gradient(rows):
        return jax.jit(jax.grad(lambda scores: whole_batch(scores, ids_BLK, ids_BL, rows=rows)))(scores_BLE)

    np.testing.assert_allclose(gradient(parts), gradient(joined), rtol=1e-12)
    assert np.abs(gradient(joined)).max() > 0


@pytest.mark.parametrize("loss", [switch_balance, sequence_balance])
def test_sums_over_microbatches_equal_the_joined_batch(loss):
    scores_BLE, ids_BLK = route(4, IDS_BL.shape)

    def part(rows):
        return loss(scores_BLE[rows], ids_BLK[rows], Segments.build(IDS_BL[rows]))

    parts = [part(slice(row, row + 1)) for row in range(3)]
    joined = part(slice(0, 3))
    np.testing.assert_allclose(sum(each.loss_sum for each in parts), joined.loss_sum, rtol=1e-12)
    assert sum(each.num for each in parts) == joined.num


def test_padding_enters_nothing_whatever_it_holds():
    scores_BLE, ids_BLK = route(5, IDS_BL.shape)

    def padded(array, value):
        return np.concatenate([array, np.full((array.shape[0], 7, *array.shape[2:]), value, array.dtype)], axis=1)

    short = (scores_BLE, ids_BLK, Segments.build(IDS_BL))
    long = (padded(scores_BLE, np.nan), padded(ids_BLK, -1), Segments.build(padded(IDS_BL, -1)))
    for loss in (switch_balance, sequence_balance):
        got, want = loss(*long), loss(*short)
        np.testing.assert_allclose(got.loss_sum, want.loss_sum, rtol=1e-14)
        assert got.num == want.num
        gradient_BLE = jax.jit(jax.grad(lambda scores, loss=loss: loss(scores, *long[1:]).loss_sum))(long[0])
        assert np.isfinite(gradient_BLE).all() and not np.asarray(gradient_BLE)[:, IDS_BL.shape[1] :].any()
    np.testing.assert_allclose(router_z_sum(long[0], long[2]), router_z_sum(short[0], short[2]), rtol=1e-14)
    assert not np.asarray(jax.jit(jax.grad(lambda logits: router_z_sum(logits, short[2])))(scores_BLE))[IDS_BL < 0].any()


def test_balanced_experts_score_1_and_the_share_carries_no_gradient():
    scores_BLE = jnp.full((1, 3, E), 1 / E)
    ids_BLK = jnp.arange(6).reshape(1, 3, 2)
    loss_sum, num = switch_balance(scores_BLE, ids_BLK, Segments.whole(1, 3))
    np.testing.assert_allclose(loss_sum / num, 1.0)
    gradient_BLE = jax.grad(lambda scores: switch_balance(scores, ids_BLK, Segments.whole(1, 3)).loss_sum)(scores_BLE)
    np.testing.assert_allclose(gradient_BLE, 1 / 3)  # E f_e / T with f_e = 1 / E


def test_router_z_sum_is_the_squared_logsumexp_of_valid_tokens():
    logits_BLE = np.random.default_rng(6).standard_normal((3, 10, E))
    want = np.sum(np.log(np.exp(logits_BLE).sum(-1))[IDS_BL >= 0] ** 2)
    np.testing.assert_allclose(router_z_sum(logits_BLE, Segments.build(IDS_BL)), want, rtol=1e-12)


def test_large_counts_do_not_overflow_int32():
    segments = Segments.whole(1, 4)
    counts_E = np.full(896, 2**27, np.int32)  # 896 * 2**27 passes 2**31, and so do the tokens times 16
    scores_BLE = np.full((1, 4, 896), 1 / 896, np.float32)
    got = global_balance(scores_BLE, segments, counts_E=counts_E, num_tokens=896 * 2**23, num_chosen=16)
    np.testing.assert_allclose(got, 4.0, rtol=1e-6)
