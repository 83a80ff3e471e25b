"""The loss over pieces of the vocabulary, against its definition under autodiff; what is asked of it decides what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import scripts

from moejax.losses.cross_entropy import FEW_COLUMNS, LEAST_BYTES, chunks, cross_entropy

B, L, D, V = 2, 11, 8, 13
PIECES = {"pieces that do not divide": (4, 5), "one column": (11, 1), "pieces alone": (0, 6), "tokens alone": (3, 13), "chosen": (0, 0)}
WAYS = ("forward", "recompute")


def arrays(dtype="float64"):
    """Hidden states, head, targets of which some are ignored, and weights that are not 0 there."""
    rng = np.random.default_rng(0)
    targets_BL = np.where(rng.random((B, L)) < 0.2, -100, rng.integers(0, V, (B, L)))
    targets_BL[1, :2] = 0, V - 1
    hidden_BLD, unembed_DV = rng.standard_normal((B, L, D)), rng.standard_normal((D, V))
    return jnp.asarray(hidden_BLD, dtype), jnp.asarray(unembed_DV, dtype), jnp.asarray(targets_BL), jnp.asarray(rng.random((B, L)))


def defined(hidden_BLD, unembed_DV, targets_BL, weights_BL, *, z_coef, logit_cap):
    """The sum, logits as a whole."""
    logits_BLV = hidden_BLD @ unembed_DV
    if logit_cap:
        logits_BLV = jnp.tanh(logits_BLV / logit_cap) * logit_cap
    lse_BL = jnp.log(jnp.sum(jnp.exp(logits_BLV), -1))
    target_BL = jnp.take_along_axis(logits_BLV, jnp.maximum(targets_BL, 0)[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(targets_BL == -100, 0, weights_BL * (lse_BL - target_BL + z_coef * lse_BL**2)))


def close(got, want, tolerance=1e-13):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize(
    "pieces, gradients, logit_cap",
    [(pieces, gradients, 2.0) for pieces in PIECES for gradients in WAYS] + [("pieces that do not divide", "forward", 0.0)],
)
def test_values_and_gradients_are_the_definition_s_whatever_the_pieces(pieces, gradients, logit_cap):
    chunk_tokens, chunk_vocab = PIECES[pieces]
    options = {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab, "gradients": gradients, "logit_cap": logit_cap}

    def ours(hidden_BLD, unembed_DV, weights_BL, z_coef, targets_BL):
        return -65528.0 * cross_entropy(hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef=z_coef, **options).loss_sum

    def theirs(hidden_BLD, unembed_DV, weights_BL, z_coef, targets_BL):
        return -65528.0 * defined(hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef=z_coef, logit_cap=logit_cap)

    with jax.enable_x64(True):
        hidden_BLD, unembed_DV, targets_BL, weights_BL = arrays()
        both = lambda loss: jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(hidden_BLD, unembed_DV, weights_BL, 0.3, targets_BL)
        got, want = both(ours), both(theirs)
        close(got, want)
        assert not np.asarray(got[1][0])[np.asarray(targets_BL) == -100].any()


@pytest.mark.parametrize("gradients", WAYS)
def test_hidden_states_and_head_get_their_gradients_separately_too(gradients):
    with jax.enable_x64(True):
        hidden_BLD, unembed_DV, targets_BL, weights_BL = arrays()

        def ours(hidden_BLD, unembed_DV):
            sums = cross_entropy(hidden_BLD, unembed_DV, targets_BL, weights_BL, chunk_tokens=4, chunk_vocab=5, gradients=gradients)
            return 7.0 * sums.loss_sum

        def theirs(hidden_BLD, unembed_DV):
            return 7.0 * defined(hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef=0.0, logit_cap=0.0)

        for argnum in (0, 1):
            close(jax.jit(jax.grad(ours, argnum))(hidden_BLD, unembed_DV), jax.grad(theirs, argnum)(hidden_BLD, unembed_DV))


@pytest.mark.parametrize("gradients", WAYS)
def test_a_tied_head_adds_to_the_gradient_of_the_embedding(gradients):
    with jax.enable_x64(True):
        _, unembed_DV, targets_BL, weights_BL = arrays()
        tokens_BL = np.random.default_rng(1).integers(0, V, (B, L))

        def ours(embed_VD):
            options = {"chunk_tokens": 4, "chunk_vocab": 5, "gradients": gradients, "tied": True}
            return cross_entropy(jnp.sin(embed_VD[tokens_BL]), embed_VD.T, targets_BL, weights_BL, **options).loss_sum

        def theirs(embed_VD):
            return defined(jnp.sin(embed_VD[tokens_BL]), embed_VD.T, targets_BL, weights_BL, z_coef=0.0, logit_cap=0.0)

        close(jax.jit(jax.grad(ours))(unembed_DV.T), jax.grad(theirs)(unembed_DV.T))


def test_an_ignored_target_counts_nowhere_whatever_its_weight():
    hidden_BLD, unembed_DV, _, weights_BL = arrays("float32")

    def loss(hidden_BLD, unembed_DV, weights_BL):
        sums = cross_entropy(hidden_BLD, unembed_DV, jnp.full((B, L), -100), weights_BL, z_coef=1.0, chunk_vocab=5)
        return sums.loss_sum, sums

    (value, sums), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(hidden_BLD, unembed_DV, weights_BL)
    assert value == 0
    assert not any(np.asarray(part).any() for part in (*sums, *grads))


def products(*of: int, gradients: str, chunk_vocab: int) -> int:
    """Products with the head in the traced program when arguments `of` are differentiated."""
    hidden_BLD, unembed_DV, targets_BL, weights_BL = arrays("float32")

    def loss(hidden_BLD, unembed_DV):
        options = {"chunk_tokens": 4, "chunk_vocab": chunk_vocab, "gradients": gradients}
        return cross_entropy(hidden_BLD, unembed_DV, targets_BL, weights_BL, **options).loss_sum

    function = jax.grad(loss, of) if of else loss
    return jax.jit(function).lower(hidden_BLD, unembed_DV).as_text().count("stablehlo.dot_general")


@pytest.mark.parametrize(
    "gradients, chunk_vocab, both, one",
    [("forward", V, 3, 2), ("forward", 5, 4, 3), ("recompute", V, 4, 3), ("recompute", 5, 4, 3)],
)
def test_what_is_frozen_costs_no_product(gradients, chunk_vocab, both, one):
    count = lambda *of: products(*of, gradients=gradients, chunk_vocab=chunk_vocab)
    assert (count(0, 1), count(0), count(1), count()) == (both, one, one, 1)


@pytest.mark.parametrize("gradients", WAYS)
def test_a_frozen_head_s_gradient_is_not_made_in_a_loop_over_microbatches_either(gradients):
    hidden = jax.ShapeDtypeStruct((3, 1, 32, 64), jnp.float32)
    unembed = jax.ShapeDtypeStruct((64, 2048), jnp.float32)

    def loss(hidden_BLD, unembed_DV):
        ones_BL = jnp.ones(hidden_BLD.shape[:2])
        return cross_entropy(hidden_BLD, unembed_DV, ones_BL.astype(int), ones_BL, chunk_vocab=128, gradients=gradients).loss_sum

    def summed(unembed_DV, hidden_ABLD, *, frozen):
        def add(carry, hidden_BLD):
            head = lambda unembed_DV: jax.lax.stop_gradient(unembed_DV) if frozen else unembed_DV
            grads = jax.grad(lambda hidden, unembed: loss(hidden, head(unembed)), (0, 1))(hidden_BLD, unembed_DV)
            return carry + grads[1], grads[0]

        return jax.lax.scan(add, jnp.zeros_like(unembed_DV), hidden_ABLD)

    def cost(frozen):
        program = jax.jit(summed, static_argnames="frozen").lower(unembed, hidden, frozen=frozen).compile()
        return program.cost_analysis()["flops"], program.memory_analysis().temp_size_in_bytes

    (flops, bytes_), (frozen_flops, frozen_bytes) = cost(False), cost(True)
    assert 0.70 < frozen_flops / flops < 0.80  # 3 products of 4, and XLA counts a loop's body once
    assert frozen_bytes < 0.3 * unembed.size * 4 < unembed.size * 4 < bytes_


def test_the_head_is_cast_one_piece_at_a_time():
    program = jax.jit(
        jax.grad(
            lambda hidden_BLD, unembed_DV: (
                cross_entropy(hidden_BLD, unembed_DV, jnp.zeros((1, 16), int), jnp.ones((1, 16)), chunk_vocab=128).loss_sum
            ),
            (0, 1),
        )
    ).lower(jax.ShapeDtypeStruct((1, 16, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 1024), jnp.float32))
    assert "tensor<64x128xbf16>" in program.as_text()
    assert "tensor<64x1024xbf16>" not in program.as_text()


def test_the_chosen_chunks_are_few_and_fit():
    def choose(rows, length, width, columns, dtype="bfloat16", **chosen):
        like = jax.ShapeDtypeStruct((rows, length, width), dtype), jax.ShapeDtypeStruct((width, columns), "float32")
        tokens, piece = chunks(*like, **chosen)
        room = max(LEAST_BYTES, rows * length * width * 2)
        assert rows * tokens * piece * (4 + like[0].dtype.itemsize) <= room
        assert width * piece * 4 <= room or piece == FEW_COLUMNS
        return tokens, piece

    assert choose(1, 8192, 7168, 163840) == (8192, 2304)  # all tokens, a piece of the vocabulary
    assert choose(4, 1024, 256, 4096, "float32") == (256, 4096)  # some tokens, the whole vocabulary
    assert choose(2, 16, 32, 64) == (16, 64)  # everything at once
    assert choose(4096, 32, 64, 50000, "float32") == (1, 1024)
    assert choose(1, 2048, 512, 32768, "float32", chunk_vocab=512) == (2048, 512)
    assert choose(1, 2048, 512, 32768, "float32", chunk_tokens=100) == (100, 16384)


def test_an_unknown_way_is_named():
    with pytest.raises(ValueError, match="gradients='backward' must be 'forward' or 'recompute'"):
        cross_entropy(*arrays("float32"), gradients="backward")


def test_the_ways_of_the_experiment_compute_the_same():
    with scripts("experiments/loss_chunks", "run") as (module,):
        arrays = module.draw(module.shapes(24, 2000, 8, jnp.float32))
        ways = {name: jax.jit(way)(*arrays) for name, way in module.ways(24, 2000).items()}
    value, (dhidden_BLD, dunembed_DV) = ways.pop("plain")
    for got in ways.values():
        for ours, theirs in zip(jax.tree.leaves(got), (value, dhidden_BLD, dunembed_DV), strict=False):
            close(ours, theirs, 2e-6)  # float32
