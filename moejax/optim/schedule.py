"""The learning rate over a run, relative to its peak."""

import jax.numpy as jnp
import optax

from moejax.config.training import OptimConfig


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """Factor on the peak rate as a function of the number of updates done before.

    With t = that number + 1, the factor is t / warmup_steps up to t = warmup_steps, where it is 1 (so that the first update
    already moves every weight); then `constant` stays, `cosine` falls to final_fraction at t = steps, and `wsd` stays 1 up to
    t = steps * (1 - decay_fraction), then falls linearly to final_fraction at t = steps. Afterwards it stays. A run of at most
    warmup_steps is warm-up all through.

    Args:
      config: shape of the schedule.
      steps: updates of the whole run.
    """
    warmup, final = config.warmup_steps, config.final_fraction
    start = warmup if config.schedule == "cosine" else max(warmup, steps - round(steps * config.decay_fraction))
    length = max(steps - start, 1)

    def factor(count):
        t = count + 1
        rise = jnp.minimum(t / warmup, 1.0) if warmup > 0 else 1.0
        if config.schedule == "constant":
            return rise
        progress = jnp.clip((t - start) / length, 0, 1)
        fall = (1 + jnp.cos(jnp.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
        return rise * (final + (1 - final) * fall)

    return factor
