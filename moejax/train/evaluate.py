"""Held-out loss, and a sampled continuation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moejax.config.model import ModelConfig
from moejax.data.batch import Batch
from moejax.model import language_model
from moejax.model.context import Switches
from moejax.parallel.processes import agree
from moejax.train.control import told
from moejax.train.placement import place_batch


@functools.partial(jax.jit, static_argnames=("config", "index", "chunk_tokens", "chunk_vocab"))
def eval_step(
    params: dict, control: dict, batches, *, config: ModelConfig, index: str = "none", chunk_tokens: int = 0, chunk_vocab: int = 0
):
    """Sum of negative log-likelihoods in nats and sum of weights over [A, B, L] batches, one microbatch after the other.

    Args:
      control: the train state's.
      index: "dense" while sparse attention is still dense (the indexer's warm-up).
      chunk_tokens, chunk_vocab: tokens of each row, and columns of the vocabulary, whose logits a device holds at once; 0: chosen.
    """
    switches = Switches(index="dense" if index == "dense" else "none")

    def add(sums, batch):
        output = language_model.forward(config, params, batch, switches, control=told(config, control))
        parts = language_model.cross_entropy_sums(output, batch, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
        return (sums[0] + parts.nll_sum, sums[1] + parts.weight_sum), None

    first = jax.tree.map(lambda array: array[0], batches)
    like = jax.eval_shape(lambda batch: add((0.0, 0.0), batch)[0], first)
    return jax.lax.scan(add, jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), like), batches)[0]


@functools.partial(jax.jit, static_argnames=("config", "temperature"))
def _draw(params: dict, control: dict, batches, last, key, *, config: ModelConfig, temperature: float):
    """The token after position `last` of the first row, the same on all devices."""
    batch = jax.tree.map(lambda array: array[0], batches)
    logits_BLV = language_model.logits(config, params, batch, control=told(config, control))
    logits_V = jax.lax.with_sharding_constraint(jax.lax.dynamic_index_in_dim(logits_BLV, last, 1, keepdims=False), P())[0]
    return jax.random.categorical(key, logits_V / temperature)


def sample(
    config: ModelConfig,
    params: dict,
    prompt,
    *,
    num_tokens: int,
    window: int,
    seed: int = 0,
    temperature: float = 0.8,
    control: dict | None = None,
) -> np.ndarray:
    """Tokens drawn one by one after a prompt, on the whole mesh; the window is computed anew for each, in one row per token shard.

    All processes call it together, with the mesh set by jax.set_mesh.

    Args:
      params: weights where training has them.
      prompt: integers [P], P < window.
      window: tokens the model sees; older ones are left out.
      control: the train state's, if it has one.

    Returns:
      int32 [num_tokens].
    """
    mesh = jax.sharding.get_mesh()
    rows = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"] // jax.process_count()
    tokens = list(np.asarray(prompt)[-(window - 1) :])
    compiled = None
    for key in jax.random.split(jax.random.key(seed), num_tokens):
        seen = tokens[-window:]
        row_L, ids_L = np.zeros(window, np.int32), np.full(window, -1, np.int32)
        row_L[: len(seen)], ids_L[: len(seen)] = seen, 0
        batch = Batch.build(np.tile(row_L, (rows, 1)), np.tile(ids_L, (rows, 1)))
        args = params, control or {}, place_batch(batch, mesh, accumulation=1), jnp.int32(len(seen) - 1), key
        if compiled is None:
            compiled = _draw.lower(*args, config=config, temperature=temperature).compile()
            agree("sampling", f"{num_tokens} tokens")
        tokens.append(int(compiled(*args)))
    return np.array(tokens[-num_tokens:], np.int32)
