"""Inputs of KDA and GDN for tests, benchmarks and tuning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels.segments import Segments


@dataclasses.dataclass(frozen=True)
class DeltaCase:
    """One shape.

    `documents`: lengths from left to right, the same in every row, a negative one for padding; None: no segments. `parents`: of each, the
    number of the one that it continues, -1 for none; (): no trees.
    """

    name: str
    rows: int
    documents: tuple[int, ...] | None
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    length: int = 0
    strong: bool = False
    """Log-decay down to -5 a token instead of -0.2."""
    parents: tuple[int, ...] = ()

    def __str__(self):
        return self.name

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return self.length or sum(map(abs, self.documents or ()))

    def segments(self) -> Segments | None:
        """Built on the host."""
        if self.documents is None:
            return None
        ids_L = np.concatenate([np.full(abs(length), number if length > 0 else -1) for number, length in enumerate(self.documents)])
        tree = {child: parent for child, parent in enumerate(self.parents) if parent >= 0}
        return Segments.build(np.broadcast_to(ids_L, (self.rows, self.tokens)), [tree] * self.rows if tree else None)

    def arrays(self, dtype, *, seed: int, decay_per_channel: bool):
        """q, k, v, g, beta and an initial state; q and k of length 1."""
        random = np.random.default_rng(seed)
        B, L, H = self.rows, self.tokens, self.heads
        q_BLGC, k_BLGC = random.standard_normal((2, B, L, self.key_heads, self.key_dim))
        v_BLHM, state_BHCM = (random.standard_normal(shape) for shape in ((B, L, H, self.value_dim), (B, H, self.key_dim, self.value_dim)))
        g = -(5.0 if self.strong else 0.2) * random.uniform(size=(B, L, H, self.key_dim) if decay_per_channel else (B, L, H))
        q_BLGC, k_BLGC = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q_BLGC, k_BLGC))
        return tuple(jnp.asarray(x, dtype) for x in (q_BLGC, k_BLGC, v_BLHM, g, random.uniform(size=(B, L, H)), state_BHCM))

    def shapes(self, dtype, *, decay_per_channel: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of q, k, v, g and beta as a model hands them over: g in float32."""
        B, L, H = self.rows, self.tokens, self.heads
        like = jax.ShapeDtypeStruct
        keys = like((B, L, self.key_heads, self.key_dim), dtype)
        g = like((B, L, H, self.key_dim) if decay_per_channel else (B, L, H), jnp.float32)
        return keys, keys, like((B, L, H, self.value_dim), dtype), g, like((B, L, H), dtype)


SMALL = (
    DeltaCase("one_token", 1, (1,), 1, 1, 4, 4),
    DeltaCase("fifteen_tokens", 1, (15,), 1, 2, 8, 8),
    DeltaCase("no_segments_one_token_more", 2, None, 2, 2, 8, 12, length=17),
    DeltaCase("one_chunk_strong", 1, (16,), 1, 2, 8, 8, strong=True),
    DeltaCase("borders_off_the_chunks", 2, (1, 20, 3, 3, 38), 1, 2, 8, 16),
    DeltaCase("strong_with_padding", 1, (-3, 20, -2, 25, -17), 2, 2, 16, 8, strong=True),
)
"""Awkward ones, for tests."""

MEASURED = (
    DeltaCase("tiny_hybrid", 16, (200, 312), 4, 4, 32, 32),
    DeltaCase("l2048", 1, None, 4, 4, 64, 64, length=2048),
)
"""For benchmarks and tuning; the first is what the small hybrid model runs."""
