"""The language model: embedding, layers, final norm. Layers of a repeating pattern are stacked and scanned."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config.model import LayerKind, ModelConfig
from moejax.config.run import layer_plan
from moejax.memory import prefetch
from moejax.memory.names import named
from moejax.memory.policy import policy
from moejax.model import residual
from moejax.model.attention import GroupedQueryAttention, LatentAttention
from moejax.model.context import Context, rebuilt
from moejax.model.feed_forward import Dense, MixtureOfExperts
from moejax.model.linear_attention import GatedDeltaNet, KimiDeltaAttention
from moejax.model.norms import RMSNorm
from moejax.model.sparse import SparseAttention
from moejax.model.weights import Maker
from moejax.parallel.axes import constrain_rows

MIXER_CLASSES = {
    "gqa": GroupedQueryAttention,
    "mla": LatentAttention,
    "kda": KimiDeltaAttention,
    "gdn": GatedDeltaNet,
    "dsa": functools.partial(SparseAttention, shared=False),
    "dsa_shared": functools.partial(SparseAttention, shared=True),
}


class Layer(nnx.Module):
    """A mixer and a feed-forward, each behind a norm and inside a residual."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        self.block_size = config.residual.block_size if config.residual.kind == "block_attnres" else 0
        self.mixer_residual = residual.make_residual(config, rngs=rngs)
        self.mixer_norm = RMSNorm(config, config.width, rngs=rngs)
        self.mixer = MIXER_CLASSES[kind.mixer](config, rngs=rngs)
        self.feed_forward_residual = residual.make_residual(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config, config.width, rngs=rngs)
        self.feed_forward = (
            MixtureOfExperts(config, rngs=rngs) if kind.feed_forward == "moe" else Dense(config, config.dense_hidden, rngs=rngs)
        )

    def __call__(self, carry, context: Context, *, place: int, num_blocks):
        """One layer.

        Args:
          carry: what flows between layers: the residual state and the last chosen keys `ids`.
          place: the layer's number, or any number congruent to it modulo the residual block.
          num_blocks: residual blocks put away so far (may be traced).
        """
        ids, state, aux = carry["ids"], named({name: carry[name] for name in carry if name != "ids"}, "layer_input"), {}
        if context.switches.rebuild:
            context, state = rebuilt(context, state)
        opens_block = bool(self.block_size) and place % self.block_size == 0
        x_BLD, kept = self.mixer_residual.enter(state, num_blocks)
        y_BLD, ids, mixer_aux = self.mixer(named(self.mixer_norm(x_BLD), "norm"), context, ids)
        y_BLD = named(y_BLD, "mixer_out")
        state = self.mixer_residual.leave(state, y_BLD, kept, opens_block=opens_block)
        x_BLD, kept = self.feed_forward_residual.enter(state, num_blocks + 1 if opens_block else num_blocks)
        z_BLD, moe_aux = self.feed_forward(named(self.feed_forward_norm(x_BLD), "norm"), context)
        state = self.feed_forward_residual.leave(state, z_BLD, kept, opens_block=False)
        if context.switches.debug:
            aux["finite_2"] = jnp.stack([jnp.isfinite(y_BLD).all(), jnp.isfinite(z_BLD).all()])
        keep_ids = ids if carry["ids"].shape[-1] else carry["ids"]
        return state | {"x": constrain_rows(state["x"]), "ids": keep_ids}, aux | mixer_aux | moe_aux


class Below(NamedTuple):
    """What the first stages of the model made of a batch."""

    carry: dict
    """What flows into the next one."""
    num_stages: int


def stages(config: ModelConfig) -> list[tuple[str, str]]:
    """Section and place of what the model runs one after the other; the stacked layers are one stage, ("unit", "")."""
    plan = layer_plan(config)
    of = lambda section, kinds: [(section, str(place)) for place in range(len(kinds))]
    return of("head", plan.head) + [("unit", "")] * bool(plan.num_units) + of("tail", plan.tail)


class Transformer(nnx.Module):
    """Weights of the whole model. Sections: `head` and `tail` hold single layers, `unit` holds stacks along the depth."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config, self.plan = config, layer_plan(config)
        make = Maker(config, rngs)
        section = lambda kinds, rngs: nnx.Dict({str(i): Layer(config, kind, rngs=rngs) for i, kind in enumerate(kinds)})
        self.embed = nnx.Dict({"weight_VD": make.normal(("vocab", "embed"), config.vocab_size, config.width, std=config.init_std)})
        self.head = section(self.plan.head, rngs)
        self.unit, self.tail = nnx.Dict({}), section(self.plan.tail, rngs)
        if self.plan.num_units:
            stack = nnx.vmap(
                functools.partial(section, self.plan.unit), in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"}
            )
            self.unit = stack(rngs.split(self.plan.num_units))
        if self.config.residual.kind == "block_attnres":
            self.final_residual = residual.BlockMix(config, rngs=rngs)
        self.final_norm = RMSNorm(config, config.width, rngs=rngs)
        if not config.tie_embeddings:
            self.unembed = nnx.Dict({"weight_DV": make.normal(("embed", "vocab"), config.width, config.vocab_size, std=config.init_std)})

    def unembed_DV(self):
        """Weight of the output projection."""
        return self.embed["weight_VD"][...].T if self.config.tie_embeddings else self.unembed["weight_DV"][...]

    def __call__(self, tokens_BL, context: Context, below: Below | None = None) -> tuple[Any, dict]:
        """Hidden states before the output projection [B, L, D], and what the layers report: a tree by section and place."""
        if below is None:
            below = Below(self.begin(tokens_BL), 0)
        carry, aux = self.advance(below.carry, context, stages(self.config)[below.num_stages :])
        return self.final_norm(self._collapse(carry)), aux

    def begin(self, tokens_BL) -> dict:
        """What flows into the first layer."""
        x_BLD = jnp.take(self.embed["weight_VD"][...], tokens_BL, axis=0).astype(jnp.dtype(self.config.precision.compute))
        start = residual.start(self.config, constrain_rows(x_BLD), self.num_blocks(self.config.num_layers))
        return start | {"ids": self._no_keys(tokens_BL)}

    def advance(self, carry: dict, context: Context, through: list[tuple[str, str]]) -> tuple[dict, dict]:
        """What flows out of the last of these stages, and what their layers report."""
        aux: dict = {"head": {}, "unit": {}, "tail": {}}
        steps = [self._unit(context) if section == "unit" else self._layer(section, place, context) for section, place in through]
        batch, saved = (context.segments, context.positions_BL, context.before), context.switches.saved
        run = prefetch.ahead if steps and saved is not None and saved.offloaded else prefetch.plain
        carry, outs = run(steps, carry, batch)
        for (section, place), out in zip(through, outs, strict=True):
            aux[section] = out if section == "unit" else aux[section] | {place: out}
        return carry, aux

    def num_blocks(self, layer):
        """Residual blocks put away before a layer."""
        return -(-layer // self.config.residual.block_size)

    def _layer(self, section: str, place: str, context: Context) -> prefetch.Stage:
        """One layer that is not stacked."""
        layers, offset = (self.head, 0) if section == "head" else (self.tail, self.config.num_layers - len(self.plan.tail))
        graph, weights = nnx.split(layers[place])
        number = offset + int(place)

        def step(carry, x, batch):
            weights, control, past = x
            of_layer = dataclasses.replace(_of_batch(context, batch), control=control, past=past)
            return self._run(nnx.merge(graph, weights), carry, of_layer, number, self.num_blocks(number))

        told = [(tree or {}).get(section, {}).get(place) for tree in (context.control, context.past)]
        return prefetch.Stage(body=step, x=(weights, *told))

    def _unit(self, context: Context) -> prefetch.Stage:
        """The stacked layers."""
        graph, stacked = nnx.split(self.unit)
        offset, size = len(self.plan.head), len(self.plan.unit)

        def step(carry, x, batch):
            (index, weights, control, past), aux = x, {}
            of_batch = _of_batch(context, batch)
            for place, layer in nnx.merge(graph, weights).items():
                number = offset + int(place)
                of_layer = dataclasses.replace(of_batch, control=control.get(place), past=past.get(place))
                carry, aux[place] = self._run(layer, carry, of_layer, number, self.num_blocks(number + index * size))
            return carry, aux

        told = [(tree or {}).get("unit", {}) for tree in (context.control, context.past)]
        return prefetch.Stage(body=step, x=(jnp.arange(self.plan.num_units), stacked, *told), num_steps=self.plan.num_units)

    def _run(self, layer, carry, context: Context, place: int, num_blocks):
        if context.switches.saved is None:
            return layer(carry, context, place=place, num_blocks=num_blocks)
        graph, weights = nnx.split(layer)
        inside = lambda weights, carry, num_blocks: nnx.merge(graph, weights)(carry, context, place=place, num_blocks=num_blocks)
        return jax.checkpoint(inside, policy=policy(context.switches.saved))(weights, carry, num_blocks)

    def _no_keys(self, tokens_BL):
        """Chosen keys before the first sparse layer: none. A place is kept only if layers share a choice."""
        index = self.config.indexer
        width = index.topk + index.pool - 1 if "dsa_shared" in self.config.mixers else 0
        return jnp.full((*tokens_BL.shape, width), -1, jnp.int32)

    def _collapse(self, carry):
        kind = self.config.residual.kind
        if kind == "mhc":
            return jnp.mean(carry["x"], 2)
        if kind == "block_attnres":
            return self.final_residual.mix(carry, carry["blocks"].shape[0])
        return carry["x"]


def _of_batch(context: Context, batch) -> Context:
    """The context with the arrays that all layers see."""
    segments, positions_BL, before = batch
    return dataclasses.replace(context, segments=segments, positions_BL=positions_BL, before=before)
