"""How large a cache should be: as large as its last bytes are worth their cost."""

import dataclasses
import math

FACTORS = (16.0, 8.0, 4.0, 2.0, 1.5, 1.25, 1.125)
"""Sizes that are looked at, relative to the present one; and the limit."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TierLimits:
    """What bounds one tier of a store."""

    limit_bytes: int
    """More it never holds. 0: there is no such tier."""
    start_bytes: int = 0
    """Size to begin with; 0: 1/64 of the limit."""
    reserve_bytes: int = 0
    """Memory (or disk) that the tier leaves free for others: it shrinks when less is."""
    price: float = 0.5
    """What the whole limit costs, in hits per lookup: x of the limit more must turn at least price * x of the lookups into hits.
    0: the tier grows as long as that brings anything."""


class Sizing:
    """The size of one tier.

    LRU keeps the same entries in a larger cache as in a smaller one, and more. So a lookup that found its entry d bytes behind the tier (in
    a slower tier, or among the names of what was thrown away) is a hit that d more bytes would have brought, exactly. Every `window`
    lookups the tier takes the largest size for which

        hits that the additional bytes would have brought / lookups  >=  price * additional bytes / limit,

    by two standard deviations of chance, so that luck alone does not let it grow. Yields fall with size in most streams (in Zipf's law like
    1 / size): there growth ends, at 80 to 90 % hits for exponents around 1. Looking far ahead lets a loop over all keys, where a little more
    memory brings nothing, have the size at which all fits.
    """

    def __init__(self, limits: TierLimits, *, window: int = 1024):
        self.limits, self.window = limits, window
        self.target_bytes = min(limits.limit_bytes, limits.start_bytes or max(limits.limit_bytes // 64, 1))
        self._lookups, self._behind = 0, []

    def make_room_for(self, entry_bytes: int) -> None:
        """A tier holds at least four entries of a size that it is given, or its limit."""
        self.target_bytes = max(self.target_bytes, min(self.limits.limit_bytes, 4 * entry_bytes))

    def saw(self, behind_bytes: int | None) -> None:
        """One lookup.

        Args:
          behind_bytes: bytes that the tier would have had to hold more to have the entry; None: it had it, or a faster tier, or nothing is
            known of the entry.
        """
        self._lookups += 1
        if behind_bytes is not None:
            self._behind.append(behind_bytes)
        if self._lookups >= self.window:
            self.target_bytes = max((size for size in self._sizes() if self._pays(size)), default=self.target_bytes)
            self._lookups, self._behind = 0, []

    def _sizes(self) -> list[int]:
        """Sizes above the present one."""
        limit = self.limits.limit_bytes
        return [size for size in (*(int(self.target_bytes * factor) for factor in FACTORS), limit) if self.target_bytes < size <= limit]

    def _pays(self, size: int) -> bool:
        more = size - self.target_bytes
        found = sum(behind <= more for behind in self._behind)
        needed = self.limits.price * self._lookups * more / self.limits.limit_bytes
        return found >= max(1.0, needed + 2 * math.sqrt(needed))

    def press(self, used_bytes: int, free_bytes: int | None) -> None:
        """Shrinks to what leaves `reserve_bytes` free, given what the tier holds and what is free now (None: not known)."""
        if free_bytes is not None:
            self.target_bytes = max(0, min(self.target_bytes, used_bytes + free_bytes - self.limits.reserve_bytes))
