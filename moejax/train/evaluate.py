"""Held-out loss, and a sampled continuation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config.model import ModelConfig
from moejax.data.batch import Batch
from moejax.model import language_model


@functools.partial(jax.jit, static_argnums=0)
def eval_step(config: ModelConfig, params: dict, batches):
    """Sum of negative log-likelihoods in nats and sum of weights over a [1, B, L] batch."""
    batch = jax.tree.map(lambda array: array[0], batches)
    sums = language_model.cross_entropy_sums(language_model.forward(config, params, batch), batch)
    return sums.nll_sum, sums.weight_sum


def sample(
    config: ModelConfig, params: dict, prompt, *, num_tokens: int, window: int, seed: int = 0, temperature: float = 0.8
) -> np.ndarray:
    """Tokens drawn one by one after a prompt; the whole window is computed anew for each.

    Args:
      params: weights on the mesh that jax.set_mesh has set; one row is computed, so the mesh must have one device.
      prompt: integers [P], P < window.
      window: tokens the model sees; older ones are left out.

    Returns:
      int32 [num_tokens].
    """

    @jax.jit
    def draw(params, batch, last, key):
        logits_BLV = language_model.logits(config, params, batch)
        return jax.random.categorical(key, logits_BLV[0, last] / temperature)

    tokens = list(np.asarray(prompt)[-(window - 1) :])
    for key in jax.random.split(jax.random.key(seed), num_tokens):
        seen = tokens[-window:]
        row_1L, ids_1L = np.zeros((1, window), np.int32), np.full((1, window), -1, np.int32)
        row_1L[0, : len(seen)], ids_1L[0, : len(seen)] = seen, 0
        tokens.append(int(draw(params, Batch.build(row_1L, ids_1L), jnp.int32(len(seen) - 1), key)))
    return np.array(tokens[-num_tokens:], np.int32)
