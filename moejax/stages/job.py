"""One run of training: what is opened once and used at every step."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from moejax.checkpoint.stop import StopSignal
from moejax.checkpoint.store import Checkpointer
from moejax.config.errors import ConfigError
from moejax.config.load import to_json
from moejax.config.run import Plan
from moejax.data.loader import Loader
from moejax.data.markov import MarkovModel, fit_baseline
from moejax.data.sources import DataError
from moejax.model.counting import train_flops_per_token
from moejax.observe import run_folder
from moejax.observe.compile_log import refuse_replication
from moejax.observe.memory import compiled_bytes, tree_bytes
from moejax.observe.metrics import MetricsWriter
from moejax.observe.peaks import peak_tflops
from moejax.parallel.mesh import make_mesh
from moejax.parallel.processes import agree
from moejax.parallel.xla_flags import OFFLOADING, TABLE, options_for
from moejax.stages.tiers import Tiers
from moejax.train.control import buffer_size, control_metrics, decide, move_experts
from moejax.train.evaluate import eval_step
from moejax.train.frozen import FrozenLayers, open_store
from moejax.train.placement import place_batch
from moejax.train.program import make_program, with_capacity
from moejax.train.report import describe
from moejax.train.saved import plan_saved, summary
from moejax.train.state import TrainState


class Run:
    """One training run: what is opened once and used at every step."""

    def __init__(self, plan: Plan, console: Console):
        self.plan, self.console = plan, console
        self.config = config = plan.config
        self.model = config.model
        self.mesh = make_mesh(config.mesh)
        self.main = jax.process_index() == 0
        self.folder = Path(config.out_dir) / config.name
        self.steps: dict[float, Any] = {}
        if adaptive := config.model.moe.adaptive.highest:
            self.model = with_capacity(config.model, adaptive)  # what is not a train step has room for every layer's capacity
        self.choices = plan_saved(plan, gpu="NVIDIA" in jax.local_devices()[0].device_kind, model=self.model)
        self.flags = options_for(jax.local_devices()[0], OFFLOADING if self.choices.chosen_bytes("offload") else TABLE)
        self.program_of = lambda model: make_program(
            model, config.losses, config.optim, config.train, config.tiers, saved=self.choices.saved, windows=config.data.windows
        )
        self.program = self.program_of(config.model)
        self.tiers = Tiers(config, self.program, self.mesh, self.folder, compiler_options=self.options())
        self.loader = self.open("train")
        agree("data", json.dumps(self.loader.identity, indent=1))
        if self.loader.tokenizer.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size={self.model.vocab_size} is smaller than the {self.loader.tokenizer.vocab_size} tokens of "
                f"data.tokenizer={config.data.tokenizer!r}."
            )
        self.checkpoints = Checkpointer(
            self.folder / "checkpoints", optimizer=config.optim.kind, keep=config.checkpoint.keep, every=config.checkpoint.every
        )
        self.stop = StopSignal(config.checkpoint.term_timeout_s)
        self.eval_program: jax.stages.Compiled | None = None
        self.store = open_store(config.train, self.folder / "frozen_cache") if config.train.frozen_cache_mib else None
        self.frozen: FrozenLayers | None = None

    def open(self, split) -> Loader:
        """This process's rows of a split."""
        return Loader(self.config.data, split=split, process_index=jax.process_index(), process_count=jax.process_count())

    def options(self) -> dict[str, Any]:
        """What the compiler is told with each program of the step."""
        if self.config.train.deterministic and jax.default_backend() == "gpu":
            return self.flags.taken | {"xla_gpu_deterministic_ops": True}
        return dict(self.flags.taken)

    def save(self, steps: int, state: TrainState) -> None:
        """Starts to write a checkpoint."""
        self.checkpoints.save(steps, self.tiers.whole(state), {"data": self.loader.state()})

    def start(self) -> TrainState:
        """The state to begin with: from a checkpoint, or fresh; either is announced."""
        for line in self.flags.lines():
            self.say(line)
        found = self.checkpoints.find(self.config.checkpoint.resume)
        if self.loader.skipped:
            names = ", ".join(self.loader.skipped[:3])
            self.say(
                f"data      {len(self.loader.skipped)} files are no UTF-8 text and are left out: {names}{', ...' * (len(self.loader.skipped) > 3)}"
            )
        state = self.load(found)
        if self.store is not None:
            num_stages = self.program.num_frozen
            self.frozen = FrozenLayers(self.model, self.config.losses, state.params, num_stages=num_stages, store=self.store)
        if found is not None and (changed := run_folder.changes(self.folder, to_json(self.config))):
            self.say(f"config    differs from the one the run had before: {', '.join(changed)}")
        # what is written about a run is written once its start is not refused
        run_folder.make(self.config.out_dir, self.config.name, config_json=to_json(self.config))
        return state

    def load(self, found: Path | None) -> TrainState:
        """Fresh weights, or a checkpoint's."""
        if found is None:
            self.say(f"start     fresh weights, seed {self.config.train.seed}")
            with refuse_replication():
                return self.tiers.fresh(self.config.train.seed)
        state, host = self.checkpoints.restore(found, like=self.tiers.like())
        state = self.tiers.resumed(state)
        self.loader.restore(host["data"])
        self.say(f"start     resumed from {found} after step {int(state.step)}")
        return state

    def step_for(self, state: TrainState, batches, capacity_factor: float | None = None, below: tuple = ()):
        """The compiled step whose buffers hold what the layers may fill; one for each size of buffer, compiled when it is first needed.

        Args:
          capacity_factor: the largest of a layer; None: ask the state.
          below: what frozen layers made of the batch, if that is handed to the step.
        """
        adaptive, size = self.config.model.moe.adaptive, self.config.model.moe.capacity_factor
        if adaptive.highest:
            largest = capacity_factor or float(control_metrics(state.control)["capacity_factor_max"])
            size = buffer_size(adaptive, largest)
        if size not in self.steps:
            config = self.config
            if adaptive.highest:
                self.program = self.program_of(with_capacity(config.model, size))
            compiled = self.compile(state, batches, below)
            self.say(describe(self.plan, self.program.rules, state=tree_bytes(state), **compiled_bytes(compiled)))
            for line in (f"saved     {summary(self.choices)}", *self.tiers.lines(state)):
                self.say(line)
            self.steps[size] = self.tiers.step(compiled)
            if adaptive.highest:
                self.say(
                    f"capacity  buffers for {size:.3g} times the mean rows, one of {', '.join(f'{each:.3g}' for each in adaptive.sizes())}"
                )
        return self.steps[size]

    def rebalance(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """Places experts and copies anew by the loads counted so far; says what that should bring."""
        control, sources, values = decide(self.config.model, jax.device_get(state.control), num_devices=self.mesh.shape["expert"])
        state = dataclasses.replace(state, control=jax.device_put(control, state.step.sharding))
        if sources:
            weights = state.params, state.opt_state
            move = jax.jit(move_experts, donate_argnums=0, out_shardings=jax.tree.map(lambda array: array.sharding, weights))
            params, opt_state = move(weights, sources)
            state = dataclasses.replace(state, params=params, opt_state=opt_state)
        return state, values

    def compile(self, state: TrainState, batches, below: tuple = ()):
        """The compiled step; XLA replicating a tensor by itself is an error."""
        lowered = self.program.lower(state, batches, *below)
        with refuse_replication():
            compiled = lowered.compile(compiler_options=self.options())
        agree("train step", fingerprint(lowered))
        if self.config.observe.dump and self.main:
            (self.folder / "step.hlo.txt").write_text(compiled.as_text() or "")
            (self.folder / "step.memory.txt").write_text(str(compiled.memory_analysis()))
        return compiled

    def say(self, line: str) -> None:
        """A line for a person, from the first process alone."""
        if self.main:
            self.console.print(line, highlight=False, soft_wrap=True)

    def next_batch(self):
        """The next global batch on the mesh; in debug mode its borders are checked first."""
        batch = next(self.loader)
        if self.config.train.debug:
            batch.segments.verify()
        return place_batch(batch, self.mesh, accumulation=self.config.train.accumulation)

    @functools.cached_property
    def markov(self) -> MarkovModel | None:
        """Order-2 byte Markov model of the training split; None without a byte tokenizer."""
        return fit_baseline(self.config.data) if self.config.data.tokenizer == "bytes" else None

    def evaluate(self, state: TrainState) -> tuple[float, float | None] | None:
        """Held-out loss in nats per target, and the Markov model's on the same targets (None without a byte tokenizer).

        None if SIGTERM came meanwhile to a run of one process: saving goes before the rest of the evaluation.
        """
        sums = np.zeros(3)
        with contextlib.closing(self.open("heldout")) as loader:
            for batch in itertools.islice(loader, self.config.train.eval_batches):
                if self.stop.asked and jax.process_count() == 1:
                    return None
                placed = place_batch(batch, self.mesh, accumulation=self.config.train.accumulation)
                if self.eval_program is None:
                    self.eval_program = self.compile_evaluation(state, placed)
                nll, weight = self.eval_program(state.params, state.control, placed)
                local = self.markov.batch_nats(batch)[0] if self.markov else 0.0
                theirs = multihost_utils.process_allgather(np.float64(local)).sum() if jax.process_count() > 1 else local
                sums += float(nll), float(weight), theirs
        if sums[1] == 0:
            raise DataError(
                f"the first train.eval_batches={self.config.train.eval_batches} held-out batches hold no target; ask for more of them."
            )
        return sums[0] / sums[1], sums[2] / sums[1] if self.markov else None

    def compile_evaluation(self, state: TrainState, batches) -> jax.stages.Compiled:
        """The compiled evaluation of one global batch; held to the same rule as the step."""
        losses = self.config.losses
        lowered = eval_step.lower(
            state.params,
            state.control,
            batches,
            config=self.model,
            index=losses.index,
            chunk_tokens=losses.chunk_tokens,
            chunk_vocab=losses.chunk_vocab,
        )
        with refuse_replication():
            compiled = lowered.compile(compiler_options=self.flags.taken)
        agree("evaluation", fingerprint(lowered))
        return compiled

    def metrics(self, steps: int) -> MetricsWriter:
        """Where numbers go; lines after `steps` of an earlier life are taken out."""
        return MetricsWriter(self.folder, tensorboard=self.config.observe.tensorboard, resumed_step=steps)

    def speed(self, values: dict[str, float]) -> dict[str, float]:
        """Tokens, FLOPs and MFU of a step; MFU only where the device's peak is known."""
        computed = values.get("computed_tokens", values["tokens"])  # of a prefix that documents share, fewer
        flops = train_flops_per_token(self.model, self.config.data.seq_len) * computed / values["step_s"]
        speeds = {"tokens_per_s": values["tokens"] / values["step_s"], "tflops_per_s_per_device": flops / 1e12 / jax.device_count()}
        peak = self.config.observe.peak_tflops or peak_tflops(jax.devices()[0].device_kind)
        return speeds | ({"mfu": speeds["tflops_per_s_per_device"] / peak} if peak else {})

    def close(self) -> None:
        """Waits for checkpoints, and ends the threads."""
        self.checkpoints.close()
        self.tiers.close()
        self.loader.close()
        self.stop.close()
        if self.store is not None:
            self.store.close()


def fingerprint(lowered: jax.stages.Lowered) -> str:
    """Tells programs apart; processes that run different ones would wait for each other in vain."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()
