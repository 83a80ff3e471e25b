"""Linear attention mixers: KDA (Kimi Linear, arXiv 2510.26692) and Gated DeltaNet (arXiv 2412.06464)."""

import jax
import jax.numpy as jnp
from flax import nnx
from moejax_kernels import causal_conv, gated_delta, kda

from moejax.config.model import ModelConfig
from moejax.memory.names import named
from moejax.model import past
from moejax.model.context import Context
from moejax.model.norms import l2_norm, rms_norm
from moejax.model.weights import Maker
from moejax.parallel.islands import per_rows
from moejax.parallel.projection import float_inside, project

CONV_TAPS = 4


def decay_bias(make: Maker, axes, *shape):
    """dt_bias so that softplus(dt_bias) is log-uniform between 1e-3 and 1e-1 (fla's initialisation, clamped at 1e-4)."""

    def inverse_softplus(log_dt):
        dt = jnp.maximum(jnp.exp(log_dt), 1e-4)
        return dt + jnp.log(-jnp.expm1(-dt))

    return make.uniform(inverse_softplus, jnp.log(1e-3), jnp.log(1e-1), axes, *shape)


def short_conv(x_BLX, weight_X4, context: Context, name: str):
    """Causal depthwise convolution and SiLU, inside documents; and what is left of it, under `name`."""
    run = lambda x, segments, history, weight: causal_conv(x, weight, segments=segments, history_B3D=history)
    y_BLX, history = _with_state(run, x_BLX, context=context, name=name, whole=(weight_X4,))
    return named(y_BLX, "conv"), history


def _with_state(op, *arrays, context: Context, name: str, whole=()):
    """An op's output, and {name: its final state} if rows leave a past; it begins from the past's state of that name.

    Args:
      op: function of the arrays, segments, the state to begin from (None: zeros) and `whole` to output and final state.
    """
    if context.switches.past_keys is None:
        return per_rows(lambda *args: op(*args)[0], *arrays, context.segments, None, whole=whole), {}
    out, state = per_rows(op, *arrays, context.segments, past.start(context, name), whole=whole)
    return out, {name: state}


def gated_norm(o_BLHM, gate_BLHM, scale_M, *, activation, eps: float):
    """rms_norm(o) * activation(gate), float32 inside, in the gate's dtype; saves its inputs alone for the backward pass."""

    def inside(o_BLHM, gate_BLHM, scale_M):
        return (rms_norm(float_inside(o_BLHM), scale_M, eps=eps) * activation(float_inside(gate_BLHM))).astype(gate_BLHM.dtype)

    return jax.checkpoint(inside)(o_BLHM, gate_BLHM, scale_M)


class KimiDeltaAttention(nnx.Module):
    """KDA: delta rule with a decay per key channel."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = kda_config = config.kda
        self.eps = config.norm_eps
        make, width, heads = Maker(config, rngs), config.width, kda_config.num_heads
        channels, values, groups = kda_config.key_dim, kda_config.value_dim, kda_config.num_key_heads or heads
        self.q_DGC = make.linear(("embed", "heads", None), width, groups, channels, fan_in=width)
        self.k_DGC = make.linear(("embed", "heads", None), width, groups, channels, fan_in=width)
        self.v_DHM = make.linear(("embed", "heads", None), width, heads, values, fan_in=width)
        taps = lambda size: make.linear(("heads", None), size, CONV_TAPS, fan_in=CONV_TAPS)
        self.q_conv_X4, self.k_conv_X4, self.v_conv_X4 = taps(groups * channels), taps(groups * channels), taps(heads * values)
        self.decay_down_DR = make.linear(("embed", None), width, channels, fan_in=width)
        self.decay_up_RHC = make.linear((None, "heads", None), channels, heads, channels, fan_in=channels)
        bounded = kda_config.decay == "bounded"
        self.A_log_H = make.constant(0.0, ("heads",), heads) if bounded else make.uniform(jnp.log, 1.0, 16.0, ("heads",), heads)
        self.dt_bias_HC = decay_bias(make, ("heads", None), heads, channels)
        self.beta_DH = make.linear(("embed", "heads"), width, heads, fan_in=width)
        if kda_config.full_rank_gate:
            self.gate_DHM = make.linear(("embed", "heads", None), width, heads, values, fan_in=width)
        else:
            self.gate_down_DR = make.linear(("embed", None), width, values, fan_in=width)
            self.gate_up_RHM = make.linear((None, "heads", None), values, heads, values, fan_in=values)
        self.out_norm_scale_M = make.constant(1.0, (None,), values)
        self.out_HMD = make.linear(("heads", None, "embed"), heads, values, width, fan_in=heads * values)

    def __call__(self, x_BLD, context: Context, ids_BLK):
        q_BLGC, k_BLGC, v_BLHM, kept = self._convolved(x_BLD, context)
        beta_BLH = jax.nn.sigmoid(float_inside(named(project("bld,dh->blh", x_BLD, self.beta_DH[...]), "decay")))
        bound = self.config.lower_bound if self.config.decay == "bounded" else None
        run = lambda *arrays: kda(*arrays[:5], segments=arrays[5], initial_state_BHCM=arrays[6], min_log_decay=bound)
        inputs = l2_norm(q_BLGC), l2_norm(k_BLGC), v_BLHM, self._log_decay(x_BLD), beta_BLH
        o_BLHM, state = _with_state(run, *inputs, context=context, name="state_BHCM")
        if self.config.full_rank_gate:
            gate_BLHM = project("bld,dhm->blhm", x_BLD, self.gate_DHM[...])
        else:
            low_BLR = named(project("bld,dr->blr", x_BLD, self.gate_down_DR[...]), "output_gate")
            gate_BLHM = project("blr,rhm->blhm", low_BLR, self.gate_up_RHM[...])
        gate_BLHM = named(gate_BLHM, "output_gate")
        o_BLHM = gated_norm(o_BLHM, gate_BLHM, self.out_norm_scale_M[...], activation=jax.nn.sigmoid, eps=self.eps)
        return project("blhm,hmd->bld", o_BLHM, self.out_HMD[...]), ids_BLK, past.report(kept | state)

    def _convolved(self, x_BLD, context):
        """q, k and v, each behind its own short convolution (joining them for one would copy all three twice), and what these leave."""
        kept = {}

        def of(name, weight_DHC, taps_X4):
            heads_BLHC = named(project("bld,dhc->blhc", x_BLD, weight_DHC), "query" if name == "q_B3X" else "key_value")
            flat_BLX = heads_BLHC.reshape(*heads_BLHC.shape[:2], -1)
            flat_BLX, history = short_conv(flat_BLX, taps_X4, context, name)
            kept.update(history)
            return flat_BLX.reshape(heads_BLHC.shape)

        names = ("q_B3X", self.q_DGC, self.q_conv_X4), ("k_B3X", self.k_DGC, self.k_conv_X4), ("v_B3X", self.v_DHM, self.v_conv_X4)
        return *(of(name, weight[...], taps[...]) for name, weight, taps in names), kept

    def _log_decay(self, x_BLD):
        low_BLR = named(project("bld,dr->blr", x_BLD, self.decay_down_DR[...]), "decay")
        raw_BLHC = named(project("blr,rhc->blhc", low_BLR, self.decay_up_RHC[...]), "decay")

        @jax.checkpoint  # elementwise: cheaper to redo than to store
        def decay(raw_BLHC, bias_HC, A_log_H):
            wide_BLHC = float_inside(raw_BLHC)
            wide_BLHC = wide_BLHC + bias_HC.astype(wide_BLHC.dtype)
            rate_H1 = jnp.exp(A_log_H.astype(wide_BLHC.dtype))[:, None]
            if self.config.decay == "bounded":
                return self.config.lower_bound * jax.nn.sigmoid(rate_H1 * wide_BLHC)
            return -rate_H1 * jax.nn.softplus(wide_BLHC)

        return decay(raw_BLHC, self.dt_bias_HC[...], self.A_log_H[...])


class GatedDeltaNet(nnx.Module):
    """GDN: delta rule with one decay per head. Projections keep the checkpoints' order: per key head [q | k | v | z] and [b | a]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = gdn = config.gdn
        self.eps = config.norm_eps
        make, width, groups, heads = Maker(config, rngs), config.width, gdn.num_key_heads, gdn.num_heads
        self.ratio = heads // groups
        group_width = 2 * gdn.key_dim + 2 * self.ratio * gdn.value_dim
        self.qkvz_DGX = make.linear(("embed", "heads", None), width, groups, group_width, fan_in=width)
        self.ba_DGX = make.linear(("embed", "heads", None), width, groups, 2 * self.ratio, fan_in=width)
        self.conv_X4 = make.linear(("heads", None), 2 * groups * gdn.key_dim + heads * gdn.value_dim, CONV_TAPS, fan_in=CONV_TAPS)
        self.A_log_H = make.uniform(jnp.log, 0.01, 16.0, ("heads",), heads)
        self.dt_bias_H = make.constant(1.0, ("heads",), heads)
        self.out_norm_scale_M = make.constant(1.0, (None,), gdn.value_dim)
        self.out_HMD = make.linear(("heads", None, "embed"), heads, gdn.value_dim, width, fan_in=heads * gdn.value_dim)

    def __call__(self, x_BLD, context: Context, ids_BLK):
        gdn, (rows, length, _) = self.config, x_BLD.shape
        key, value, groups = gdn.key_dim, self.ratio * gdn.value_dim, gdn.num_key_heads
        qkvz_BLGX = named(project("bld,dgx->blgx", x_BLD, self.qkvz_DGX[...]), "key_value")  # one product: the queries and the gate too
        ba_BLGX = named(project("bld,dgx->blgx", x_BLD, self.ba_DGX[...]), "decay")
        q, k, v, z = jnp.split(qkvz_BLGX, [key, 2 * key, 2 * key + value], -1)
        b, a = (part.reshape(rows, length, -1) for part in jnp.split(ba_BLGX, 2, -1))
        flat_BLX = jnp.concatenate([part.reshape(rows, length, -1) for part in (q, k, v)], -1)
        flat_BLX, history = short_conv(flat_BLX, self.conv_X4[...], context, "qkv_B3X")
        q, k, v = jnp.split(flat_BLX, [groups * key, 2 * groups * key], -1)
        heads = lambda part, channels: part.reshape(rows, length, -1, channels)
        beta_BLH = jax.nn.sigmoid(float_inside(b))
        wide_BLH = float_inside(a)
        rate_H = jnp.exp(self.A_log_H[...].astype(wide_BLH.dtype))
        g_BLH = -rate_H * jax.nn.softplus(wide_BLH + self.dt_bias_H[...].astype(wide_BLH.dtype))
        run = lambda *arrays: gated_delta(*arrays[:5], segments=arrays[5], initial_state_BHCM=arrays[6])
        inputs = l2_norm(heads(q, key)), l2_norm(heads(k, key)), heads(v, gdn.value_dim), g_BLH, beta_BLH
        o_BLHM, state = _with_state(run, *inputs, context=context, name="state_BHCM")
        o_BLHM = gated_norm(o_BLHM, heads(z, gdn.value_dim), self.out_norm_scale_M[...], activation=jax.nn.silu, eps=self.eps)
        return project("blhm,hmd->bld", o_BLHM, self.out_HMD[...]), ids_BLK, past.report(history | state)
