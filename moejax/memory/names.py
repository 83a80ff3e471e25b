"""Marks results of a layer, so that a policy can choose for each whether it is kept, moved to the host, or computed again."""

from typing import Any

from jax.ad_checkpoint import checkpoint_name

from moejax.config.memory import RESULTS


def named(results: Any, name: str) -> Any:
    """The same array or tree, marked as one of `config.memory.RESULTS`.

    Raises:
      ValueError: there is no such name.
    """
    if name not in RESULTS:
        raise ValueError(f"no result of a layer is called {name!r}; `moejax/config/memory.py` lists {', '.join(RESULTS)}.")
    return checkpoint_name(results, name)
