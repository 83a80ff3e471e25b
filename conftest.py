"""Eight pretended CPU devices and one compilation cache for all tests."""

import pathlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # the same arithmetic, compiled in two thirds of the time
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture
def no_compilation_cache():
    """Everything is compiled anew."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether to use it was decided once
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """A compiled program keeps about 60 memory mappings; Linux allows a process 65,530, and XLA crashes at the next."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > 20_000:
        jax.clear_caches()
