"""Each token visits its experts wherever they live: the chain from dispatch to combine, in one island."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from moejax_kernels import permute, unpermute

from moejax.moe import dispatch
from moejax.parallel.axes import ROWS, TOKENS

KEPT = "dispatch_plan"
"""Name of the results that remat keeps: a recomputed choice could break ties differently."""


def expert_parallel(x_BLD, ids_BLK, probs_BLK, params, *, apply_experts, num_experts: int, capacity_factor: float):
    """Sends rows to their experts, applies them, and sums the weighted results at home.

    Args:
      x_BLD: rows split over the token axes.
      ids_BLK: chosen experts, -1 for none.
      probs_BLK: weights; dropped rows' weights are given to the kept ones of the same token.
      params: tree of weights [E, ., .]: experts split over `expert`, the dim named by `embed` over `fsdp`.
      apply_experts: (params of this device's experts, rows grouped by expert, group sizes) -> rows.
      capacity_factor: 0 for dropless.

    Returns:
      y_BLD, load per expert int32 [E], dropped rows int32, both over all devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    num_devices = mesh.shape["expert"]
    arrays, specs = zip(*params.values(), strict=True)
    names = tuple(params)

    @functools.partial(jax.shard_map, in_specs=(ROWS, ROWS, ROWS, specs), out_specs=(ROWS, P(), P()), check_vma=False)
    def on_each_device(x_BLD, ids_BLK, probs_BLK, arrays):
        x_TD, ids_TK, probs_TK = (array.reshape(-1, array.shape[-1]) for array in (x_BLD, ids_BLK, probs_BLK))
        rows = dispatch.bucket_rows(
            x_TD.shape[0],
            experts_per_token=ids_TK.shape[1],
            num_experts=num_experts,
            num_devices=num_devices,
            capacity_factor=capacity_factor,
        )
        plan = checkpoint_name(dispatch.plan_send(ids_TK, num_experts=num_experts, num_devices=num_devices, rows=rows), KEPT)
        if capacity_factor:
            probs_TK = _compensate(probs_TK, plan.rows.slot_TK)
        exchange = functools.partial(jax.lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0, tiled=True)
        counts_Se = checkpoint_name(exchange(plan.counts_Se), KEPT)
        arrived_WD = exchange(permute(x_TD, plan.rows))
        grouping, sizes_e = checkpoint_name(dispatch.plan_receive(counts_Se, rows=rows), KEPT)
        weights = {name: gather_shards(array, spec) for name, array, spec in zip(names, arrays, specs, strict=True)}
        if num_devices == 1:  # one sender's rows come grouped
            home_RD = apply_experts(weights, arrived_WD, sizes_e)
        else:
            done_WD = apply_experts(weights, permute(arrived_WD, grouping), sizes_e)
            home_RD = exchange(permute(done_WD, dispatch.inverse(grouping)))
        y_TD = unpermute(home_RD, plan.rows, probs_TK)
        load_E, dropped = jax.lax.psum((plan.load_E, plan.num_dropped), TOKENS)
        return y_TD.reshape(x_BLD.shape), load_E, dropped

    return on_each_device(x_BLD, ids_BLK, probs_BLK, arrays)


def gather_shards(array, spec: P):
    """This device's experts as a whole: gathered over `fsdp`; the gradient is summed and scattered back in the master's dtype."""
    for dim, axes in enumerate(spec):
        if axes == "fsdp" and jax.lax.axis_size("fsdp") > 1:
            array = jax.lax.all_gather(array, "fsdp", axis=dim, tiled=True)
    return array


def _compensate(probs_TK, slot_TK):
    """Scales the weights of the rows that were kept so that each token's sum stays what it was; all dropped: 0."""
    kept_TK = jnp.where(slot_TK >= 0, probs_TK, 0)
    total_T1, kept_T1 = probs_TK.sum(-1, keepdims=True), kept_TK.sum(-1, keepdims=True)
    return kept_TK * jnp.where(kept_T1 > 0, total_T1 / jnp.where(kept_T1 > 0, kept_T1, 1), 0)  # exactly 1 where nothing was dropped
