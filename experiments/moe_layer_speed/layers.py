"""One mixture-of-experts layer, written three ways: moejax's module, one-hot einsums, and `jax.lax.ragged_dot`.

Each way is a function (weights, x_BLD) -> y_BLD, dropped; the two peers share the router and the exchange between devices.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from moejax.config.model import ModelConfig
from moejax.model.context import Context, Switches
from moejax.model.feed_forward import MixtureOfExperts
from moejax.parallel.axes import ROWS, TOKENS

PEER_SPECS = {"router_DE": P(), "gate_EDF": P("expert"), "up_EDF": P("expert"), "down_EFD": P("expert")}


def moejax_layer(config: ModelConfig, segments):
    """The module as models use it."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: MixtureOfExperts(config, rngs=nnx.Rngs(0))))
    context = Context(segments=segments, positions_BL=None, switches=Switches(training=True))

    def layer(weights, x_BLD):
        experts = {name: nnx.Param(array) for name, array in weights.items() if name != "router_DE"}
        state = nnx.State({"experts": experts, "router": {"weight_DE": nnx.Param(weights["router_DE"])}})
        y_BLD, report = nnx.merge(graph, state)(x_BLD, context)
        return y_BLD, report["dropped"]

    return layer


def peer_layer(tokens_to_experts_and_back, **options):
    """A peer's work on one device's tokens, over all devices."""

    @functools.partial(jax.shard_map, in_specs=(PEER_SPECS, ROWS), out_specs=(ROWS, P()), check_vma=False)
    def layer(weights, x_BLD):
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        y_TD, dropped = tokens_to_experts_and_back(weights, x_TD, **options)
        return y_TD.reshape(x_BLD.shape), jax.lax.psum(dropped, TOKENS)

    return layer


def choose(x_TD, router_DE, k: int):
    """Softmax over all experts, the k best, weights renormalised."""
    probs_TK, ids_TK = jax.lax.top_k(jax.nn.softmax(x_TD @ router_DE, -1), k)
    return probs_TK / jnp.sum(probs_TK, -1, keepdims=True), ids_TK


def one_hot(weights, x_TD, *, k: int, capacity: int):
    """GShard (arXiv 2006.16668, algorithm 1) and Switch Transformer: dispatch and combine are tensors [T, E, C], with C places of an
    expert for the tokens of one device, which are a group.

    A token's k choices are summed before places are counted, so that nothing of size [T, K, E, C] exists.
    """
    probs_TK, ids_TK = choose(x_TD, weights["router_DE"], k)
    chosen_TKE = jax.nn.one_hot(ids_TK, weights["router_DE"].shape[1], dtype=x_TD.dtype)
    chosen_TE = chosen_TKE.sum(1).astype(jnp.int32)
    place_TE = jnp.where(chosen_TE > 0, jnp.cumsum(chosen_TE, 0) - 1, -1)
    dispatch_TEC = jax.nn.one_hot(place_TE, capacity, dtype=x_TD.dtype)
    combine_TEC = jnp.einsum("tk,tke->te", probs_TK, chosen_TKE)[:, :, None] * dispatch_TEC
    sent_ECD = jnp.einsum("tec,td->ecd", dispatch_TEC, x_TD)
    mine_eWD = jax.lax.all_to_all(sent_ECD, "expert", split_axis=0, concat_axis=1, tiled=True)
    gate_eWF, up_eWF = (jnp.einsum("ewd,edf->ewf", mine_eWD, weights[name]) for name in ("gate_EDF", "up_EDF"))
    done_eWD = jnp.einsum("ewf,efd->ewd", jax.nn.silu(gate_eWF) * up_eWF, weights["down_EFD"])
    home_ECD = jax.lax.all_to_all(done_eWD, "expert", split_axis=1, concat_axis=0, tiled=True)
    return jnp.einsum("tec,ecd->td", combine_TEC, home_ECD), jnp.sum(place_TE >= capacity, dtype=jnp.int32)


def ragged_dot(weights, x_TD, *, k: int, bucket_rows: int):
    """Rows sorted by expert with `jnp.argsort`, one bucket per device, and `jax.lax.ragged_dot` over the rows that arrived."""
    num_devices, num_experts = jax.lax.axis_size("expert"), weights["router_DE"].shape[1]
    per_device, num_rows = num_experts // num_devices, num_devices * bucket_rows
    probs_TK, ids_TK = choose(x_TD, weights["router_DE"], k)
    id_R = ids_TK.reshape(-1)
    order_R = jnp.argsort(id_R)  # routed rows in the order of their experts
    device_R = id_R[order_R] // per_device
    sent_S = jnp.bincount(device_R, length=num_devices)
    rank_R = jnp.arange(id_R.size) - (jnp.cumsum(sent_S) - sent_S)[device_R]
    place_R = jnp.where(rank_R < bucket_rows, device_R * bucket_rows + rank_R, num_rows)
    exchange = functools.partial(jax.lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0, tiled=True)

    sent_WD = jnp.zeros((num_rows, x_TD.shape[1]), x_TD.dtype).at[place_R].set(x_TD[order_R // k], mode="drop")
    local_W = jnp.full(num_rows, per_device).at[place_R].set(id_R[order_R] % per_device, mode="drop")  # the last: no row
    arrived_WD, local_W = exchange(sent_WD), exchange(local_W)
    grouped_W = jnp.argsort(local_W)
    sizes_e = jnp.bincount(local_W, length=per_device).astype(jnp.int32)
    x_WD = arrived_WD[grouped_W]
    gate_WF, up_WF = (jax.lax.ragged_dot(x_WD, weights[name], sizes_e) for name in ("gate_EDF", "up_EDF"))
    done_WD = jax.lax.ragged_dot(jax.nn.silu(gate_WF) * up_WF, weights["down_EFD"], sizes_e)
    home_WD = exchange(jnp.zeros_like(done_WD).at[grouped_W].set(done_WD))
    y_RD = home_WD.at[place_R].get(mode="fill", fill_value=0)
    y_TKD = jnp.zeros_like(y_RD).at[order_R].set(y_RD).reshape(*ids_TK.shape, -1)
    return jnp.einsum("tk,tkd->td", probs_TK, y_TKD), jnp.sum(rank_R >= bucket_rows, dtype=jnp.int32)
