"""The gated delta rule over whole rows: a scan over blocks of chunks, with a backward of its own that keeps little.

Saved for backward, per token and head and in the dtype of the computation (at least float32): the inputs as they came, two matrix rows
of 16, the written value (M), and a state per 16 tokens. Everything else is redone for one block at a time, inside a cache.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax_kernels import delta_chunks, delta_inputs, delta_states
from moejax_kernels.delta_chunks import CHUNK, Borders
from moejax_kernels.saved import CHUNK_STATES
from moejax_kernels.segments import Segments
from moejax_kernels.varying import vary_alike

BLOCK_NUMBERS = 2**17
"""Numbers of q in one block of chunks, about: a few tens of such arrays stay in a cache, and two cores share each."""


def chunked(decays, q_BLGC, k_BLGC, v_BLHM, g_BLHc, beta_BLH, *, segments: Segments | None, initial_state_BHCM, scale):
    """Outputs [B, L, H, M] and the state after the last token; `decays` as in `delta_chunks.forward`."""
    dtype = delta_inputs.inside(q_BLGC, k_BLGC, v_BLHM, g_BLHc, beta_BLH)
    (B, _, H, M), C = v_BLHM.shape, q_BLGC.shape[3]
    if initial_state_BHCM is None:
        initial_state_BHCM = jnp.zeros((B, H, C, M), dtype)
    arrays = (q_BLGC, k_BLGC, v_BLHM, g_BLHc, beta_BLH[..., None])
    arrays, state_BHCM, segments = vary_alike(arrays, initial_state_BHCM.astype(dtype), segments)
    if segments is not None and segments.index_BL is not None:
        return _tree(decays, arrays, segments, state_BHCM, scale, dtype)
    tokens = None if segments is None else _Tokens(jnp.asarray(segments.ids_BL) >= 0, delta_inputs.labels(segments))
    return _scanned(_Plan.build(decays, scale, dtype, arrays), arrays, state_BHCM, tokens, delta_states.CHAIN)


def _tree(decays, arrays, segments: Segments, state_BHCM, scale, dtype):
    tree = delta_states.Tree.build(segments, CHUNK)
    plan = _Plan.build(decays, scale, dtype, arrays, tree.num_chunks)
    num_places = plan.num_blocks * plan.block
    arrays = tuple(tree.lay_out(x_BLa, num_places) for x_BLa in arrays)
    tokens = _Tokens(tree.lay_out(jnp.asarray(segments.ids_BL) >= 0, num_places), None)
    more = num_places // CHUNK - tree.num_chunks
    source_NB, target_NB = (jnp.pad(slot_NB, ((0, more), (0, 0)), mode="edge") for slot_NB in tree.route)
    out: Any = _scanned(plan, arrays, tree.slots(state_BHCM), tokens, (source_NB, target_NB))
    return tree.collect(out[0]), tree.final(out[1])


class _Tokens(NamedTuple):
    """What a block must know of its tokens, [B, L] each."""

    real_BL: Any
    label_BL: Any
    """The same number for tokens that share a state; None where a chunk never holds two documents."""


class _Plan(NamedTuple):
    """What is fixed when the op is traced."""

    decays: Any
    scale: float
    dtype: Any
    block: int
    """Tokens of one block, whole chunks."""
    num_blocks: int

    @classmethod
    def build(cls, decays, scale, dtype, arrays, num_chunks=None):
        (B, L, _, C), H = arrays[0].shape, arrays[2].shape[2]
        num_chunks = -(-L // CHUNK) if num_chunks is None else num_chunks
        num_blocks = -(-num_chunks // max(BLOCK_NUMBERS // (B * H * C * CHUNK), 1))
        block = CHUNK * -(-num_chunks // num_blocks)
        return cls(decays, C**-0.5 if scale is None else scale, dtype, block, num_blocks)

    def load(self, real_Bt, q, k, v, g, beta):
        """Blocks [B, L, ...] of the inputs as chunks [N, B, H, t, ...]: cast, scaled, repeated for grouped heads, nothing at padding."""
        H = v.shape[2]

        def one(x_BLHc, factor=1.0):
            x_BLHc = x_BLHc.astype(self.dtype) * factor
            if real_Bt is not None:
                x_BLHc = jnp.where(real_Bt[..., None, None], x_BLHc, 0)
            if x_BLHc.shape[2] != H:
                x_BLHc = jnp.repeat(x_BLHc, H // x_BLHc.shape[2], axis=2)
            return self.to_chunks(x_BLHc)

        return one(q, self.scale), one(k), one(v), one(g), one(beta)

    def to_chunks(self, x_BLHc):
        B, _, H, c = x_BLHc.shape
        return x_BLHc.reshape(B, self.block // CHUNK, CHUNK, H, c).transpose(1, 0, 3, 2, 4)

    def from_chunks(self, x_NBHtc):
        _, B, H, _, c = x_NBHtc.shape
        return x_NBHtc.transpose(1, 0, 3, 2, 4).reshape(B, self.block, H, c)

    def fill(self, x_BLa, mode="constant"):
        """[B, L, ...] -> whole blocks of tokens."""
        L = x_BLa.shape[1]
        if self.num_blocks * self.block > L:
            x_BLa = jnp.pad(x_BLa, ((0, 0), (0, self.num_blocks * self.block - L)) + ((0, 0),) * (x_BLa.ndim - 2), mode=mode)
        return x_BLa

    def block_of(self, x_BLa, number):
        """A block of whole ones, taken where it lies: to scan over blocks would copy the array first."""
        return lax.dynamic_slice_in_dim(x_BLa, number * self.block, self.block, axis=1)

    def cut(self, x_BLa, mode="constant"):
        """[B, L, ...] -> [blocks, B, block, ...]."""
        x_BLa = self.fill(x_BLa, mode)
        return x_BLa.reshape(x_BLa.shape[0], self.num_blocks, self.block, *x_BLa.shape[2:]).swapaxes(0, 1)

    def join(self, x_nBta, length: int):
        x_Bnta = x_nBta.swapaxes(0, 1)
        return x_Bnta.reshape(x_Bnta.shape[0], -1, *x_Bnta.shape[3:])[:, :length]

    def cut_route(self, route):
        return jax.tree.map(lambda slot_NB: slot_NB.reshape(self.num_blocks, -1, slot_NB.shape[1]), route)

    def cut_tokens(self, tokens: _Tokens | None):
        """Per block: which tokens are real, labels by chunk, and the label before each chunk."""
        if tokens is None:
            return None, None, None
        real_nBt = self.cut(tokens.real_BL)
        if tokens.label_BL is None:
            return real_nBt, None, None
        label_nBt = self.cut(tokens.label_BL, mode="edge")
        label_nNBt = label_nBt.reshape(self.num_blocks, -1, self.block // CHUNK, CHUNK).swapaxes(1, 2)
        label_NBt = label_nNBt.reshape(-1, *label_nNBt.shape[2:])
        before_NB1 = jnp.concatenate([label_NBt[:1, :, :1], label_NBt[:-1, :, -1:]])  # an initial state belongs to the row's first token
        return real_nBt, label_nNBt, before_NB1.reshape(*label_nNBt.shape[:3], 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scanned(plan: _Plan, arrays, states, tokens: _Tokens | None, route):
    return _save(plan, arrays, states, tokens, route)[0]


def _save(plan: _Plan, arrays, states, tokens, route):
    filled = tuple(plan.fill(x_BLa) for x_BLa in arrays)

    def one_block(states, block):
        number, (real_Bt, label_NBt, before_NB1), route = block
        inputs = plan.load(real_Bt, *(plan.block_of(x_BLa, number) for x_BLa in filled))
        o_tM, states, saved = delta_chunks.forward(plan.decays, inputs, states, route, Borders.build(label_NBt, before_NB1))
        return states, (plan.from_chunks(o_tM).astype(arrays[2].dtype), saved)

    blocks = jnp.arange(plan.num_blocks), plan.cut_tokens(tokens), plan.cut_route(route)
    states, (o_nBtHM, saved) = lax.scan(one_block, states, blocks)
    o_BLHM, saved = checkpoint_name((plan.join(o_nBtHM, arrays[2].shape[1]), saved), CHUNK_STATES)
    return (o_BLHM, states), (arrays, tokens, route, saved)


def _grads(plan: _Plan, residuals, cotangents):
    arrays, tokens, route, saved = residuals
    do_BLHM, dstates = cotangents
    filled, do_filled = tuple(plan.fill(x_BLa) for x_BLa in arrays), plan.fill(do_BLHM)

    def one_block(dstates, block):
        number, (real_Bt, label_NBt, before_NB1), route, saved = block
        inputs, pull = jax.vjp(functools.partial(plan.load, real_Bt), *(plan.block_of(x_BLa, number) for x_BLa in filled))
        do_tM = plan.to_chunks(plan.block_of(do_filled, number).astype(plan.dtype))
        dinputs, dstates = delta_chunks.backward(plan.decays, inputs, saved, do_tM, dstates, route, Borders.build(label_NBt, before_NB1))
        return dstates, pull(dinputs)

    blocks = jnp.arange(plan.num_blocks), plan.cut_tokens(tokens), plan.cut_route(route)
    dstates, darrays = lax.scan(one_block, dstates, (*blocks, saved), reverse=True)
    return tuple(plan.join(dx_nBta, do_BLHM.shape[1]) for dx_nBta in darrays), dstates, None, None


_scanned.defvjp(_save, _grads)
