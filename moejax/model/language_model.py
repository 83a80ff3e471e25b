"""The model as a graph and a tree of arrays: shapes, shardings, initial weights, and the forward pass on a plain tree."""

import dataclasses
import functools
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from moejax_kernels.logits.xla import logits as product

from moejax.config.model import ModelConfig
from moejax.losses.cross_entropy import CrossEntropy, cross_entropy
from moejax.memory.cached import cached
from moejax.model import past as pasts
from moejax.model.context import Context, Switches
from moejax.model.past import Past
from moejax.model.transformer import Below, Transformer, stages
from moejax.parallel.axes import ROWS, RULES, TOKENS, sharding, spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What the layers made of a batch."""

    hidden_BLD: Any
    unembed_DV: Any
    """Output projection in the master dtype; logits are hidden times this."""
    aux: dict
    """Reports of the layers, a tree by section and place; `unit` entries are stacked along the depth."""
    past: Past | None = None
    """What the rows leave for a later batch, if switches.past_keys asks for it."""
    logit_cap: float = dataclasses.field(default=0.0, metadata={"static": True})
    """Soft cap of the logits; 0: none."""
    tied: bool = dataclasses.field(default=False, metadata={"static": True})
    """unembed_DV is the transpose of the embedding."""


@functools.cache
def _abstract(config: ModelConfig):
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # flax would check logical axes against a mesh that is set
        return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def shapes(config: ModelConfig) -> dict:
    """Tree of ShapeDtypeStruct, keyed as the weights are."""
    return nnx.to_pure_dict(_abstract(config)[1])


def shardings(config: ModelConfig, mesh: Mesh) -> dict:
    """Tree of NamedSharding. A dim that its mesh axes do not divide is refused when the run is resolved or placed."""

    def of(param: nnx.Variable) -> NamedSharding:
        return sharding(mesh, param.get_metadata()["out_sharding"])

    axes = jax.tree.map(of, _abstract(config)[1], is_leaf=lambda node: isinstance(node, nnx.Variable))
    return nnx.to_pure_dict(axes)


def init(config: ModelConfig, mesh: Mesh, seed: int) -> dict:
    """Initial weights, made where they lie; the same on every mesh."""
    make = lambda key: nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(key))))
    # a program that runs once: LLVM's optimisations would take longer than they save
    options = {"xla_backend_optimization_level": 0} if mesh.devices.flat[0].platform == "cpu" else {}
    return jax.jit(make, out_shardings=shardings(config, mesh), compiler_options=options)(jax.random.key(seed))


def forward(
    config: ModelConfig,
    params: dict,
    batch,
    switches: Switches = Switches(),
    *,
    control: dict | None = None,
    past: Past | None = None,
    below: Below | None = None,
) -> Output:
    """Hidden states of a batch. Call inside jit, with the mesh set by jax.set_mesh.

    Args:
      params: tree of weights as `shapes` describes.
      batch: has tokens_BL, positions_BL and segments.
      switches: what else to compute.
      control: what layers are told besides the batch, keyed like the aux tree (see Context).
      past: what an earlier batch left, of switches.past_keys keys; None: every row begins anew.
      below: what the first stages make of this very batch with these very weights (`lower`); it is taken as it is, and their layers
        report nothing. Gradients are as if it had been computed here: backward runs these stages anew if someone asks for theirs.
    """
    if past is not None and (switches.past_keys is None or below is not None):
        raise ValueError(
            f"forward: a past needs switches.past_keys, the number of its keys (it is {switches.past_keys}), and what the first stages make "
            f"of a batch (below is {'given' if below is not None else 'None'}) is that of rows that begin anew. Give one of the two."
        )
    model = _model(config, params)
    before = None if past is None else pasts.before(past, batch, num_keys=switches.past_keys or 0)
    context = Context(
        segments=batch.segments,
        positions_BL=batch.positions_BL,
        switches=switches,
        control=control,
        before=before,
        past=past and past.layers,
    )
    if below is not None:
        rebuild = functools.partial(lower, config, batch=batch, num_stages=below.num_stages, switches=switches, control=control)
        below = below._replace(carry=cached(lambda params: rebuild(params))(below.carry, (params,)))
    hidden_BLD, aux = model(batch.tokens_BL, context, below)
    aux, layers = pasts.split(aux)
    left = None if switches.past_keys is None else pasts.left(batch, layers, before)
    return Output(hidden_BLD, model.unembed_DV(), aux, left, config.logit_cap, config.tie_embeddings)


def lower(
    config: ModelConfig, params: dict, batch, *, num_stages: int, switches: Switches = Switches(), control: dict | None = None
) -> dict:
    """What flows out of the first stages of the model, rows that begin anew: the carry of a Below."""
    context = Context(segments=batch.segments, positions_BL=batch.positions_BL, switches=switches, control=control)
    model = _model(config, params)
    return model.advance(model.begin(batch.tokens_BL), context, stages(config)[:num_stages])[0]


def num_frozen(config: ModelConfig, trainable: dict) -> int:
    """Stages of the model below the first weight that learns; 0 if the embedding does.

    Args:
      trainable: bools keyed like the weights.
    """
    if any(jax.tree.leaves(trainable["embed"])):
        return 0
    of = lambda section, place: trainable[section][place] if place else trainable[section]
    learns = [any(jax.tree.leaves(of(*stage))) for stage in stages(config)]
    return learns.index(True) if True in learns else len(learns)


def _model(config: ModelConfig, params: dict) -> Transformer:
    graph, abstract = _abstract(config)
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def cross_entropy_sums(
    output: Output,
    batch,
    *,
    z_coef: float = 0.0,
    chunk_tokens: int = 0,
    chunk_vocab: int = 0,
    gradients: Literal["forward", "recompute"] = "forward",
    kernel: Literal["xla", "triton_gpu"] = "xla",
) -> CrossEntropy:
    """Sums of the next-token loss over a batch.

    Each device sums its own rows. The output projection lies where its weight does, and its pieces are gathered where they are used.
    """
    loss = functools.partial(
        cross_entropy,
        z_coef=z_coef,
        logit_cap=output.logit_cap,
        tied=output.tied,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
        gradients=gradients,
        implementation=kernel,
    )

    arrays = (output.hidden_BLD, output.unembed_DV, batch.targets_BL, batch.weights_BL)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or mesh.manual_axes:
        return loss(*arrays)
    width_axes = RULES["embed"]
    others = tuple(axis for axis in TOKENS if axis not in width_axes)
    local = lambda *arrays: jax.lax.psum(loss(*arrays, width_axes=width_axes), others)
    specs = (ROWS, spec(("embed", "vocab")), ROWS, ROWS)
    return jax.shard_map(local, in_specs=specs, out_specs=P(), check_vma=False)(*arrays)


def logits(config: ModelConfig, params: dict, batch, *, control: dict | None = None):
    """Logits [B, L, V] in float32 (float64 for a float64 model); `control` as in `forward`."""
    output = forward(config, params, batch, control=control)
    weight_DV = output.unembed_DV.astype(output.hidden_BLD.dtype)
    return product(output.hidden_BLD, weight_DV, logit_cap=output.logit_cap)
