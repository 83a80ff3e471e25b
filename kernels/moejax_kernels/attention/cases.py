"""Inputs of attention for tests, benchmarks and tuning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels.segments import Segments


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One shape.

    `documents`: lengths from left to right, the same in every row, a negative one for padding; `parents`: of each, the number of the one
    it continues, or -1.
    """

    name: str
    rows: int
    documents: tuple[int, ...]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    has_sinks: bool = False
    parents: tuple[int, ...] = ()

    def __str__(self):
        return self.name

    @property
    def length(self) -> int:
        return sum(map(abs, self.documents))

    def segments(self) -> Segments:
        ids_L = np.concatenate([np.full(abs(length), number if length > 0 else -1) for number, length in enumerate(self.documents)])
        tree = {child: parent for child, parent in enumerate(self.parents) if parent >= 0}
        return Segments.build(np.broadcast_to(ids_L, (self.rows, self.length)), [tree] * self.rows if tree else None)

    def arrays(self, dtype, *, seed: int):
        """q, k, v, sinks or None, and a cotangent of the output."""
        random = np.random.default_rng(seed)

        def draw(*shape):
            return jnp.asarray(random.standard_normal(shape), dtype)

        at = (self.rows, self.length)
        return (
            draw(*at, self.heads, self.key_dim),
            draw(*at, self.key_heads, self.key_dim),
            draw(*at, self.key_heads, self.value_dim),
            draw(self.heads) if self.has_sinks else None,
            draw(*at, self.heads, self.value_dim),
        )

    def shapes(self, dtype):
        """Shapes of q, k, v, sinks or None, and a cotangent of the output."""
        of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
        at = (self.rows, self.length)
        return (
            of(*at, self.heads, self.key_dim),
            of(*at, self.key_heads, self.key_dim),
            of(*at, self.key_heads, self.value_dim),
            of(self.heads) if self.has_sinks else None,
            of(*at, self.heads, self.value_dim),
        )


SMALL = (
    AttentionCase("one_token", 1, (1,), 1, 1, 4, 4),
    AttentionCase("grouped_heads_and_padding", 2, (1, 17, -3, 16, -2), 4, 2, 8, 12),
    AttentionCase("window_and_sinks", 2, (5, 30, -1, 9), 4, 1, 8, 6, window=7, has_sinks=True),
    AttentionCase("window_of_one", 1, (20, 3), 2, 2, 4, 4, window=1),
    AttentionCase("window_beyond_length", 1, (20, 3), 2, 2, 4, 4, window=99),
    AttentionCase("sinks", 1, (-2, 21), 2, 1, 4, 4, has_sinks=True),
)
MEASURED = (
    AttentionCase("dense_4096", 1, (4096,), 8, 1, 64, 64),
    AttentionCase("packed_512", 8, (100, 300, 112), 4, 1, 40, 32),
    AttentionCase("window_4096", 1, (4096,), 8, 8, 64, 64, window=256),
)

REAL = (
    AttentionCase("qwen3_next", 1, (1500, 2596), 16, 2, 256, 256),
    AttentionCase("mixtral", 1, (1500, 2596), 32, 8, 128, 128),
    AttentionCase("deepseek_v32", 1, (1500, 2596), 128, 128, 192, 128),
    AttentionCase("gpt_oss", 1, (1500, 2596), 64, 8, 64, 64, window=128, has_sinks=True),
)
"""Of models; DeepSeek-V3.2 with keys and values of each head written out, as in its dense warm-up."""
TILED = (
    AttentionCase("one_token", 1, (1,), 1, 1, 64, 64),
    AttentionCase("documents_off_the_tiles", 1, (1, 37, -3, 40, -2), 2, 1, 64, 96),
    AttentionCase("split_widths_and_a_document_over_tiles", 1, (70, 3), 2, 2, 192, 128),
    AttentionCase("window_shorter_than_a_tile_and_sinks", 1, (5, 66, -1, 9), 2, 1, 64, 64, window=7, has_sinks=True),
    AttentionCase("window_longer_than_tiles", 1, (120,), 1, 1, 64, 64, window=70),
    AttentionCase("window_of_one", 1, (40, 3), 1, 1, 64, 64, window=1),
    AttentionCase("sinks_after_padding", 2, (-33, 31), 1, 1, 64, 64, has_sinks=True),
    AttentionCase("wide", 1, (20, 15), 2, 1, 256, 256),
    AttentionCase("tree_over_tiles", 2, (70, 20, -3, 37, 5, 40), 2, 1, 64, 96, parents=(-1, 0, -1, 0, -1, 3)),
    AttentionCase("trees_window_and_sinks", 1, (5, 66, 9, -1, 30, 33), 2, 1, 64, 64, 40, True, (-1, 0, 1, -1, 0, 4)),
)
"""Awkward ones of the GPU kernels' widths; a tile of theirs has 32 or 64 tokens in float32."""
