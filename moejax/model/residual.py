"""How sublayers add up: plain, hyper-connections (mHC), or Block AttnRes. One interface: `enter` gives a sublayer its input,
`leave` takes its output. Sources: DeepSeek mHC (Xie et al. 2026); Attention Residuals (arXiv 2603.15031) in Kimi K3's block form."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config.model import ModelConfig
from moejax.memory.names import named
from moejax.model.norms import RMSNorm, rms_norm
from moejax.model.weights import Maker
from moejax.parallel.projection import float_inside


def start(config: ModelConfig, x_BLD, num_blocks: int):
    """The carry from the embedding: what flows between layers."""
    residual = config.residual
    if residual.kind == "mhc":
        return {"x": jnp.repeat(x_BLD[:, :, None], residual.num_streams, 2)}
    if residual.kind == "block_attnres":
        return {"x": x_BLD, "blocks": jnp.zeros((num_blocks, *x_BLD.shape), x_BLD.dtype)}
    return {"x": x_BLD}


class Plain(nnx.Module):
    """x + f(x)."""

    def enter(self, carry, num_blocks):
        """The sublayer's input, and what `leave` needs."""
        return carry["x"], None

    def leave(self, carry, y_BLD, kept, *, opens_block):
        """The carry after the sublayer."""
        return {"x": carry["x"] + y_BLD}


class HyperConnection(nnx.Module):
    """mHC: reads a mix of N streams, writes to all of them, and mixes them by a doubly stochastic matrix."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config, self.norm_eps = config.residual, config.norm_eps
        streams, make = config.residual.num_streams, Maker(config, rngs)
        outputs = (2 + streams) * streams
        self.mix_XZ = make.normal((None, None), outputs, streams * config.width, std=0.02)
        self.base_X = make.constant(0.0, (None,), outputs)
        self.scale_3 = make.constant(1.0, (None,), 3)

    def enter(self, carry, num_blocks):
        """Collapses the streams; keeps how to write back."""
        x_BLND = carry["x"]
        streams, eps = self.config.num_streams, self.config.mhc_eps
        wide_BLND = float_inside(x_BLND)
        flat_BLZ = rms_norm(wide_BLND.reshape(*x_BLND.shape[:2], -1), None, eps=self.norm_eps)
        mixed_BLX = named(jnp.einsum("blz,xz->blx", flat_BLZ, self.mix_XZ[...].astype(flat_BLZ.dtype)), "residual_mix")
        base_X, scale_3 = self.base_X[...].astype(mixed_BLX.dtype), self.scale_3[...].astype(mixed_BLX.dtype)
        part = lambda first, last, which: mixed_BLX[..., first:last] * scale_3[which] + base_X[first:last]
        pre_BLN = jax.nn.sigmoid(part(0, streams, 0)) + eps
        post_BLN = 2 * jax.nn.sigmoid(part(streams, 2 * streams, 1))
        square = part(2 * streams, None, 2).reshape(*x_BLND.shape[:2], streams, streams)
        comb_BLNN = sinkhorn(jax.nn.softmax(square, -1) + eps, iters=self.config.sinkhorn_iters, eps=eps)
        x_BLD = jnp.sum(pre_BLN[..., None] * wide_BLND, 2).astype(x_BLND.dtype)
        return named(x_BLD, "residual_mix"), (post_BLN.astype(x_BLND.dtype), comb_BLNN.astype(x_BLND.dtype))

    def leave(self, carry, y_BLD, kept, *, opens_block):
        """Writes the output to the streams and mixes them."""
        post_BLN, comb_BLNN = kept
        return {"x": post_BLN[..., None] * y_BLD[:, :, None] + jnp.einsum("blij,blid->bljd", comb_BLNN, carry["x"])}


def sinkhorn(matrix_NN, *, iters: int, eps: float):
    """Divides by column sums, then (iters - 1) times by row and column sums; the result is nearly doubly stochastic."""

    def both(_, matrix_NN):
        matrix_NN = matrix_NN / (matrix_NN.sum(-1, keepdims=True) + eps)
        return matrix_NN / (matrix_NN.sum(-2, keepdims=True) + eps)

    # a loop: unrolled, 20 iterations in every sublayer are half of a model's compile time
    return jax.lax.fori_loop(0, iters - 1, both, matrix_NN / (matrix_NN.sum(-2, keepdims=True) + eps))


class BlockMix(nnx.Module):
    """Block AttnRes: the sublayer reads a softmax mix of the finished blocks' sums and the running one."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        make = Maker(config, rngs)
        self.norm = RMSNorm(config, config.width, rngs=rngs, plain=True)
        self.query_D = make.normal((None,), config.width, std=config.width**-0.5)

    def mix(self, carry, num_blocks, *, mark=lambda array: array):
        """Mix of the first `num_blocks` blocks and the running sum, weights in float32; `mark` is put on the logits and on the result."""
        entries = jnp.concatenate([carry["blocks"], carry["x"][None]])
        wide = float_inside(entries)
        score_PBL = mark(jnp.einsum("pbld,d->pbl", self.norm(wide), self.query_D[...].astype(wide.dtype)))
        count = carry["blocks"].shape[0]
        place_P = jnp.arange(count + 1)
        open_P = (place_P < num_blocks) | (place_P == count)
        weight_PBL = jax.nn.softmax(jnp.where(open_P[:, None, None], score_PBL, -jnp.inf), 0)
        return mark(jnp.einsum("pbl,pbld->bld", weight_PBL, wide).astype(entries.dtype))

    def enter(self, carry, num_blocks):
        """The mix."""
        return self.mix(carry, num_blocks, mark=functools.partial(named, name="residual_mix")), num_blocks

    def leave(self, carry, y_BLD, kept, *, opens_block):
        """Adds to the running sum; a layer that opens a block first puts the old sum away."""
        if not opens_block:
            return carry | {"x": carry["x"] + y_BLD}
        blocks = jax.lax.dynamic_update_index_in_dim(carry["blocks"], carry["x"], kept, 0)
        return {"x": y_BLD, "blocks": blocks}


def make_residual(config: ModelConfig, *, rngs: nnx.Rngs) -> Plain | HyperConnection | BlockMix:
    """The residual of one sublayer."""
    if config.residual.kind == "mhc":
        return HyperConnection(config, rngs=rngs)
    if config.residual.kind == "block_attnres":
        return BlockMix(config, rngs=rngs)
    return Plain()
