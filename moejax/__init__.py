"""moejax: train and fine-tune sparse Mixture-of-Experts language models in JAX.

`moejax.load_hf` reads a checkpoint of the Hugging Face hub. It is imported when it is first asked for, so that the config alone
never imports JAX.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moejax.hf.load import load_hf

__all__ = ["load_hf"]


def __getattr__(name: str):
    if name == "load_hf":
        from moejax.hf.load import load_hf

        return load_hf
    raise AttributeError(f"module 'moejax' has no attribute {name!r}")
