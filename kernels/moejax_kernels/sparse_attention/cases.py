"""Inputs of sparse attention, of its index and of the index's loss, for tests, benchmarks and tuning."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from moejax_kernels.segments import Segments


@dataclasses.dataclass(frozen=True)
class SparseCase:
    """One shape. `documents`: lengths from left to right, the same in every row, a negative one for padding."""

    name: str
    rows: int
    documents: tuple[int, ...]
    topk: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    index_heads: int
    index_dim: int

    def __str__(self):
        return self.name

    @property
    def length(self) -> int:
        return sum(map(abs, self.documents))

    def segments(self) -> Segments:
        ids_L = np.concatenate([np.full(abs(length), number if length > 0 else -1) for number, length in enumerate(self.documents)])
        return Segments.build(np.broadcast_to(ids_L, (self.rows, self.length)))

    def arrays(self, dtype, *, seed: int) -> dict:
        """q, k, v, index_q, index_k, index_w, and a cotangent of the output."""
        random = np.random.default_rng(seed)
        at = (self.rows, self.length)
        shapes = {
            "q": (self.heads, self.key_dim),
            "k": (self.key_heads, self.key_dim),
            "v": (self.key_heads, self.value_dim),
            "index_q": (self.index_heads, self.index_dim),
            "index_k": (self.index_dim,),
            "index_w": (self.index_heads,),
            "cotangent": (self.heads, self.value_dim),
        }
        return {name: jnp.asarray(random.standard_normal(at + shape), dtype) for name, shape in shapes.items()}


SMALL = (
    SparseCase("few_of_many", 2, (3, 30, -2, 25), 4, 4, 2, 8, 6, 2, 4),
    SparseCase("most_of_them", 2, (3, 30, -2, 25), 16, 4, 1, 8, 6, 2, 4),
    SparseCase("one_key", 1, (40,), 1, 2, 1, 4, 4, 1, 4),
)
MEASURED = (
    SparseCase("long", 1, (8192,), 512, 8, 1, 64, 64, 4, 32),
    SparseCase("packed", 8, (100, 300, 112), 64, 4, 1, 40, 32, 4, 16),
)
