"""Which device holds which expert, and which experts have copies elsewhere: planned on the host from counted loads, in numpy.

A device has e = E/S home slots, numbered p = device * e + slot over all devices, and C copy slots. Loads are rows per expert in any
unit: only ratios matter. In this file C in a name counts the copy slots of a device and N the nodes.
"""

import dataclasses

import numpy as np

SLIGHT = 1e-5
"""Part of the mean device load that is not worth a copy."""
LEVELS = (1.0, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2)
"""Loads over the mean that `copies` aims at, one after the other, until the copy slots suffice."""
SWEEPS = 4
"""Passes over the experts when nodes are formed: with 896 experts in 8 planted groups, eight gained nothing more."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Plan:
    """Where experts live and how the rows of copied ones are divided; checked when made."""

    expert_at_E: np.ndarray
    """int32, the logical expert in each physical slot: a permutation."""
    copy_SC: np.ndarray
    """int32, the physical slot whose expert each copy slot repeats, -1 for an empty one."""
    share_SC: np.ndarray
    """float32, part of that expert's rows that go to this copy, in (0, 1]; 0 for an empty slot. The home has the rest."""

    def __post_init__(self):
        num_experts, num_devices = self.expert_at_E.size, len(self.copy_SC)
        per_device = _per_device(num_experts, num_devices)
        if not np.array_equal(np.sort(self.expert_at_E), np.arange(num_experts)):
            raise ValueError(f"expert_at_E must hold each of 0 .. {num_experts - 1} once, got {self.expert_at_E}.")
        if self.copy_SC.ndim != 2 or self.share_SC.shape != self.copy_SC.shape:
            raise ValueError(f"copy_SC and share_SC must have one shape [S, C], got {self.copy_SC.shape} and {self.share_SC.shape}.")
        if np.any((self.copy_SC < -1) | (self.copy_SC >= num_experts)):
            raise ValueError(f"copy_SC must lie between -1 and {num_experts - 1}, got {self.copy_SC.min()} to {self.copy_SC.max()}.")
        used_SC = self.copy_SC >= 0
        if not np.all(np.where(used_SC, (self.share_SC > 0) & (self.share_SC <= 1), self.share_SC == 0)):
            raise ValueError("share_SC must lie in (0, 1] where copy_SC names a slot and be 0 elsewhere.")
        if np.any(used_SC & (self.copy_SC // per_device == np.arange(num_devices)[:, None])):
            raise ValueError("copy_SC gives a device a copy of an expert that lives there.")
        sorted_SC = np.sort(self.copy_SC, 1)
        if np.any((sorted_SC[:, 1:] == sorted_SC[:, :-1]) & (sorted_SC[:, 1:] >= 0)):
            raise ValueError("copy_SC gives a device two copies of one expert.")
        moved_E = np.bincount(self.copy_SC[used_SC], self.share_SC[used_SC], minlength=num_experts)
        if moved_E.max() > 1 + 1e-6:  # a few float32 roundings
            raise ValueError(f"the shares of the copies of slot {moved_E.argmax()} sum to {moved_E.max()}, more than 1.")


def identity(num_experts: int, num_devices: int, copies_per_device: int) -> Plan:
    """Experts in their own order, no copies in use."""
    shape = num_devices, copies_per_device
    return Plan(
        expert_at_E=np.arange(num_experts, dtype=np.int32), copy_SC=np.full(shape, -1, np.int32), share_SC=np.zeros(shape, np.float32)
    )


def place(load_E, *, num_devices: int, num_nodes: int = 1, together_EE=None, node_slack: float = 0.1) -> np.ndarray:
    """Puts E/S experts on each device so that device loads are even, and experts often chosen together into one node.

    Args:
      load_E: rows of each logical expert.
      num_nodes: nodes of S/N devices side by side; matters only together with `together_EE`.
      together_EE: how many tokens chose both experts, in one triangle or both; the diagonal is not read. A token that is
        sent once to each node where it has an expert crosses less often the more of these pairs share a node.
      node_slack: a node's load may pass the mean by this part in favour of such pairs, and by more only where packing without regard
        to them could do no better.

    Returns:
      int32 [E], the logical expert in each physical slot, ascending within a device.

    Raises:
      ValueError: devices do not divide the experts, nodes not the devices, or an array has a wrong shape or a negative or not
        finite entry.

    Source: DeepSeek's EPLB (github.com/deepseek-ai/EPLB): its balanced packing, and its order of nodes first, then devices inside.
    """
    load_E = _loads(load_E)
    _per_device(load_E.size, num_devices)
    if num_nodes < 1 or num_devices % num_nodes:
        raise ValueError(f"num_nodes={num_nodes} must divide num_devices={num_devices}.")
    if together_EE is None or num_nodes == 1:
        return _in_order(_pack(load_E, num_devices))
    node_E = _nodes(load_E, together_EE, num_nodes=num_nodes, slack=node_slack)
    device_E, inside = np.empty(load_E.size, int), num_devices // num_nodes
    for node in range(num_nodes):
        members = np.flatnonzero(node_E == node)
        device_E[members] = node * inside + _pack(load_E[members], inside)
    return _in_order(device_E)


def _pack(load_E: np.ndarray, num_bins: int) -> np.ndarray:
    """Bin of each expert, E/bins in each: the heaviest first, each to the least loaded bin that has room."""
    bin_E, load_S, room_S = np.empty(load_E.size, int), np.zeros(num_bins), np.full(num_bins, load_E.size // num_bins)
    for expert in np.argsort(-load_E, kind="stable"):
        bin_E[expert] = chosen = load_S.argmin()
        load_S[chosen] += load_E[expert]
        room_S[chosen] -= 1
        if room_S[chosen] == 0:
            load_S[chosen] = np.inf
    return bin_E


def _in_order(device_E: np.ndarray) -> np.ndarray:
    return np.argsort(device_E, kind="stable").astype(np.int32)


def _nodes(load_E: np.ndarray, together_EE, *, num_nodes: int, slack: float) -> np.ndarray:
    """Node of each expert: even packing, then exchanges of two experts, each the best for its first expert, while they help."""
    together_EE = np.asarray(together_EE, float)
    if together_EE.shape != (load_E.size,) * 2 or not np.all(np.isfinite(together_EE) & (together_EE >= 0)):
        raise ValueError(f"together_EE must hold counts of shape {(load_E.size,) * 2}, got shape {together_EE.shape} or a bad entry.")
    together_EE = (together_EE + together_EE.T) / 2
    np.fill_diagonal(together_EE, 0)
    node_E = _pack(load_E, num_nodes)
    load_N = np.bincount(node_E, load_E, num_nodes)
    limit = max((1 + slack) * load_N.mean(), load_N.max())
    to_NE = np.stack([together_EE[node_E == node].sum(0) for node in range(num_nodes)])  # pairs of an expert with those of a node
    least = 1e-9 * together_EE.sum() / load_E.size  # sums are rounded: smaller gains could alternate for ever
    for _ in range(SWEEPS):
        changed = False
        for one in range(load_E.size):
            here = node_E[one]
            own_E = np.take_along_axis(to_NE, node_E[None], 0)[0]
            gain_E = to_NE[node_E, one] - to_NE[here, one] + to_NE[here] - own_E - 2 * together_EE[one]
            more_E = load_E - load_E[one]  # what `here` would gain and the other node lose
            allowed_E = (node_E != here) & (load_N[here] + more_E <= limit) & (load_N[node_E] - more_E <= limit)
            gain_E[~allowed_E] = -np.inf
            other = gain_E.argmax()
            if gain_E[other] <= least:
                continue
            there, changed = node_E[other], True
            load_N[here] += more_E[other]
            load_N[there] -= more_E[other]
            step_E = together_EE[other] - together_EE[one]
            to_NE[here] += step_E
            to_NE[there] -= step_E
            node_E[one], node_E[other] = there, here
        if not changed:
            break
    return node_E


def copies(load_E, *, num_devices: int, copies_per_device: int, node_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Gives copy slots to experts of overloaded devices so that all devices carry the same, as far as the slots reach.

    Step by step, the least loaded device with a free slot is filled to the mean from one expert of an overloaded device: one that
    stays above the mean if there is such a one, else one that falls below it and is filled in its turn. Where no expert is large
    enough, the largest goes as a whole. If the slots run out too early, a level a little above the mean is tried.

    Args:
      load_E: rows of the expert in each physical slot.
      node_size: devices of a node, to take from a device of the same node where one serves; None for no preference.

    Returns:
      `copy_SC` and `share_SC` as in `Plan`.

    Raises:
      ValueError: devices do not divide the experts, `node_size` not the devices, or a load is negative or not finite.

    Source: the pairing of one that has too little with one that has too much, by which Vose 1991, "A linear algorithm for generating
    random numbers with a given distribution", fills alias tables; one alias for each bin suffices when an expert is a bin.
    """
    load_E = _loads(load_E)
    load_Se = load_E.reshape(num_devices, _per_device(load_E.size, num_devices))
    node_size = num_devices if node_size is None else node_size
    if node_size < 1 or num_devices % node_size:
        raise ValueError(f"node_size={node_size} must divide num_devices={num_devices}.")
    best, best_peak = None, np.inf
    for level in LEVELS:
        tried = _fill(load_Se, level * load_E.sum() / num_devices, copies_per_device, node_size)
        peak = max_over_mean(device_load_S(load_E, *tried, num_devices))
        if peak < best_peak:
            best, best_peak = tried, peak
        if best_peak <= level + 10 * SLIGHT:
            break
    assert best is not None
    return best


def _fill(load_Se: np.ndarray, limit: float, copies_per_device: int, node_size: int) -> tuple[np.ndarray, np.ndarray]:
    num_devices, per_device = load_Se.shape
    left_Se, load_S, used_S = load_Se.copy(), load_Se.sum(1), np.zeros(num_devices, int)
    copy_SC = np.full((num_devices, copies_per_device), -1, np.int32)
    share_SC = np.zeros(copy_SC.shape, np.float32)
    node_S, slight = np.arange(num_devices) // node_size, SLIGHT * load_S.mean()
    while True:
        # Only a device that was never filled passes the limit, so a donor gives its own experts; and a slot either fills its device
        # or takes all that is left of an expert, so no device gets two copies of one.
        room_S = np.where(used_S < copies_per_device, limit - load_S, -np.inf)
        taker, donor_S = room_S.argmax(), load_S > limit + slight
        room = room_S[taker]
        if room <= slight or not donor_S.any():
            return copy_SC, share_SC
        largest_S, near_S = left_Se.max(1), node_S == node_S[taker]
        enough_S = donor_S & (largest_S >= room)
        above_S = enough_S & (load_S - limit >= room)
        for among_S in (above_S & near_S, above_S, enough_S & near_S, enough_S):
            if among_S.any():
                donor = np.where(among_S, load_S, -np.inf).argmax()
                break
        else:
            donor = np.where(donor_S, largest_S, -np.inf).argmax()
        slot = left_Se[donor].argmax()
        amount = min(left_Se[donor, slot], room)
        at = taker, used_S[taker]
        copy_SC[at], share_SC[at] = donor * per_device + slot, _rounded_down(amount / load_Se[donor, slot])
        used_S[taker] += 1
        left_Se[donor, slot] -= amount
        load_S[donor] -= amount
        load_S[taker] += amount


def _rounded_down(share: float) -> np.float32:
    """To float32, so that the shares of one expert cannot sum to more than 1."""
    near = np.float32(share)
    return near if near <= share else np.nextafter(near, np.float32(0))


def device_load_S(load_E, copy_SC, share_SC, num_devices: int) -> np.ndarray:
    """Load of each device, float64 [S], when `share_SC` of the rows of slots `copy_SC` go to the copies; `load_E` in physical order."""
    load_E = _loads(load_E)
    per_device = _per_device(load_E.size, num_devices)
    moved_SC = np.where(copy_SC >= 0, load_E[copy_SC] * share_SC, 0.0)
    given_S = np.bincount(np.maximum(copy_SC, 0).ravel() // per_device, moved_SC.ravel(), num_devices)
    return load_E.reshape(num_devices, per_device).sum(1) + moved_SC.sum(1) - given_S


def max_over_mean(load_S) -> float:
    """Largest device load over the mean: 1 is even, and what no load at all counts as."""
    mean = np.mean(load_S)
    return float(np.max(load_S) / mean) if mean > 0 else 1.0


def plan(
    load_E,
    *,
    num_devices: int,
    copies_per_device: int,
    num_nodes: int = 1,
    together_EE=None,
    keep: Plan | None = None,
    move: bool = True,
    gain: float = 0.05,
) -> Plan:
    """Homes and copies for the loads seen lately; changes what is in force only where that pays.

    New copies cost nothing beyond the fetch that every step makes, new homes move weights and optimizer state. So homes stay unless
    moving them is predicted to lower the largest device load by more than `gain` of the mean below what new copies alone reach, or to bring
    such a share of the pairs in `together_EE` into one node at no such price; and everything stays unless a change gains as much.

    Args:
      load_E: rows of each logical expert.
      together_EE: as for `place`.
      keep: the plan in force, for as many experts, devices and copies; None to plan afresh.
      move: False: homes stay whatever it would bring.
      gain: part of the mean device load, or of the pairs.

    Returns:
      `keep` itself if it stays.

    Raises:
      ValueError: sizes do not divide, `keep` is for other sizes, or an entry is negative or not finite.
    """
    load_E = _loads(load_E)
    if keep is not None and (keep.expert_at_E.size, *keep.copy_SC.shape) != (load_E.size, num_devices, copies_per_device):
        raise ValueError(
            f"keep is for {keep.expert_at_E.size} experts, {len(keep.copy_SC)} devices and {keep.copy_SC.shape[1]} copies; asked for are "
            f"{load_E.size}, {num_devices} and {copies_per_device}."
        )

    def with_copies(expert_at_E):
        copy_SC, share_SC = copies(
            load_E[expert_at_E], num_devices=num_devices, copies_per_device=copies_per_device, node_size=num_devices // num_nodes
        )
        return Plan(expert_at_E=expert_at_E, copy_SC=copy_SC, share_SC=share_SC)

    peak = lambda plan: peak_load(plan, load_E)
    afresh = lambda: with_copies(place(load_E, num_devices=num_devices, num_nodes=num_nodes, together_EE=together_EE))
    if keep is None:
        return afresh()
    stayed = with_copies(keep.expert_at_E)
    if move:
        moved, apart = afresh(), lambda plan: 0.0 if together_EE is None else pairs_apart(plan, together_EE, num_nodes)
        falls = min(peak(keep), peak(stayed)) - peak(moved)
        if falls > gain or (apart(keep) - apart(moved) > gain and falls >= -gain):
            return moved
    return stayed if peak(keep) - peak(stayed) > gain else keep


def peak_load(plan: Plan, load_E) -> float:
    """Largest load of a device over the mean, for the rows of each logical expert."""
    load_S = device_load_S(_loads(load_E)[plan.expert_at_E], plan.copy_SC, plan.share_SC, len(plan.copy_SC))
    return max_over_mean(load_S)


def pairs_apart(plan: Plan, together_EE, num_nodes: int) -> float:
    """Share of the pairs of experts chosen by one token that no node holds together, homes alone."""
    node_E = np.empty(plan.expert_at_E.size, int)
    node_E[plan.expert_at_E] = np.arange(node_E.size) // (node_E.size // num_nodes)
    pairs_EE = np.asarray(together_EE) * ~np.eye(node_E.size, dtype=bool)
    return float(pairs_EE[node_E[:, None] != node_E].sum() / max(pairs_EE.sum(), 1))


def _loads(load_E) -> np.ndarray:
    load_E = np.asarray(load_E, float)
    if load_E.ndim != 1 or not np.all(np.isfinite(load_E) & (load_E >= 0)):
        raise ValueError(f"load_E must be one finite number >= 0 for each expert, got shape {load_E.shape}: {load_E}.")
    return load_E


def _per_device(num_experts: int, num_devices: int) -> int:
    if num_devices < 1 or num_experts < 1 or num_experts % num_devices:
        raise ValueError(f"num_devices={num_devices} must divide the {num_experts} experts.")
    return num_experts // num_devices
