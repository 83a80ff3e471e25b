"""Inputs of sparse attention, of its index and of the index's loss, for tests, benchmarks and tuning."""

import dataclasses

import jax
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealSparseCase:
    """A model's shape, for programs that are compiled and not run here."""

    name: str
    length: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    latent: bool
    """Values are the first channels of the keys."""
    topk: int = 2048
    index_heads: int = 64
    index_dim: int = 128

    def __str__(self):
        return self.name

    def shapes(self, dtype) -> dict:
        """Shapes of q, k, v (None: latent), ids, index_q, index_k, index_w, and of the output's and the loss's cotangents."""
        shape = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct((1, self.length, *sizes), dtype)
        return {
            "q": shape(self.heads, self.key_dim),
            "k": shape(self.key_heads, self.key_dim),
            "v": None if self.latent else shape(self.key_heads, self.value_dim),
            "ids": shape(self.topk, dtype=jnp.int32),
            "index_q": shape(self.index_heads, self.index_dim),
            "index_k": shape(self.index_dim),
            "index_w": shape(self.index_heads, dtype=jnp.float32),
            "do": shape(self.heads, self.value_dim),
            "dkl": shape(dtype=jnp.float32),
        }


REAL = (
    RealSparseCase(name="deepseek_v32", length=4096, heads=128, key_heads=1, key_dim=576, value_dim=512, latent=True),
    RealSparseCase(name="gqa_128", length=8192, heads=64, key_heads=8, key_dim=128, value_dim=128, latent=False, index_heads=32),
    RealSparseCase(name="mha_192", length=4096, heads=96, key_heads=96, key_dim=192, value_dim=128, latent=False),
)
"""DeepSeek-V3.2; grouped heads; the unabsorbed heads of Kimi K3, 192 wide, were they sparse."""
