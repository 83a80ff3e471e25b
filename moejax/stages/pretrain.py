"""Training from a config: the loop around the step."""

import contextlib
import dataclasses
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from moejax_kernels.gpu import why_no_triton
from rich.console import Console

from moejax.checkpoint.layout import LayoutError
from moejax.checkpoint.store import MissingCheckpointError
from moejax.config.errors import ConfigError, require
from moejax.config.load import to_json
from moejax.config.mesh import ProcessConfig
from moejax.config.run import Plan, RunConfig, resolve
from moejax.data.loader import StateMismatchError
from moejax.data.sources import DataError
from moejax.memory.shelf import ShelfBusyError, ShelfError
from moejax.memory.store import StoreBusyError
from moejax.observe.compile_log import ReplicationError
from moejax.observe.profile import Profiler
from moejax.observe.progress import ProgressBar
from moejax.observe.timing import StepTimer
from moejax.parallel.processes import DisagreementError, agree, initialize, simulate_devices
from moejax.stages.job import Run
from moejax.train.evaluate import sample
from moejax.train.report import first_non_finite
from moejax.train.state import TrainState

USER_ERRORS = (
    ConfigError,
    DataError,
    StateMismatchError,
    LayoutError,
    MissingCheckpointError,
    DisagreementError,
    ShelfBusyError,
    StoreBusyError,
    FileExistsError,
    NotADirectoryError,
    PermissionError,
)
"""What the person who started the run can mend: the message is enough."""


class DivergedError(RuntimeError):
    """Too many non-finite steps in a row, or, in debug mode, the first one."""


ENDS = (DivergedError, ReplicationError, ShelfError)
"""What ends a run that was asked for rightly: the message is enough."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    heldout_nats: float
    """Held-out loss per target."""
    baseline_nats: float | None
    """Order-2 byte Markov model on the same targets; None for a tokenizer other than bytes, or if the run was stopped."""
    finished: bool
    """False after SIGTERM."""


def prepare(config: RunConfig) -> Plan:
    """Starts JAX as the config says (pretended devices, other processes), and checks the config against theirs and the devices."""
    precision = config.model.precision
    if "float64" in (precision.params, precision.compute):
        jax.config.update("jax_enable_x64", True)
    if config.mesh.simulate_devices:
        simulate_devices(config.mesh.simulate_devices)
    initialize(config.processes)
    require(
        config.model.moe.transport != "ragged" or jax.default_backend() == "gpu",
        f"model.moe.transport='ragged' needs GPUs: XLA has no ragged all-to-all for {jax.default_backend()!r}; 'all_to_all' fits.",
    )
    if config.losses.kernel == "triton_gpu" and (reason := why_no_triton()):
        raise ConfigError(f"losses.kernel='triton_gpu' {reason.split('. ')[0]}; 'xla' fits.")
    mib = config.train.frozen_cache_mib
    require(
        not mib or jax.process_count() == 1,
        f"train.frozen_cache_mib={mib} is built for one process, and there are {jax.process_count()}; 0 fits.",
    )
    agree("config", to_json(dataclasses.replace(config, processes=ProcessConfig())))
    return resolve(config, jax.device_count())


def run(config: RunConfig, console: Console) -> Outcome:
    """Trains as the config says, from a checkpoint or from fresh weights; writes metrics, checkpoints and what a person reads."""
    began_s = time.perf_counter()
    job = Run(prepare(config), console)
    with jax.set_mesh(job.mesh):
        job.markov  # noqa: B018  # reads all training text: what cannot be read is to be known before the first step
        state, finished = loop(job, job.start())
        steps = int(state.step)
        job.checkpoints.wait()
        if job.checkpoints.latest() != steps:
            job.save(steps, state)
        job.checkpoints.wait()
        job.stop.close()  # all is saved: from here on SIGTERM ends the process
        if not finished:
            job.say(f"stopped   SIGTERM: saved after step {steps} in {job.checkpoints.folder}")
            job.close()
            return Outcome(np.nan, None, False)
        heldout, baseline = job.evaluate(state) or (np.nan, None)
        versus = f"; order-2 byte Markov model on the same targets {baseline:.4f}" if baseline is not None else ""
        job.say(f"held out  {heldout:.4f} nats a token{versus}")
        with contextlib.closing(job.metrics(steps)) as writer:
            writer.write(steps, {"heldout_nats": heldout} | ({"markov_nats": baseline} if baseline is not None else {}))
        continue_text(job, state)
    job.say(f"run       {job.folder}, {time.perf_counter() - began_s:.0f} s in all")
    job.close()
    return Outcome(heldout, baseline, True)


def loop(job: Run, state: TrainState) -> tuple[TrainState, bool]:
    """Steps until the config's last one, or until SIGTERM; says whether it got to the end."""
    config, first = job.config, int(state.step)
    timer, capacity, loads, finished = StepTimer(), None, {}, True
    with (
        contextlib.closing(job.metrics(first)) as writer,
        contextlib.closing(ProgressBar(job.console, steps=config.train.steps, first=first, shown=job.main)) as bar,
        contextlib.closing(Profiler(job.folder, config.observe.profile_steps())) as profiler,
    ):
        if first >= config.train.steps:
            job.say(f"done      all train.steps={config.train.steps} steps are done; what follows is the evaluation")
        for step in range(first + 1, config.train.steps + 1):
            with timer.part("data"):
                batches = job.next_batch()
                below = () if job.frozen is None else (job.frozen(state.params, batches),)
            compiled = job.step_for(state, batches, capacity, below)
            if step == first + 1:
                timer.lap()
            profiler.before(step)
            with timer.part("compute"):
                state, out = compiled(state, batches, *below)
                values = {name: float(value) for name, value in out.scalars.items()} | (job.frozen.metrics() if job.frozen else {})
            capacity = values.get("capacity_factor_max")
            profiler.after(step)
            if config.model.moe.copies.every and step % config.model.moe.copies.every == 0:
                state, loads = job.rebalance(state)
            values |= loads | job.tiers.values(state)
            if config.train.debug:
                refuse_non_finite(job, step, out)
            if values["skipped_in_a_row"] > config.train.max_skipped:
                raise DivergedError(
                    f"step {step}: {values['skipped_in_a_row']:.0f} steps in a row had a non-finite loss or gradient "
                    f"(train.max_skipped={config.train.max_skipped}); run again with --debug to see where it begins."
                )
            with timer.part("checkpoint"):
                if job.checkpoints.due(step):
                    job.save(step, state)
            values |= timer.lap()
            values |= job.speed(values)
            due = config.train.eval_every and step % config.train.eval_every == 0 and step < config.train.steps
            if evaluated := job.evaluate(state) if due else None:
                values["heldout_nats"] = evaluated[0]
                timer.lap()
            if step % config.train.log_every == 0 or step == config.train.steps or evaluated:
                writer.write(step, values)
            bar.update(step, values)
            if job.stop.reached(step):
                finished = step == config.train.steps
                break
    if traced := profiler.summary():
        job.say(f"profile   {traced}")
    return state, finished


def refuse_non_finite(job: Run, step: int, out) -> None:
    """Raises DivergedError naming the first layer, or the first weight's gradient, that is not finite."""
    where = first_non_finite(job.plan, jax.device_get(out.finite_layers), jax.device_get(out.finite_gradients))
    if where:
        raise DivergedError(f"step {step}: the first non-finite value is in {where}.")


def continue_text(job: Run, state: TrainState) -> None:
    """Prints a continuation of the held-out text's beginning."""
    count = job.config.observe.sample_tokens
    if not count:
        return
    window = min(job.config.data.seq_len, 256)
    with contextlib.closing(job.open("heldout")) as loader:
        prompt = next(loader).tokens_BL[0, : window // 4]
    if jax.process_count() > 1:
        prompt = multihost_utils.broadcast_one_to_all(prompt)
    tokens = sample(job.model, state.params, prompt, num_tokens=count, window=window, control=state.control)
    job.say(f"sample    after {job.loader.tokenizer.decode(prompt[-60:])!r}:")
    job.say(job.loader.tokenizer.decode(tokens))
