"""Programs compiled for absent GPUs stay out of the compilation cache: JAX writes them there, but cannot read them back."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True)
def _no_compilation_cache():
    compilation_cache.reset_cache()  # whether there is one is asked once, and remembered
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
