"""Recompute caches: forward takes a value that was computed before, backward rebuilds it from what it was computed from.

A value is of use as long as the inputs are what they were. Those that outlive a step lie in a store under a hash of their inputs, with the
version of the weights that made them; each carries both, and one that carries others is computed anew.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np


def cached(fn: Callable) -> Callable:
    """`cached(fn)(value, inputs)`: the value of `fn(*inputs)`, given; its gradients go to the inputs.

    Forward computes nothing. Backward, where someone asks for it, runs `fn` from the inputs and then its transpose, so nothing of `fn` is
    kept between the two. No gradient goes to the given value.
    """

    @jax.custom_vjp
    def take(value, inputs):
        return value

    def save(value, inputs):
        return value, inputs

    def rebuild(inputs, cotangents):
        return None, jax.vjp(fn, *inputs)[1](cotangents)

    take.defvjp(save, rebuild)
    return take


class Store(Protocol):
    """Trees of arrays by key; None where there is none of that version."""

    def get(self, key: str, version: str) -> Any:
        """The value put under this key and version, or None."""
        ...

    def put(self, key: str, version: str, value: Any) -> None:
        """Keeps a value, in place of one with the same key."""
        ...


class Recall:
    """What a function of frozen weights made of earlier inputs."""

    def __init__(self, store: Store, version: str):
        """Nothing is known yet.

        Args:
          store: where values lie; others may use it too.
          version: of the weights, e.g. their `fingerprint`.
        """
        self._store, self.version = store, version
        self.hits, self.misses, self.refused = 0, 0, 0
        """Values found; to be computed; and of the latter those for which the store gave one that carries another key or version, or none."""

    def find(self, key: str) -> Any:
        """The value that was kept under this key, or None if it has to be computed.

        Args:
          key: hash of all that the value depends on besides the weights.
        """
        found = self._store.get(key, self.version)
        if found is not None:
            ours = isinstance(found, dict) and {"label", "value"} <= found.keys()
            if ours and np.array_equal(np.asarray(found["label"]), _label(key, self.version)):
                self.hits += 1
                return found["value"]
            self.refused += 1
        self.misses += 1
        return None

    def keep(self, key: str, value: Any) -> None:
        """Puts what was computed where `find` looks for it."""
        self._store.put(key, self.version, {"label": _label(key, self.version), "value": value})


def _label(key: str, version: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(f"{key} of {version}".encode()).digest(), np.uint8)


def fingerprint(weights: Any) -> str:
    """Tells versions of weights apart: 16 hexadecimal digits of their paths and bits, the same wherever they lie."""
    sums = jax.device_get(jax.jit(lambda weights: jax.tree.map(_bit_sums, weights))(weights))
    told = hashlib.sha256()
    for (path, leaf), both in zip(jax.tree_util.tree_leaves_with_path(weights), jax.tree.leaves(sums), strict=True):
        told.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {both.tolist()}\n".encode())
    return told.hexdigest()[:16]


def _bit_sums(leaf):
    """Two sums over the bits, each mixed with the number of its place, modulo 2**32: integers add up to the same in any order."""
    bits = jax.lax.bitcast_convert_type(leaf, {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dim, size in enumerate(bits.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    sums = []
    for factor in (jnp.uint32(0x9E3779B1), jnp.uint32(0x85EBCA77)):
        mixed = (place + 1) * factor
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D) ^ bits
        mixed = (mixed ^ (mixed >> 13)) * factor
        sums.append(jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32))
    return jnp.stack(sums)
