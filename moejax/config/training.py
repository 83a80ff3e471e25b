"""How the weights move, what is measured, and what is kept."""

import dataclasses
from typing import Literal

from moejax.config.errors import refuse_unused, require, require_ranges


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """Parameters that learn differently."""

    pattern: str
    """Regular expression searched in the parameter's path, e.g. `indexer` or `experts`. The first group that matches counts."""
    lr_scale: float = 1.0
    """Factor on the learning rate; 0 freezes the group."""
    weight_decay: float = -1.0
    """Weight decay of the group; -1: optim.weight_decay (and none on gates, biases and norms)."""

    def __post_init__(self):
        require_ranges("optim.groups", self, lr_scale=">= 0 (0: frozen)")
        require(
            self.weight_decay >= 0 or self.weight_decay == -1,
            f"optim.groups: weight_decay={self.weight_decay} must be at least 0, or -1 for optim.weight_decay.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and schedule."""

    kind: Literal["adamw", "muon", "sgd"] = "adamw"
    """`muon`: Muon on matrices (stacked ones too), AdamW on the rest, embeddings and output projection among it. `sgd`: for tests of scale."""
    learning_rate: float = 3e-4
    """Peak learning rate of AdamW and SGD."""
    muon_learning_rate: float = 2e-2
    """Peak learning rate of Muon's matrices."""
    beta1: float = 0.9
    """AdamW: decay of the first moment. Muon uses 0.95."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay on matrices, >= 0; biases, norms and the projections that make gates and decays have none."""
    clip_norm: float = 1.0
    """Largest global norm of the gradients; 0: no clipping."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine to the end, or stable and then linear decay (WSD), or constant."""
    warmup_steps: int = 100
    """Steps of linear warm-up from 0."""
    decay_fraction: float = 0.2
    """WSD: last part of the run in which the rate falls."""
    final_fraction: float = 0.1
    """Learning rate at the end, relative to the peak."""
    groups: tuple[GroupConfig, ...] = ()
    """Exceptions."""

    def __post_init__(self):
        require_ranges(
            "optim",
            self,
            learning_rate=">= 0",
            muon_learning_rate=">= 0",
            eps="> 0",
            weight_decay=">= 0",
            clip_norm=">= 0 (0: no clipping)",
            warmup_steps=">= 0",
        )
        require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, f"optim.beta1={self.beta1} and beta2={self.beta2} must lie in [0, 1).")
        require(0 < self.decay_fraction <= 1, f"optim.decay_fraction={self.decay_fraction} must lie in (0, 1].")
        require(0 <= self.final_fraction <= 1, f"optim.final_fraction={self.final_fraction} must lie in [0, 1].")
        for unless, why, names in (
            (self.kind == "muon", f"optim.kind is {self.kind!r}", ("muon_learning_rate",)),
            (self.kind != "sgd", "optim.kind is 'sgd'", ("beta1", "beta2", "eps")),
            (self.schedule == "wsd", f"optim.schedule is {self.schedule!r}", ("decay_fraction",)),
            (self.schedule != "constant", "optim.schedule is 'constant'", ("final_fraction",)),
        ):
            refuse_unused("optim", self, *names, unless=unless, why=why)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Everything that is minimised, and how the router is balanced."""

    z_coef: float = 0.0
    """Coefficient of the mean squared logsumexp of the output logits."""
    average: Literal["tokens", "sequences"] = "tokens"
    """What the next-token loss is a mean of, over the whole global batch: targets, or documents, each the mean of its own targets."""
    chunk_tokens: int = 0
    """Tokens of a row whose logits exist at a time; 0: chosen, with chunk_vocab, by bytes (see docs/model.md)."""
    chunk_vocab: int = 0
    """Columns of the output projection whose logits exist at a time; model.vocab_size or more: all of them; 0: chosen with chunk_tokens."""
    gradients: Literal["forward", "recompute"] = "forward"
    """Next-token loss: form gradients in the forward sweep and hold them, or make the logits again in the backward pass."""
    kernel: Literal["xla", "triton_gpu"] = "xla"
    """What makes logits and their gradients: a library's matmul and XLA's fusions, or one Triton kernel that writes no float32 logits."""
    balance: Literal["none", "switch", "sequence", "global"] = "none"
    """Balance loss, E sum_e f_e P_e, taken per row, per document, or over the global batch. The last one routes every microbatch twice."""
    balance_coef: float = 1e-2
    """Coefficient of the balance loss, summed over layers."""
    router_z_coef: float = 0.0
    """Coefficient of the mean squared logsumexp of the router's logits, summed over layers."""
    bias_update: Literal["none", "sign", "quantile"] = "none"
    """How the router's correction bias moves after each step."""
    bias_rate: float = 1e-3
    """`sign`: step of the bias."""
    index: Literal["none", "dense", "sparse"] = "none"
    """KL loss of the sparse-attention indexer: over all visible keys with dense attention (warm-up), or over the chosen ones."""
    index_coef: float = 1.0
    """Coefficient of the indexer's loss, summed over layers."""

    def __post_init__(self):
        require_ranges("losses", self, chunk_tokens=">= 0 (0: chosen)", chunk_vocab=">= 0 (0: chosen)")

    def check_coefficients(self) -> None:
        """Refuses negative coefficients, and those of losses that are not there. Not done when made: coefficients may be traced arrays."""
        require_ranges("losses", self, z_coef=">= 0", balance_coef=">= 0", router_z_coef=">= 0", bias_rate=">= 0", index_coef=">= 0")
        refuse_unused("losses", self, "balance_coef", unless=self.balance != "none", why="losses.balance is 'none'")
        refuse_unused("losses", self, "bias_rate", unless=self.bias_update == "sign", why=f"losses.bias_update is {self.bias_update!r}")
        refuse_unused("losses", self, "index_coef", unless=self.index != "none", why="losses.index is 'none'")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    """Optimizer steps in all."""
    seed: int = 0
    """Seed of the initial weights."""
    accumulation: int = 1
    """Microbatches per step; divides data.batch_size."""
    rebuild_metadata: bool = False
    """Every layer builds its documents' borders and positions anew, in place of once per batch: to measure what that would cost."""
    carry_keys: int = 0
    """With data.windows: keys and values (MLA: latents) of each attention layer that a window hands to the next one, beside the states of
    linear attention, which always go on. Exact where it covers a layer's window, or the document."""
    train_only: str = ""
    """Regular expression of the parameters that learn; empty: all. The indexer's dense warm-up uses `indexer`, `^(?!.*indexer)` freezes it."""
    frozen_cache_mib: int = 0
    """With train_only: at most so many MiB of host memory for what the layers below the first one that learns make of rows, found again when
    a row comes by again; 0: they are computed in every step."""
    frozen_cache_files_mib: int = 0
    """With frozen_cache_mib: MiB of files, in `frozen_cache` in the run's folder, for rows that host memory has no room for; they outlive the
    process. 0: none."""
    eval_every: int = 0
    """Steps between evaluations; 0: at the end only."""
    eval_batches: int = 8
    """Batches of one evaluation."""
    log_every: int = 1
    """Steps between two lines of metrics."""
    debug: bool = False
    """Check the segments' checksum, and name the first layer with a non-finite value. Slower."""
    deterministic: bool = False
    """Ask XLA for deterministic kernels on GPUs; CPU programs are deterministic as they are."""
    max_skipped: int = 100
    """Non-finite steps in a row after which the run gives up; each is skipped and counted."""

    def __post_init__(self):
        require_ranges(
            "train",
            self,
            steps=">= 1",
            accumulation=">= 1",
            carry_keys=">= 0",
            frozen_cache_mib=">= 0 (0: nothing is kept)",
            frozen_cache_files_mib=">= 0 (0: no files)",
            eval_every=">= 0 (0: at the end only)",
            eval_batches=">= 1",
            log_every=">= 1",
            max_skipped=">= 0",
        )
        refuse_unused("train", self, "frozen_cache_files_mib", unless=self.frozen_cache_mib > 0, why="train.frozen_cache_mib is 0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is kept in the run's folder."""

    every: int = 0
    """Steps between checkpoints; 0: only at the end and on SIGTERM."""
    keep: int = 2
    """Newest checkpoints kept."""
    resume: str = "auto"
    """`auto`: from the newest checkpoint of the run's folder, if there is one; `never`; or the path of a checkpoint, which must exist."""
    term_timeout_s: int = 60
    """Seconds within which SIGTERM has saved and ended the run."""

    def __post_init__(self):
        require_ranges("checkpoint", self, every=">= 0 (0: at the end and on SIGTERM)", keep=">= 1", term_timeout_s="> 0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObserveConfig:
    """What is written down."""

    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""
    profile: str = ""
    """`first:last`, the steps whose trace is recorded, e.g. 10:13; empty: none."""
    dump: bool = False
    """Write the compiled step's program and memory analysis into the run's folder."""
    sample_tokens: int = 200
    """Tokens of the continuation printed at the end; 0: none."""
    peak_tflops: float = 0.0
    """Peak of one device for MFU, in 1e12 FLOP/s; 0: known GPUs by name, else MFU is not shown."""

    def profile_steps(self) -> tuple[int, int] | None:
        """First and last step to trace, or None."""
        if not self.profile:
            return None
        first, _, last = self.profile.partition(":")
        require(
            first.isdigit() and last.isdigit() and int(first) <= int(last),
            f"observe.profile={self.profile!r} must be first:last, e.g. 10:13.",
        )
        return int(first), int(last)

    def __post_init__(self):
        require_ranges("observe", self, sample_tokens=">= 0 (0: none)", peak_tflops=">= 0 (0: by the GPU's name)")
        self.profile_steps()
