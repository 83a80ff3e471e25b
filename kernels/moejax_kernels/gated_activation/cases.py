"""Kinds and numbers of gated activations for tests and benchmarks."""

SMALL = (
    {"kind": "swiglu"},
    {"kind": "swiglu_clamped", "limit": 1.0},
    {"kind": "situ", "beta": 4.0, "linear_beta": 25.0},
    {"kind": "situ", "beta": 0.5, "linear_beta": None},
)
MEASURED_SHAPE = (8192, 512)
