"""Parameters with the logical axes they lie on."""

import jax.numpy as jnp
from flax import nnx

from moejax.config.model import ModelConfig

nnx.use_eager_sharding(False)  # axes are logical names; shardings are made from them in one place


class Maker:
    """Makes the weights of one module."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.rngs = rngs
        self.dtype = jnp.dtype(config.precision.params)

    def linear(self, axes, *shape, fan_in: int) -> nnx.Param:
        """Normal with variance 1 / fan_in."""
        return self.normal(axes, *shape, std=fan_in**-0.5)

    def normal(self, axes, *shape, std: float) -> nnx.Param:
        """Normal with standard deviation `std`."""
        return self._param(nnx.initializers.normal(std)(self.rngs.params(), shape, self.dtype), axes)

    def constant(self, value, axes, *shape) -> nnx.Param:
        """`value` everywhere."""
        return self._param(jnp.full(shape, value, self.dtype), axes)

    def uniform(self, function, low, high, axes, *shape) -> nnx.Param:
        """`function` of a uniform draw between `low` and `high`."""
        draw = nnx.initializers.uniform(1.0)(self.rngs.params(), shape, jnp.float32)
        return self._param(function(low + draw * (high - low)).astype(self.dtype), axes)

    def _param(self, value, axes) -> nnx.Param:
        if len(axes) != value.ndim:
            raise ValueError(f"axes {axes} do not name the dims of shape {value.shape}.")
        return nnx.Param(value, out_sharding=axes)
