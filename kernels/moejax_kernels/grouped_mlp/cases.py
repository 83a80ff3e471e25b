"""Inputs of the grouped MLP: the rows, widths and sizes of the grouped matmul's cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels.grouped_matmul import cases


class MLPCase(cases.GroupedCase):
    """One shape: each group has a gate, an up and a down matrix."""

    def _of(self, array, dtype, w_dtype):
        """x, the three weights, and a cotangent of the output, made by `array(shape, dtype)`."""
        rows, wide = (self.rows, self.width), (len(self.sizes), self.width, self.hidden)
        tall = (len(self.sizes), self.hidden, self.width)
        weights = (array(shape, w_dtype or dtype) for shape in (wide, wide, tall))
        return array(rows, dtype), *weights, array(rows, dtype)

    def arrays(self, dtype, *, seed: int, w_dtype=None):
        """x, gate, up, down, group sizes, and a cotangent of the output."""
        random = np.random.default_rng(seed)
        *arrays, dy_RD = self._of(lambda shape, dtype: jnp.asarray(random.standard_normal(shape), dtype), dtype, w_dtype)
        return *arrays, jnp.asarray(self.sizes, jnp.int32), dy_RD

    def shapes(self, dtype, *, w_dtype=None):
        """The same without their values."""
        *arrays, dy_RD = self._of(jax.ShapeDtypeStruct, dtype, w_dtype)
        return *arrays, jax.ShapeDtypeStruct((len(self.sizes),), jnp.int32), dy_RD


SMALL, MEASURED, REAL = (tuple(MLPCase(**dataclasses.asdict(case)) for case in some) for some in (cases.SMALL, cases.MEASURED, cases.REAL))
