"""A document read in windows is the document read as a whole: hidden states, and gradients where they may flow back through the pasts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from moejax_kernels.implementation import UnsupportedError

from moejax.config.memory import LEAN
from moejax.config.training import LossConfig
from moejax.data.batch import NOTHING, Batch
from moejax.memory.policy import Saved
from moejax.model import language_model
from moejax.model.context import Switches
from moejax.model.transformer import Below
from moejax.parallel.mesh import mesh_from
from moejax.train.step import gradients

LENGTH, WINDOW = 18, 6
IDS_BL = np.array([[0] * 18, [0] * 8 + [1] * 10, [0] * 3 + [1] * 3 + [2] * 9 + [-1] * 3])
"""A document over three windows; one that begins inside a window; one that ends with a window, and padding."""
WINDOWED = tiny.GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True, output_gate=True, window=5, sinks=True)
DENSE = {"feed_forwards": ("dense",), "moe": tiny.MoEConfig(), "dense_hidden": 16, "scan_layers": False}
EXACT = {"precision": tiny.FLOAT64}
CASES = {
    "gqa": (tiny.model("gqa", **EXACT, **DENSE), 12),
    "gqa, sliding window": (tiny.model("gqa", gqa=WINDOWED, **EXACT, **DENSE), 4),
    "mla": (tiny.model("mla", **EXACT, **DENSE), 12),
    "kda": (tiny.model("kda", **EXACT, **DENSE), 0),
    "gdn": (tiny.model("gdn", **EXACT, **DENSE), 0),
    "dsa, dsa_shared": (tiny.model("dsa", "dsa_shared", **EXACT, **DENSE), 12),
    "kda, gqa, kda, gqa, mla; experts": (tiny.model("kda", "gqa", "kda", "gqa", "mla", **EXACT), 12),
}
SLOW = ("gdn", "dsa, dsa_shared", "kda, gqa, kda, gqa, mla; experts")


def whole():
    return Batch.build(np.random.default_rng(0).integers(0, 64, IDS_BL.shape), IDS_BL)


def windows():
    """The same rows in consecutive batches of WINDOW tokens."""
    tokens_BL, positions_BL = whole().tokens_BL, whole().positions_BL
    for at in range(0, LENGTH, WINDOW):
        end = at + WINDOW
        goes_on_B = end < LENGTH and (IDS_BL[:, end - 1] == IDS_BL[:, min(end, LENGTH - 1)]) & (IDS_BL[:, end - 1] >= 0)
        next_B = np.where(goes_on_B, tokens_BL[:, min(end, LENGTH - 1)], NOTHING)
        yield Batch.build(tokens_BL[:, at:end], IDS_BL[:, at:end], start_B=positions_BL[:, at], next_B=next_B)


def test_windows_have_the_targets_and_positions_of_the_whole():
    parts = list(windows())
    for name in ("tokens_BL", "targets_BL", "weights_BL", "positions_BL"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts], 1), getattr(whole(), name))


def index_stage(config):
    return "sparse" if "dsa" in config.mixers else "none"


def index_loss(output):
    """Of the first layer, if it has an indexer."""
    return output.aux["head"].get("0", {}).get("index_kl", 0.0)


def in_windows(config, num_keys, params, batches, saved=None):
    """Hidden states [B, L, D] and the sum of losses; pasts are handed on with their gradients."""
    past, hidden, loss = None, [], 0.0
    for batch in batches:
        switches = Switches(past_keys=num_keys, index=index_stage(config), saved=saved)
        output = language_model.forward(config, params, batch, switches, past=past)
        past = output.past
        hidden.append(output.hidden_BLD)
        loss += language_model.cross_entropy_sums(output, batch).loss_sum + index_loss(output)
    return loss, jnp.concatenate(hidden, 1)


@functools.cache
def results(name, num_keys):
    """Loss, hidden states and gradients; num_keys None: of the whole documents."""
    config = CASES[name][0]

    def run(params, batches):
        if num_keys is None:
            output = language_model.forward(config, params, batches[0], Switches(index=index_stage(config)))
            return language_model.cross_entropy_sums(output, batches[0]).loss_sum + index_loss(output), output.hidden_BLD
        return in_windows(config, num_keys, params, batches)

    batches = [whole()] if num_keys is None else list(windows())
    with jax.enable_x64(True), jax.set_mesh(mesh_from()):
        run = jax.jit(jax.value_and_grad(run, has_aux=True), compiler_options=tiny.QUICK_TO_COMPILE)
        return jax.device_get(run(tiny.weights(config, bias=0.1), jax.device_put(batches)))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_windows_equal_the_whole_document_and_its_gradients(name):
    (want_loss, want_BLD), want = results(name, None)
    (loss, hidden_BLD), grads = results(name, CASES[name][1])
    real_BL = IDS_BL >= 0
    # float64: sums in another order
    np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
    np.testing.assert_allclose(hidden_BLD[real_BL], want_BLD[real_BL], rtol=0, atol=1e-11 * np.abs(want_BLD).max())
    error, path = tiny.worst(grads, want)
    assert error < 1e-9, path


@pytest.mark.slow
@pytest.mark.parametrize("saved", [Saved(), Saved((), LEAN)], ids=["lean", "offloaded"])
def test_pasts_go_with_what_layers_keep(saved):
    """Layers that are scanned; gradients flow back through the pasts, which the steps of the scan take in."""
    config = tiny.model("kda", "gqa", num_layers=4, **EXACT, **DENSE | {"scan_layers": True})
    with jax.enable_x64(True), jax.set_mesh(mesh_from()):
        params, batches = tiny.weights(config, bias=0.1), jax.device_put(list(windows()))
        run = lambda saved: jax.jit(
            jax.value_and_grad(lambda params: in_windows(config, 12, params, batches, saved)[0]), compiler_options=tiny.QUICK_TO_COMPILE
        )(params)
        (want_loss, want), (loss, grads) = jax.device_get((run(None), run(saved)))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-13)
    assert tiny.worst(grads, want)[0] < 1e-12, tiny.worst(grads, want)  # sums in another order


def test_too_few_keys_are_noticed():
    """The proof that the tests above can fail: one key less than the window reaches."""
    (_, want_BLD), _ = results("gqa, sliding window", None)
    (_, hidden_BLD), _ = results("gqa, sliding window", 3)
    assert np.abs(hidden_BLD - want_BLD)[:, :WINDOW].max() < 1e-11 < 1e-4 < np.abs(hidden_BLD - want_BLD)[:, WINDOW:].max()


@functools.cache
def after_past(config, num_keys):
    """Hidden states and gradients to the embeddings, of a batch behind a past."""

    def run(params, batch, past):
        def loss(params):
            output = language_model.forward(config, params, batch, Switches(past_keys=num_keys), past=past)
            return language_model.cross_entropy_sums(output, batch).loss_sum, output.hidden_BLD

        return jax.value_and_grad(loss, has_aux=True)(params)

    return jax.jit(run, compiler_options=tiny.QUICK_TO_COMPILE)


@pytest.mark.parametrize("mixers", [("gqa", "kda"), pytest.param(("mla", "gdn"), marks=pytest.mark.slow)], ids=str)
def test_a_row_that_begins_anew_sees_exactly_nothing_of_the_past(mixers):
    """Rows: one goes on; one begins another document; one goes on, but not where the past ended. The last two: as if there were no past."""
    config, num_keys = tiny.model(*mixers, **DENSE), 7  # gradients of experts would be summed in another order
    rng = np.random.default_rng(1)
    first, second = np.zeros((3, WINDOW), int), np.array([[0] * WINDOW, [0] * WINDOW, [0] * 2 + [1] * 4])
    tokens_BL, start_B = rng.integers(0, 64, second.shape), np.array([WINDOW, 0, WINDOW + 1])
    batch = Batch.build(tokens_BL, second, start_B=start_B)
    leave = jax.jit(lambda params, batch: language_model.forward(config, params, batch, Switches(past_keys=num_keys)).past)
    with jax.set_mesh(mesh_from()):
        params, run = tiny.weights(config, bias=0.1), after_past(config, num_keys)
        pasts = [leave(params, Batch.build(rng.integers(0, 64, first.shape), first)) for _ in range(2)]
        nothing = jax.tree.map(jnp.zeros_like, pasts[0])
        outs = [np.asarray(run(params, batch, past)[0][1]) for past in (*pasts, nothing)]
        alone = dataclasses.replace(batch, weights_BL=batch.weights_BL * np.array([[0], [1], [1]], np.float32))
        grads = [jax.device_get(run(params, alone, past)[1]) for past in (*pasts, nothing)]
    assert np.abs(outs[0][0] - outs[1][0]).max() > 1e-3 < np.abs(outs[0][0] - outs[2][0]).max()
    for out, grad in zip(outs[1:], grads[1:], strict=True):
        np.testing.assert_array_equal(out[1:], outs[0][1:])
        jax.tree.map(np.testing.assert_array_equal, grad, grads[0])


def test_what_a_past_does_not_go_with_is_named():
    config, num_keys = tiny.model("gqa", **DENSE), 4
    params, batch = language_model.shapes(config), Batch.build(np.ones((1, 6), int), np.zeros((1, 6), int))
    tree = Batch.build(np.ones((1, 6), int), np.array([[0, 0, 1, 1, 2, 2]]), parent=[{1: 0, 2: 0}])
    run = lambda batch, past, switches, **other: jax.eval_shape(
        lambda params: language_model.forward(config, params, batch, switches, past=past, **other).past, params
    )
    with jax.set_mesh(mesh_from()):
        left = run(batch, None, Switches(past_keys=num_keys))
        past = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), left)
        with pytest.raises(UnsupportedError, match="plain documents, not in segments with parents"):
            run(tree, past, Switches(past_keys=num_keys))
        with pytest.raises(ValueError, match=r"a past needs switches\.past_keys, .* \(it is None\)"):
            run(batch, past, Switches())
        with pytest.raises(ValueError, match=r"below is given"):
            run(batch, past, Switches(past_keys=num_keys), below=Below({}, 1))
        batches = jax.tree.map(lambda array: np.stack([array] * 2), batch)
        with pytest.raises(ValueError, match="not of 2 microbatches; 1 fits"):
            gradients(config, LossConfig(), params, batches, Switches(past_keys=num_keys), past=past)


def test_pooled_index_keys_leave_no_past():
    config = tiny.model("dsa", indexer=dataclasses.replace(tiny.SIZES["dsa"]["indexer"], pool=2))
    with jax.set_mesh(mesh_from()), pytest.raises(UnsupportedError, match="does not count pools across a past"):
        jax.eval_shape(
            lambda params: language_model.forward(config, params, tiny.batch(), Switches(past_keys=4)), language_model.shapes(config)
        )
