"""What is minimised: sums over one microbatch, divided by totals of the whole global batch, so that neither the mesh nor the
number of microbatches can change loss or gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config.model import ModelConfig
from moejax.config.training import LossConfig
from moejax.losses import averages
from moejax.memory.policy import Saved
from moejax.model import language_model
from moejax.model.context import Switches
from moejax.parallel.islands import per_rows

LAYER_REPORTS = (
    "load_E",
    "counted_E",
    "dropped",
    "weight_lost",
    "weight_given",
    "needed_capacity",
    "overloaded",
    "scaled_rows",
    "removed_weight",
    "distance_rows_3",
    "together_EE",
    "margins_EN",
    "finite_2",
)
"""What is reported layer by layer; the other results of a layer enter the loss."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Totals:
    """What sums over the global batch are divided by, float32."""

    targets: Any
    """Weights of all targets that count."""
    sequences: Any
    """Documents with such a target."""
    tokens: Any
    """Tokens that are not padding, each once for every document that holds it."""
    rows: Any
    """Rows with at least one token."""
    documents: Any
    """Documents: segments, or in a tree of prefixes the ways from a root to a leaf."""

    def averaged(self, losses: LossConfig):
        """What the sum of the next-token loss is divided by, at least 1."""
        return _at_least_one({"tokens": self.targets, "sequences": self.sequences}[losses.average])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """Sums over the part of the batch that was seen; parts add up."""

    nll: Any
    """Negative log-likelihoods, in nats, weighted as the loss is (`LossConfig.average`)."""
    z: Any
    """Squared logsumexp of the logits, weighted alike."""
    balance: Any
    """Balance losses, each already divided by its total, summed over layers."""
    router_z: Any
    """Squared logsumexp of the router's logits, summed over layers."""
    index_kl: Any
    """KL divergences of the indexers, in nats, summed over layers."""
    layers: dict
    """Loads, dropped rows, margins and finiteness per layer, a tree by section and place."""
    past: Any = None
    """What the rows leave for the next batch, if it is asked for; no sum, but one for each part."""


def totals(batch) -> Totals:
    """Totals of a batch whose arrays have any leading dims."""
    times = batch.segments.multiplicity()
    documents = jnp.where(batch.segments.previous_BL < 0, times, 0)  # a document's first token stands in every document of its tree
    count = lambda numbers: jnp.sum(numbers).astype(jnp.float32)
    weights = averages.counted(batch.targets_BL, batch.weights_BL)
    sequences = averages.num_sequences(weights, batch.segments.starts_BL).astype(jnp.float32)
    return Totals(jnp.sum(weights), sequences, count(times), count((times > 0).any(-1)), count(documents))


def switches_for(
    losses: LossConfig, *, saved: Saved | None = None, debug: bool = False, rebuild: bool = False, past_keys: int | None = None
) -> Switches:
    """What a forward pass must compute for these losses."""
    return Switches(
        saved=saved,
        training=True,
        index=losses.index,
        balance=losses.balance,
        router_z=losses.router_z_coef > 0,
        histogram=losses.bias_update == "quantile",
        debug=debug,
        rebuild=rebuild,
        past_keys=past_keys,
    )


def objective(
    config: ModelConfig, losses: LossConfig, params: dict, batch, whole: Totals, switches: Switches, *, control=None, past=None, below=None
):
    """Loss of one microbatch, so that the losses of all microbatches add up to the global batch's.

    Args:
      batch: the microbatch.
      whole: totals of the global batch.
      control, past, below: see language_model.forward.

    Returns:
      the differentiable loss, and a Report.
    """
    output = language_model.forward(config, params, batch, switches, control=control, past=past, below=below)
    ce = language_model.cross_entropy_sums(
        output,
        _weighted(losses, batch, output.hidden_BLD.dtype),
        z_coef=losses.z_coef,
        chunk_tokens=losses.chunk_tokens,
        chunk_vocab=losses.chunk_vocab,
        gradients=losses.gradients,
        kernel=losses.kernel,
    )
    balance_total = {"none": whole.tokens, "switch": whole.rows, "sequence": whole.documents, "global": whole.tokens}[losses.balance]
    balance = _layer_sum(output.aux, "balance") / _at_least_one(balance_total)
    router_z, index_kl = _layer_sum(output.aux, "router_z"), _layer_sum(output.aux, "index_kl")
    tokens = _at_least_one(whole.tokens)
    loss = ce.loss_sum / whole.averaged(losses) + losses.balance_coef * balance
    loss = loss + losses.router_z_coef * router_z / tokens + losses.index_coef * index_kl / tokens
    layers = jax.tree.map(lambda report: {name: report[name] for name in LAYER_REPORTS if name in report}, output.aux, is_leaf=_is_report)
    return loss, Report(ce.nll_sum, ce.z_sum, balance, router_z, index_kl, layers, output.past)


def _weighted(losses: LossConfig, batch, dtype):
    """The batch with the weights of the loss, at least float32."""
    if losses.average == "tokens":
        return batch
    weights_BL = averages.counted(batch.targets_BL, batch.weights_BL).astype(jnp.promote_types(dtype, jnp.float32))
    return dataclasses.replace(batch, weights_BL=per_rows(averages.sequence_weights, weights_BL, batch.segments.starts_BL))


def _at_least_one(total):
    return jnp.where(total > 0, total, 1)  # nothing to average: the sum is 0 too


def _is_report(node) -> bool:
    """Whether a node of the aux tree belongs to one layer; sections and places map to dicts, reports to arrays."""
    return isinstance(node, dict) and not any(isinstance(value, dict) for value in node.values()) and bool(node)


def _layer_sum(aux: dict, name: str):
    found = [jnp.sum(report[name]) for report in jax.tree.leaves(aux, is_leaf=_is_report) if name in report]
    return sum(found, jnp.zeros(()))
