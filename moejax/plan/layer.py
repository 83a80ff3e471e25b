"""One mixture-of-experts layer, forward and backward, compiled for GPUs that are not there."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from moejax_kernels.segments import Segments

from moejax.config.model import ModelConfig
from moejax.model.context import Context, Switches
from moejax.model.feed_forward import MixtureOfExperts
from moejax.parallel.axes import ROWS, sharding


def lower_moe_layer(config: ModelConfig, mesh: Mesh, *, tokens_per_device: int) -> jax.stages.Lowered:
    """Value and gradients (rows, and all weights) of a model's mixture of experts, one sequence on each device.

    Results are the layer's output, its reports, and the gradients; the cotangent of the output is an argument.
    """
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # flax would check logical axes against a mesh that is set
        graph, abstract = nnx.split(nnx.eval_shape(lambda: MixtureOfExperts(config, rngs=nnx.Rngs(0))))
    is_param = lambda node: isinstance(node, nnx.Variable)
    axes = jax.tree.map(lambda param: sharding(mesh, param.get_metadata()["out_sharding"]), abstract, is_leaf=is_param)
    shardings, shapes = nnx.to_pure_dict(axes), nnx.to_pure_dict(abstract)
    weights = jax.tree.map(lambda like, where: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=where), shapes, shardings)
    rows, dtype = NamedSharding(mesh, ROWS), jnp.dtype(config.precision.compute)
    shape = (mesh.size, tokens_per_device)
    x_BLD = jax.ShapeDtypeStruct((*shape, config.width), dtype, sharding=rows)
    ids_BL = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)

    def both_ways(weights, x_BLD, dy_BLD, ids_BL):
        nothing_BL = jnp.zeros_like(ids_BL)
        segments = Segments(ids_BL, nothing_BL, nothing_BL, nothing_BL, nothing_BL, nothing_BL[:, 0])  # a layer looks at the ids alone
        context = Context(segments=segments, positions_BL=None, switches=Switches(training=True))

        def layer(weights, x_BLD):
            state = jax.tree.map(lambda leaf: leaf, abstract)
            nnx.replace_by_pure_dict(state, weights)
            return nnx.merge(graph, state)(x_BLD, context)

        y_BLD, pull, report = jax.vjp(layer, weights, x_BLD, has_aux=True)
        return y_BLD, report, pull(dy_BLD)

    outputs = (rows, None, (shardings, rows))
    with jax.set_mesh(mesh):
        return jax.jit(both_ways, out_shardings=outputs).lower(weights, x_BLD, x_BLD, ids_BL)
