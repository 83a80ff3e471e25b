"""How large a cache should be: as large as its last bytes are worth their cost."""

import dataclasses
import math

FACTORS = (16.0, 8.0, 4.0, 2.0, 1.5, 1.25, 1.125)
"""Sizes that are looked at, relative to the present one, above and below; and the bounds."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TierLimits:
    """What bounds one tier of a store."""

    limit_bytes: int
    """More it never holds. 0: there is no such tier."""
    start_bytes: int = 0
    """Size to begin with, and the least that a tier chooses by itself; 0: 1/64 of the limit."""
    reserve_bytes: int = 0
    """Memory (or disk) that the tier leaves free for others: it shrinks when less is."""
    price: float = 0.5
    """What the whole limit costs, in hits per lookup: x of the limit must turn at least price * x of the lookups into hits.
    0: the tier grows as long as that brings anything, and never shrinks by itself."""


class Sizing:
    """The size of one tier.

    LRU keeps the same entries in a larger cache as in a smaller one, and more. So a lookup has a distance, the bytes of its entry and of all
    that was used since: each cache of at least that size has the entry, or would have it had it been so large for long enough. Every
    `window` lookups the tier takes the largest size for which

        hits that the additional bytes bring / lookups  >=  price * additional bytes / limit,

    by two standard deviations of chance, so that luck alone does not let it grow. If there is none, bytes that bring fewer hits than they
    cost, by as much, go: of the smaller sizes the one that spares most. Yields fall with size in most streams (in Zipf's law like 1 / size):
    there growth ends, at 80 to 90 % hits for exponents around 1. Looking far ahead lets a loop over all keys, where a little more memory
    brings nothing, have the size at which all fits; and since distances are those of a tier that is full, it keeps that size while it fills.
    """

    def __init__(self, limits: TierLimits, *, window: int = 1024):
        self.limits, self.window = limits, window
        self.target_bytes = self._least = min(limits.limit_bytes, limits.start_bytes or max(limits.limit_bytes // 64, 1))
        self._lookups, self._distances = 0, []

    def make_room_for(self, entry_bytes: int) -> None:
        """A tier holds at least four entries of a size that it is given, or its limit."""
        self.target_bytes = max(self.target_bytes, min(self.limits.limit_bytes, 4 * entry_bytes))

    def saw(self, distance_bytes: int | None) -> None:
        """One lookup.

        Args:
          distance_bytes: bytes that the tier has to hold to have the entry; None: a faster tier had it, or nothing is known of the entry.
        """
        self._lookups += 1
        if distance_bytes is not None:
            self._distances.append(distance_bytes)
        if self._lookups >= self.window:
            self.target_bytes = self._best()
            self._lookups, self._distances = 0, []

    def _best(self) -> int:
        now, limit = self.target_bytes, self.limits.limit_bytes
        larger = [size for size in (*(int(now * factor) for factor in FACTORS), limit) if now < size <= limit]
        smaller = [size for size in (*(int(now / factor) for factor in FACTORS), self._least) if self._least <= size < now]
        paying = [size for size in larger if self._hits(now, size) >= max(1.0, self._cost(now, size) + self._chance(now, size))]
        if paying:
            return max(paying)
        spared = {size: self._cost(size, now) - self._hits(size, now) for size in smaller}
        return max((size for size in smaller if spared[size] > self._chance(size, now)), key=spared.__getitem__, default=now)

    def _hits(self, low: int, high: int) -> int:
        """What a size of `high` brings beyond one of `low`."""
        return sum(low < distance <= high for distance in self._distances)

    def _cost(self, low: int, high: int) -> float:
        """Hits that it has to bring."""
        return self.limits.price * self._lookups * (high - low) / self.limits.limit_bytes

    def _chance(self, low: int, high: int) -> float:
        """Two standard deviations of as many hits."""
        return 2 * math.sqrt(self._cost(low, high))

    def press(self, used_bytes: int, free_bytes: int | None) -> None:
        """Shrinks to what leaves `reserve_bytes` free, given what the tier holds and what is free now (None: not known)."""
        if free_bytes is not None:
            self.target_bytes = max(0, min(self.target_bytes, used_bytes + free_bytes - self.limits.reserve_bytes))
