"""The real train step of a config, compiled for GPUs that are not there."""

import dataclasses

import jax
import numpy as np

from moejax.config.run import Plan, RunConfig, resolve
from moejax.data.batch import Batch
from moejax.observe.memory import compiled_bytes, tree_bytes
from moejax.parallel.mesh import make_mesh
from moejax.parallel.xla_flags import OFFLOADING, TABLE, options_for
from moejax.plan.compiled import collectives, launches
from moejax.plan.schedule import host_copies
from moejax.plan.targets import Target, devices
from moejax.train.file_moments import counts_alone
from moejax.train.frozen import below_shapes
from moejax.train.masters import rounded, split_shapes
from moejax.train.placement import batch_shapes
from moejax.train.program import make_program, with_capacity
from moejax.train.report import describe
from moejax.train.saved import plan_saved, summary
from moejax.train.state import past_shapes, placed_shapes


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that no device has run."""

    plan: Plan
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled
    report: str
    """Mesh, parameters, FLOPs, bytes per device, kernels, launches and collectives, for a person."""


def plan_step(config: RunConfig, target: Target, count: int) -> PlannedStep:
    """Compiles the train step of a config for `count` GPUs.

    Raises:
      ConfigError: the config does not fit so many devices, or JAX's CUDA plugin is not installed.
    """
    plan = resolve(config, count)
    config = plan.config
    mesh = make_mesh(config.mesh, devices(target, count))
    adaptive = config.model.moe.adaptive.highest
    model = with_capacity(config.model, adaptive) if adaptive else config.model  # the largest buffers that a run may come to
    choices = plan_saved(plan, gpu=True, model=model)
    saved, windows = choices.saved, config.data.windows
    program = make_program(model, config.losses, config.optim, config.train, config.tiers, saved=saved, windows=windows)
    zeros_BL = np.zeros((config.data.batch_size, config.data.seq_len), np.int32)
    with jax.set_mesh(mesh):
        past = past_shapes(config.model, config.data, config.train)
        state = placed_shapes(config.model, program.optimizer, mesh, past, moments_on_host=config.tiers.optimizer == "host")
        if config.tiers.master_weights:
            state = split_shapes(state, rounded(config.model, program.updates), config.model.precision.compute)
        if program.moments_in_files:
            state = dataclasses.replace(state, opt_state=counts_alone(state.opt_state), master={})
        trees = {"parent": [{}] * len(zeros_BL), "num_segments": config.data.row_segments} if config.data.share_prefixes else {}
        batch = Batch.build(zeros_BL, zeros_BL, **trees)
        below = None
        if config.train.frozen_cache_mib:
            below = below_shapes(model, config.losses, state.params, batch, mesh, num_stages=program.num_frozen)
        lowered = program.lower(state, batch_shapes(batch, mesh, accumulation=config.train.accumulation), below)
        flags = options_for(mesh.devices.flat[0], OFFLOADING if choices.chosen_bytes("offload") else TABLE)
        compiled = lowered.compile(compiler_options=flags.taken)
    spell = lambda counts: ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"
    lines = [
        f"{'target':9} {count} x {target.name}, {target.memory_bytes / 2**30:.0f} GiB each",
        describe(plan, program.rules, state=tree_bytes(state), **compiled_bytes(compiled)),
        f"{'saved':9} {summary(choices)}",
        *flags.lines(),
        f"{'launches':9} {spell(launches(compiled))} (loop bodies once)",
        f"{'traffic':9} {spell(collectives(compiled))} (loop bodies once)",
    ]
    if copies := host_copies(compiled):
        there, bare = sum(copy.to_host for copy in copies), sum(not copy.meanwhile for copy in copies)
        lines.append(
            f"{'host':9} {there} copies there, {len(copies) - there} back, {bare} of them with no matmul beside (loop bodies once)"
        )
    return PlannedStep(plan, lowered, compiled, "\n".join(lines))
