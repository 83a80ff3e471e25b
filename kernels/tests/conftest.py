"""Eight pretended CPU devices and one compilation cache for all tests."""

import pathlib

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # the same arithmetic, compiled in two thirds of the time
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parent.parent.parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
