"""What was used last: values in the order of their last use, and the bytes that were used since each."""

import collections


class UseOrder[Value]:
    """Values of some bytes by key, the least recently used first. Every call takes a time that grows with the logarithm of their number."""

    def __init__(self):
        self._slots: collections.OrderedDict[str, tuple[int, int, Value]] = collections.OrderedDict()
        """Place in line (counted from 1, with gaps), bytes and value, in the order of their places."""
        self._sums = [0] * 64
        """Of bytes by place, a Fenwick tree."""
        self._last = self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def __getitem__(self, key: str) -> Value:
        return self._slots[key][2]

    def oldest(self) -> str:
        """The key that was not used for longest."""
        return next(iter(self._slots))

    def add(self, key: str, value: Value, num_bytes: int) -> None:
        """Puts a new key behind all others."""
        if self._last + 1 == len(self._sums):
            self._close_gaps()
        self._last += 1
        self._slots[key] = self._last, num_bytes, value
        self._change(self._last, num_bytes)

    def take(self, key: str) -> Value:
        """Takes a key out."""
        slot, num_bytes, value = self._slots.pop(key)
        self._change(slot, -num_bytes)
        return value

    def use(self, key: str) -> None:
        """Moves a key behind all others."""
        num_bytes = self._slots[key][1]
        self.add(key, self.take(key), num_bytes)

    def bytes_since(self, key: str) -> int:
        """Bytes of the key and of all that were used after it."""
        slot, before = self._slots[key][0] - 1, 0
        while slot:
            before += self._sums[slot]
            slot &= slot - 1
        return self.total_bytes - before

    def _change(self, slot: int, num_bytes: int) -> None:
        self.total_bytes += num_bytes
        while slot < len(self._sums):
            self._sums[slot] += num_bytes
            slot += slot & -slot

    def _close_gaps(self) -> None:
        old, self._slots = self._slots, collections.OrderedDict()
        self._sums, self._last, self.total_bytes = [0] * (64 + 2 * len(old)), 0, 0
        for key, (_, num_bytes, value) in old.items():
            self.add(key, value, num_bytes)
