"""The gated delta rule on the GPU, forward and backward: what KDA and Gated DeltaNet share. Triton through jax-triton.

Rows are cut into chunks of 64 tokens; documents begin and end anywhere. Forward 3 launches (matrices of each chunk; scan of the
states; outputs), backward 4 (replay; scan; gradients of the matrices; gradients of the inputs), 5 with one decay per head (what the
pairs of tokens give to it), and a sum over each group of value heads where these share keys. Kept for the backward pass: the inputs,
two 64 x 64 matrices per chunk and head, and the state that enters each chunk; the rest is computed again. A tree of segments is laid out
anew, each segment in chunks of its own, and the scans read and leave states in slots, one per segment. Source: the WY form of Yang
et al. 2024, "Gated Delta Networks", and of the Kimi Linear tech report, arXiv 2510.26692; division of the work as in
fla-org/flash-linear-attention `fla/ops/kda`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax_kernels import delta_inputs, delta_states, gpu
from moejax_kernels import delta_triton_backward as backward
from moejax_kernels import delta_triton_forward as forward
from moejax_kernels import delta_triton_gradients as gradients
from moejax_kernels.delta_triton_chunk import CHUNK, choices
from moejax_kernels.saved import CHUNK_STATES
from moejax_kernels.triton_launch import launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What the kernels are compiled for."""

    rows: int
    length: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    scale: float
    packed: bool
    per_channel: bool
    slots: int
    """States that the chunks leave behind: the row's last one alone, or those of a tree's segments, zeros and the initial one."""
    dtype: str
    """Of q, k, v and of what is kept: bfloat16, or float32 for matmuls with float32 operands."""

    @property
    def num_chunks(self) -> int:
        """Of a row, the last one filled up."""
        return -(-self.length // CHUNK)

    @property
    def chunk_grid(self) -> tuple[int, int]:
        """One program per chunk and head."""
        return self.num_chunks, self.rows * self.heads

    def per_chunk(self, *shape: int, dtype=None):
        """An array with one `shape` per chunk and head."""
        return jax.ShapeDtypeStruct((self.rows, self.heads, self.num_chunks, *shape), dtype or self.dtype)

    def per_slot(self):
        """An array with one state per slot and head."""
        return jax.ShapeDtypeStruct((self.rows, self.heads, self.slots, self.key_dim, self.value_dim), "float32")

    def per_token(self, num_heads: int, *width: int, dtype=None):
        """An array [B, L, num_heads, ...]."""
        return jax.ShapeDtypeStruct((self.rows, self.length, num_heads, *width), dtype or self.dtype)

    def choices(self):
        """A constant of the program."""
        return jnp.asarray(choices(), self.dtype)

    def tiles(self, kernel: str, *, key: bool = True, value: bool = True) -> dict:
        """Launch options of a kernel: warps, and the channels of keys and values that it takes at a time."""
        on_a100 = "A100" in (gpu.device_kind() or "")
        table = (NARROW if self.key_dim <= 128 else NARROW_WIDE_KEYS) if on_a100 else TILES
        tiles = (table if self.slots == 1 else table | TREES)[kernel]
        options = {"num_warps": tiles.warps}
        options |= {"BC": block(self.key_dim, tiles.key)} if key else {}
        return options | ({"BM": block(self.value_dim, tiles.value)} if value else {})

    def per_token_sum(self, shares, dtype):
        """[B, L, H] from shares [B, H, N, blocks, CHUNK]."""
        sum_BHL = shares.sum(3).reshape(self.rows, self.heads, -1)[..., : self.length]
        return sum_BHL.swapaxes(1, 2).astype(dtype)

    def constants(self, *names: str) -> dict:
        """Compile-time constants that the kernels share, by name."""
        every = {
            "SCALE": self.scale,
            "L": self.length,
            "N": self.num_chunks,
            "G": self.key_heads,
            "H": self.heads,
            "C": self.key_dim,
            "CP": 1 << (self.key_dim - 1).bit_length(),
            "M": self.value_dim,
            "PACKED": self.packed,
            "SLOTS": self.slots,
            "PER_CHANNEL": self.per_channel,
            "FULL": self.dtype == "float32",
        }
        return {name: every[name] for name in names}


def block(width: int, most: int) -> int:
    """Widest block of 128, 64, 32 or 16 channels, at most `most`, that divides the width."""
    return next(size for size in (128, 64, 32, 16) if size <= most and width % size == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How one kernel divides its work: warps per program, and channels at a time, at most."""

    warps: int
    key: int = 64
    value: int = 64


TILES = {
    "chunk_matrices": Tiles(warps=8),
    "carry_state": Tiles(warps=4, value=32),
    "outputs": Tiles(warps=8, value=128),
    "replay": Tiles(warps=8),
    "carry_gradient": Tiles(warps=4, value=32),
    "matrix_gradients": Tiles(warps=8),
    "channel_gradients": Tiles(warps=4, key=16),
    "head_pairs": Tiles(warps=8, key=32),
    "head_gradients": Tiles(warps=8),
}
"""Wider blocks read less twice; narrower ones keep what they hold in registers."""
NARROW = TILES | {
    "chunk_matrices": Tiles(warps=8, key=32, value=32),
    "replay": Tiles(warps=8, key=32, value=32),
    "matrix_gradients": Tiles(warps=8, value=32),
    "head_gradients": Tiles(warps=8, key=32),
}
"""For an A100, whose matmuls read their operands from registers."""
NARROW_WIDE_KEYS = NARROW | {"carry_state": Tiles(warps=8, value=32), "carry_gradient": Tiles(warps=8, value=16)}
"""For an A100 and keys of more than 128 channels."""
TREES = {"carry_state": Tiles(warps=8, value=16), "carry_gradient": Tiles(warps=8, value=16)}
"""For trees, where the places of the slots take registers too."""
COMMON = ("SCALE", "L", "N", "G", "H", "C", "M", "PACKED", "PER_CHANNEL", "FULL")


def _or_any(setup: Setup, ids, starts, never_read):
    """Without segments the kernels read no ids, but they take a pointer."""
    return (ids, starts) if setup.packed else (never_read, never_read)


def _forward(setup: Setup, q, k, v, g, beta, initial, ids, starts, route):
    """Outputs, the states left in the slots, and what the backward pass needs beside the inputs."""
    ids, starts = _or_any(setup, ids, starts, beta)
    C, M = setup.key_dim, setup.value_dim
    square, by_key, by_value = setup.per_chunk(CHUNK, CHUNK), setup.per_chunk(CHUNK, C), setup.per_chunk(CHUNK, M)
    inverse, qk, w, u, kg, past = launch(
        forward.chunk_matrices,
        *(q, k, v, g, beta, ids, starts, setup.choices()),
        out_type=[square, square, by_key, by_value, by_key, setup.per_chunk(C, dtype="float32")],
        grid=setup.chunk_grid,
        **setup.tiles("chunk_matrices"),
        **setup.constants(*COMMON),
    )
    tiles = setup.tiles("carry_state", key=False)
    states, written, slots = launch(
        forward.carry_state,
        *(w, u, kg, past, past if initial is None else initial, past if route is None else route),
        out_type=[setup.per_chunk(C, M), by_value, setup.per_slot()],
        zeroed=() if route is None else (2,),
        grid=(M // tiles["BM"], setup.rows * setup.heads),
        **tiles,
        INITIAL=initial is not None,
        **setup.constants("N", "H", "C", "CP", "M", "SLOTS", "FULL"),
    )
    tiles = setup.tiles("outputs")
    (o,) = launch(
        forward.outputs,
        *(q, g, ids, starts, setup.choices(), qk, states, written),
        out_type=[setup.per_token(setup.heads, M)],
        grid=(setup.num_chunks, M // tiles["BM"], setup.rows * setup.heads),
        **tiles,
        **setup.constants(*COMMON),
    )
    return o, slots, (inverse, qk, states)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(setup: Setup, q, k, v, g, beta, initial, ids, starts, route):
    o, slots, _ = _forward(setup, q, k, v, g, beta, initial, ids, starts, route)
    return o, slots


def _save(setup: Setup, *inputs):
    o, slots, kept = _forward(setup, *inputs)
    o, kept = checkpoint_name((o, kept), CHUNK_STATES)
    return (o, slots), (inputs, kept)


def _backward(setup: Setup, saved, cotangents):
    (q, k, v, g, beta, initial, ids, starts, route), (inverse, qk, states) = saved
    do, dleft = cotangents
    ids, starts = _or_any(setup, ids, starts, beta)
    C, M, H = setup.key_dim, setup.value_dim, setup.heads
    square, by_key, by_value = setup.per_chunk(CHUNK, CHUNK), setup.per_chunk(CHUNK, C), setup.per_chunk(CHUNK, M)
    w, qg, kg, past, written, dwritten = launch(
        backward.replay,
        *(q, k, v, g, beta, ids, starts, setup.choices(), inverse, qk, states, do),
        out_type=[by_key, by_key, by_key, setup.per_chunk(C, dtype="float32"), by_value, by_value],
        grid=setup.chunk_grid,
        **setup.tiles("replay"),
        **setup.constants(*COMMON),
    )
    tiles = setup.tiles("carry_gradient", key=False)
    du, dstates, dslots = launch(
        backward.carry_gradient,
        *(w, qg, kg, past, do, dwritten, dleft, past if route is None else route),
        out_type=[by_value, states, setup.per_slot()],
        grid=(M // tiles["BM"], setup.rows * H),
        **tiles,
        **setup.constants("L", "N", "H", "C", "CP", "M", "SLOTS", "FULL"),
    )
    da, dqk, dvalue, dv, dbeta = launch(
        backward.matrix_gradients,
        *(v, beta, ids, starts, inverse, written, du, do),
        out_type=[square, square, by_value, v, setup.per_chunk(CHUNK, dtype="float32")],
        grid=setup.chunk_grid,
        **setup.tiles("matrix_gradients", key=False),
        **setup.constants("L", "N", "H", "M", "PACKED", "FULL"),
    )
    dq, dk, dg, dbeta = _input_gradients(setup, saved[0], states, dstates, written, dvalue, do, (da, dqk, dbeta))
    return dq, dk, dv, dg, dbeta, None if initial is None else dslots[:, :, -1].astype(initial.dtype), None, None, None


def _input_gradients(setup: Setup, inputs, states, dstates, written, dvalue, do, pairs):
    """Of q, k, g and beta, from those of the chunks' states and matrices."""
    q, k, _, g, beta, _, ids, starts, _ = inputs
    ids, starts = _or_any(setup, ids, starts, beta)
    C, H, square = setup.key_dim, setup.heads, setup.per_chunk(CHUNK, CHUNK)
    grouped = setup.key_heads != H
    of_heads = setup.per_token(H, C, dtype="float32" if grouped else setup.dtype)
    if not setup.per_channel:
        by_token = setup.per_chunk(CHUNK, dtype="float32")
        pairs = launch(
            gradients.head_pairs,
            *(q, k, g, beta, ids, starts, setup.choices(), *pairs),
            out_type=[square, square, by_token, by_token],
            grid=setup.chunk_grid,
            **setup.tiles("head_pairs", value=False),
            **setup.constants(*(name for name in COMMON if name not in ("M", "PER_CHANNEL"))),
        )
    last = gradients.channel_gradients if setup.per_channel else gradients.head_gradients
    tiles = setup.tiles(last.__name__)
    num_blocks = C // tiles["BC"]
    shares = setup.per_chunk(num_blocks, CHUNK, dtype="float32")
    dq, dk, dg, dbeta = launch(
        last,
        *(q, k, g, beta, ids, starts, setup.choices(), states, dstates, written, dvalue, do, *pairs),
        out_type=[of_heads, of_heads, g if setup.per_channel else shares, shares],
        grid=(num_blocks, *setup.chunk_grid),
        **tiles,
        **setup.constants(*(name for name in COMMON if name != "PER_CHANNEL")),
    )
    dbeta = setup.per_token_sum(dbeta, beta.dtype)
    if not setup.per_channel:
        dg = setup.per_token_sum(dg, g.dtype)
    if grouped:
        dq, dk = (x.reshape(*q.shape[:3], H // setup.key_heads, C).sum(3).astype(q.dtype) for x in (dq, dk))
    return dq, dk, dg, dbeta


_rule.defvjp(_save, _backward)


def delta_rule(q_BLGC, k_BLGC, v_BLHM, g, beta_BLH, *, segments, initial_state_BHCM, scale: float | None):
    """Outputs [B, L, H, M] and the state after each row's last token; g [B, L, H, C] or [B, L, H]."""
    arrays, tree = (q_BLGC, k_BLGC, v_BLHM, g, beta_BLH), None
    if segments is not None and segments.index_BL is not None:
        tree = delta_states.Tree.build(segments, CHUNK)
        arrays = [tree.lay_out(x_BLa, tree.num_chunks * CHUNK) for x_BLa in delta_inputs.clear_padding(segments, arrays)]
    B, L, G, C = arrays[0].shape
    H, M = v_BLHM.shape[2:]
    setup = Setup(
        rows=B,
        length=L,
        key_heads=G,
        heads=H,
        key_dim=C,
        value_dim=M,
        scale=float(C**-0.5 if scale is None else scale),
        packed=segments is not None and tree is None,
        per_channel=g.ndim == 4,
        slots=1 if tree is None else tree.num_segments + 2,
        dtype=v_BLHM.dtype.name,
    )
    borders = (jnp.asarray(segments.ids_BL), jnp.asarray(segments.starts_BL)) if setup.packed else (None, None)
    if tree is None:
        o_BLHM, slots_BHUCM = _rule(setup, *arrays, initial_state_BHCM, *borders, None)
        return o_BLHM, slots_BHUCM[:, :, 0]
    o_BPHM, slots_BHUCM = _rule(setup, *arrays, initial_state_BHCM, *borders, jnp.stack([slot_NB.T for slot_NB in tree.route], axis=-1))
    return tree.collect(o_BPHM), tree.final(slots_BHUCM.transpose(2, 0, 1, 3, 4))
