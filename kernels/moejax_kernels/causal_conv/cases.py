"""Inputs of causal_conv for tests, benchmarks and tuning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels.segments import Segments


@dataclasses.dataclass(frozen=True)
class ConvCase:
    """One shape.

    `documents`: lengths from left to right, the same in every row, a negative one for padding; None: no segments. `parents`: of each, the
    number of the one that it continues, -1 for none; (): no trees.
    """

    name: str
    rows: int
    documents: tuple[int, ...] | None
    width: int
    length: int = 0
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

    def arrays(self, dtype, *, seed: int):
        """x, weight and history."""
        random = np.random.default_rng(seed)
        shapes = (self.rows, self.tokens, self.width), (self.width, 4), (self.rows, 3, self.width)
        return tuple(jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)

    def shapes(self, dtype):
        """Shapes of x, weight and history."""
        of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
        return of(self.rows, self.tokens, self.width), of(self.width, 4), of(self.rows, 3, self.width)


SMALL = (
    ConvCase("one_token", 1, (1,), 3),
    ConvCase("no_segments", 2, None, 5, length=9),
    ConvCase("shorter_than_the_taps", 2, (2,), 4),
    ConvCase("short_documents", 2, (1, 2, 3, 1, 5, 1), 4),
    ConvCase("padding", 2, (-2, 5, -1, 2, -4), 4),
    ConvCase("history_and_padding", 1, (2, -3), 4),
    ConvCase("nothing_but_padding", 1, (-5,), 4),
    ConvCase("tree", 2, (5, 2, 3, -2, 4, 6), 4, parents=(-1, 0, 0, -1, 2, -1)),
    ConvCase("chain_shorter_than_the_taps", 1, (1, 1, 1, 2, -1), 4, parents=(-1, 0, 1, 2, -1)),
    ConvCase("tree_after_padding", 1, (-1, 2, 1, 4), 4, parents=(-1, -1, 1, 1)),
)
"""Awkward ones, for tests."""

MEASURED = (
    ConvCase("tiny_hybrid", 16, (200, 312), 384),
    ConvCase("d1024", 1, None, 1024, length=4096),
)
"""For benchmarks and tuning."""

REAL = (
    ConvCase("kimi_k3", 1, (1500, 2596), 96 * 128),
    ConvCase("kimi_linear", 1, (1500, 2596), 32 * 128),
    ConvCase("qwen3_next", 1, (1500, 2596), 2 * 16 * 128 + 32 * 128),
)
"""Widths of the models' q, k and v (Qwen3-Next: all three side by side)."""
