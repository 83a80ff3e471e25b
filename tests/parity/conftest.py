"""How parity tests compile."""

import jax
import pytest


@pytest.fixture
def optimised():
    """XLA as training has it, where float32 roundings matter: other tests compile without most optimisations."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
