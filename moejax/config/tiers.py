"""Where the optimizer's state lies between steps."""

import dataclasses
from typing import Literal

from moejax.config.errors import refuse_unused, require, require_ranges


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TiersConfig:
    """Tiers of memory for what only the update of the weights needs."""

    optimizer: Literal["device", "host", "files"] = "device"
    """Moments between updates: on the devices; in pinned host memory; or in files, which are read ahead and written behind layer by layer."""
    master_weights: bool = False
    """The weights in precision.params lie with the moments; the devices hold copies in precision.compute of those that it rounds anyway."""
    folder: str = ""
    """`files`: folder for them, on a fast local disk; they are scratch, checkpoints hold what counts. Empty: `tiers` in the run's folder."""
    ahead: int = 2
    """`files`: pieces (one weight of one layer each) read ahead, and as many whose writing may be behind."""

    def __post_init__(self):
        require_ranges("tiers", self, ahead=">= 1")
        require(
            not self.master_weights or self.optimizer != "device",
            "tiers.master_weights=True with tiers.optimizer='device' would hold the weights twice on the devices; 'host' or 'files' fits.",
        )
        refuse_unused("tiers", self, "folder", "ahead", unless=self.optimizer == "files", why=f"tiers.optimizer is {self.optimizer!r}")
