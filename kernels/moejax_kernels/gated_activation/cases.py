"""Kinds and numbers of gated activations for tests and benchmarks."""

import dataclasses

import jax

SMALL = (
    {"kind": "swiglu"},
    {"kind": "swiglu_clamped", "limit": 1.0},
    {"kind": "situ", "beta": 4.0, "linear_beta": 25.0},
    {"kind": "situ", "beta": 0.5, "linear_beta": None},
)
MEASURED_SHAPE = (8192, 512)


@dataclasses.dataclass(frozen=True)
class ActivationCase:
    """Rows of one model's experts on one device."""

    name: str
    rows: int
    hidden: int
    options: tuple[tuple[str, float | str], ...]

    def __str__(self):
        return self.name

    def shapes(self, dtype):
        """gate and up."""
        return (jax.ShapeDtypeStruct((self.rows, self.hidden), dtype),) * 2


REAL = (
    ActivationCase("kimi_k3", 65536, 3072, (("kind", "situ"), ("beta", 4.0), ("linear_beta", 25.0))),
    ActivationCase("kimi_linear", 32768, 1024, (("kind", "swiglu"),)),
    ActivationCase("qwen3_next", 40960, 512, (("kind", "swiglu"),)),
    ActivationCase("gpt_oss", 16384, 2880, (("kind", "swiglu_clamped"), ("limit", 7.0))),
)
"""4096 tokens, each at all of its experts."""
