"""Train steps over windows, rows and what they leave split over devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from moejax.config.data import DataConfig
from moejax.config.training import LossConfig, TrainConfig
from moejax.data.batch import NOTHING, Batch
from moejax.parallel.mesh import mesh_from
from moejax.train.evaluate import eval_step
from moejax.train.program import make_program
from moejax.train.state import init_state, past_shapes

STILL = dataclasses.replace(tiny.SGD, learning_rate=0.0)
ROWS, WINDOW = 4, 8
MIXERS = "kda", "gqa", "kda", "gqa", "gqa"
MODEL = tiny.model(*MIXERS, feed_forwards=("dense",), dense_hidden=16, moe=tiny.MoEConfig())
"""Two stacked units, and a layer behind them."""
DATA = DataConfig(seq_len=WINDOW, batch_size=ROWS, windows=True)


def whole():
    """Row 0: one document; row 1: two; the others: one that ends, and another that does not."""
    ids_BL = np.array([[0] * 24, [0] * 13 + [1] * 11, [0] * 20 + [-1] * 4, [0] * 3 + [1] * 21])
    return Batch.build(np.random.default_rng(0).integers(0, 64, ids_BL.shape), ids_BL)


def windows(batch):
    """The batch in three."""
    for at in range(0, 24, WINDOW):
        end = at + WINDOW
        next_B = np.where(batch.weights_BL[:, end - 1] > 0, batch.targets_BL[:, end - 1], NOTHING)
        part = batch.tokens_BL[:, at:end], batch.segments.ids_BL[:, at:end]
        yield Batch.build(*part, start_B=batch.positions_BL[:, at], next_B=next_B)


@pytest.mark.slow
def test_steps_over_windows_see_the_loss_of_the_whole_and_forget_after_a_step_that_is_not_finite():
    config, losses, train = MODEL, LossConfig(), TrainConfig(carry_keys=16)
    mesh, program = mesh_from(data=2, fsdp=2), make_program(config, losses, STILL, train, windows=True)
    with jax.set_mesh(mesh):
        params = tiny.lay(tiny.weights(config), config, mesh)
        arguments = params, {}, tiny.put(whole(), mesh)
        evaluate = eval_step.lower(*arguments, config=config).compile(compiler_options=tiny.QUICK_TO_COMPILE)
        nll, num_targets = evaluate(*arguments)
        past = past_shapes(config, DATA, train)
        state = init_state(config, program.optimizer, mesh, 0, past)
        assert state.past.layers["unit"] and state.past.layers["tail"]  # stacked layers and others
        state = dataclasses.replace(state, params=params)
        places = jax.tree.map(lambda array: array.sharding, state)
        step = jax.jit(program.step, out_shardings=(places, None), compiler_options=tiny.QUICK_TO_COMPILE)
        nats, targets, going_on = 0.0, 0.0, []
        for batch in windows(whole()):
            state, out = step(state, tiny.put(batch, mesh))
            going_on.append((int(out.scalars["rows_going_on"]), int(out.scalars["rows_cut_off"])))
            nats, targets = nats + out.scalars["loss_nats"] * out.scalars["targets"], targets + out.scalars["targets"]
        assert targets == num_targets and going_on == [(0, 0), (4, 0), (4, 0)]
        np.testing.assert_allclose(nats, nll, rtol=2e-6)  # float32, sums in another order
        assert np.asarray(state.past.held_B).tolist() == [24, 11, 0, 21] and np.asarray(state.past.next_B).tolist() == [24, 11, 0, 21]
        assert state.past.held_B.sharding.spec[0] == ("data", "fsdp", "expert")
        broken = dataclasses.replace(state, params=jax.tree.map(lambda weight: weight * jnp.nan, state.params))
        forgot, out = step(broken, tiny.put(next(windows(whole())), mesh))
        assert out.scalars["skipped_steps"] == 1
        _, second, _ = windows(whole())
        _, out = step(dataclasses.replace(forgot, params=params), tiny.put(second, mesh))
        assert (out.scalars["rows_going_on"], out.scalars["rows_cut_off"]) == (0, 4)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(forgot.past))
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.past.layers))
