"""What the kernels of the index's loss are compiled for."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and tiles; those of the attention's keys are named as in sparse attention."""

    H: int
    G: int
    C: int
    C1: int
    """First channels of the attention's keys, a power of two."""
    C2: int
    """The others, a power of two or 0."""
    STEP: int
    """Channels read at a time where a tile is not as wide as the rows."""
    J: int
    JP: int
    """Index heads, rounded up to a power of two from 16."""
    I: int  # noqa: E741
    """Channels of the index."""
    IP: int
    """Those, rounded up to a power of two."""
    K: int
    """Keys chosen per query; 0: all that it sees."""
    KP: int
    BH: int
    """Heads of a tile."""
    BQ: int
    """Queries of a tile, where all visible keys are looked at."""
    BK: int
    """Keys of a tile."""
    segments: int
    """As triton_visible.operands says."""
    precision: str
    """Of matmuls of float32."""
