"""Models of the Hugging Face hub: read, run, differentiate, and name the weights as the hub does."""

import dataclasses
import functools
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from moejax.config.model import Dtype, ModelConfig
from moejax.data.batch import Batch
from moejax.hf.families import FAMILIES, CheckpointError, Fields
from moejax.hf.files import TensorFiles, compare_keys, read_json
from moejax.hf.names import Entry, entries
from moejax.model import language_model
from moejax.parallel.axes import ROWS, TOKENS
from moejax.parallel.mesh import complete, one_device_mesh

log = logging.getLogger("moejax")
PREFIXES = (("model.", ""), ("model.language_model.", ""), ("language_model.model.", "language_model."))
"""What stands before embed_tokens, and before lm_head."""


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A language model with the hub's names at hand."""

    config: ModelConfig
    params: dict
    mesh: Mesh
    entries: tuple[Entry, ...] = dataclasses.field(repr=False)
    keys: tuple[str, ...] = dataclasses.field(repr=False)
    """Name of each entry: the file's."""
    hub_shapes: tuple[tuple[int, ...], ...] = dataclasses.field(repr=False)

    def __call__(self, tokens_BL, segment_ids=None):
        """Logits [B, L, V], float32 (float64 for a float64 model).

        Args:
          tokens_BL: integers.
          segment_ids: None (one document per row) or integers [B, L] as Segments.build takes them.
        """
        batch, rows = self._batch(tokens_BL, segment_ids)
        with jax.set_mesh(self.mesh):
            return _logits(self.config, self.params, batch)[:rows]

    def loss_and_grads(self, tokens_BL, segment_ids=None) -> tuple[Any, dict]:
        """Mean next-token cross-entropy over all pairs inside documents, in nats, and its gradients, keyed like `params`."""
        batch, _ = self._batch(tokens_BL, segment_ids)
        with jax.set_mesh(self.mesh):
            return _loss_and_grads(self.config, self.params, batch)

    def to_hf(self, tree: dict) -> dict[str, np.ndarray]:
        """The hub's key -> array, for weights or gradients, under the names and in the layout that the file had."""
        host: dict[tuple[str, ...], np.ndarray] = {}
        out = {}
        for entry, key, shape in zip(self.entries, self.keys, self.hub_shapes, strict=True):
            if entry.path not in host:
                host[entry.path] = np.asarray(jax.device_get(functools.reduce(lambda node, name: node[name], entry.path, tree)))
            out[key] = entry.layout.to_hub(host[entry.path][entry.index], shape)
        return out

    def _batch(self, tokens_BL, segment_ids) -> tuple[Batch, int]:
        """The batch on the mesh, its rows padded to a multiple of the token shards, and the rows that were given."""
        tokens_BL = np.asarray(tokens_BL)
        ids_BL = np.zeros(tokens_BL.shape, np.int32) if segment_ids is None else np.asarray(segment_ids)
        shards = int(np.prod([self.mesh.shape[axis] for axis in TOKENS]))
        extra = -tokens_BL.shape[0] % shards
        pad = lambda array, value: np.pad(array, ((0, extra), (0, 0)), constant_values=value)
        batch = Batch.build(pad(tokens_BL, 0), pad(ids_BL, -1))
        return jax.device_put(batch, NamedSharding(self.mesh, ROWS)), tokens_BL.shape[0]


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, batch):
    return language_model.logits(config, params, batch)


@functools.partial(jax.jit, static_argnums=0)
def _loss_and_grads(config, params, batch):
    def loss(params):
        output = language_model.forward(config, params, batch)
        sums = language_model.cross_entropy_sums(output, batch)
        return sums.loss_sum / jnp.where(sums.weight_sum > 0, sums.weight_sum, 1)

    return jax.value_and_grad(loss)(params)


def load_hf(path, dtype: Dtype = "float32", mesh: Mesh | None = None) -> HubModel:
    """Reads config.json and *.safetensors; every tensor goes from disk to its place on the mesh.

    Args:
      path: folder of the checkpoint.
      dtype: of activations: "float32", "bfloat16" (both with float32 weights), or "float64" (weights too; needs jax_enable_x64).
      mesh: where the weights go, e.g. `jax.make_mesh((2, 4), ("fsdp", "expert"))`; axes it lacks have size 1. None: the first device.

    Raises:
      CheckpointError: an unsupported family or field, tensors of a kind that is not read yet (FP8, MXFP4, MTP), missing or unknown keys,
        or a shape that does not fit.
    """
    folder = pathlib.Path(path)
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError("load_hf: dtype='float64' needs jax.config.update('jax_enable_x64', True) before.")
    config, family = read_config(folder, dtype)
    mesh = one_device_mesh() if mesh is None else complete(mesh)
    files = TensorFiles(folder)
    files.refuse_unreadable(config.num_layers)
    prefix, head_prefix = next((pair for pair in PREFIXES if f"{pair[0]}embed_tokens.weight" in files.keys), PREFIXES[0])
    shapes = language_model.shapes(config)
    leaves = {tuple(step.key for step in steps): leaf for steps, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    found = tuple(entries(config, family, set(leaves), prefix, head_prefix))
    vision = {key for key in files.keys if ".visual." in key or key.startswith("vision_tower.") or "mm_projector" in key}
    if vision:
        log.info("%s: the vision tower's %d tensors are left out", folder, len(vision))
    keys = tuple(compare_keys([entry.keys for entry in found], files.keys, vision, folder))
    params = _read(found, keys, files, shapes, language_model.shardings(config, mesh))
    return HubModel(config, params, mesh, found, keys, tuple(files.shape(key) for key in keys))


def read_config(folder: pathlib.Path, dtype: Dtype = "bfloat16") -> tuple[ModelConfig, str]:
    """Our switches and the family's name, from config.json."""
    source = folder / "config.json"
    if not source.exists():
        raise CheckpointError(f"{folder}: no config.json there.")
    raw = read_json(source)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"{source}: model_type={family!r} is not supported; {', '.join(sorted(FAMILIES))} are.")
    return FAMILIES[family](Fields(raw, str(source)), dtype), family


def _read(found, keys, files: TensorFiles, shapes: dict, shardings: dict) -> dict:
    """Leaf by leaf: each tensor is read once and cut into the shards of this process."""
    sources: dict[tuple[str, ...], list[tuple[Entry, str]]] = {}
    for entry, key in zip(found, keys, strict=True):
        sources.setdefault(entry.path, []).append((entry, key))

    def leaf(steps, shape, sharding):
        return _read_leaf(sources[tuple(step.key for step in steps)], files, shape, sharding)

    return jax.tree_util.tree_map_with_path(leaf, shapes, shardings)


def _read_leaf(parts: list[tuple[Entry, str]], files: TensorFiles, like, sharding):
    places = sharding.addressable_devices_indices_map(like.shape)
    spans = {device: tuple(_span(cut, size) for cut, size in zip(index, like.shape, strict=True)) for device, index in places.items()}
    shards = {span: np.empty([last - first for first, last in span], like.dtype) for span in set(spans.values())}
    for entry, key in parts:
        depth = len(entry.index)
        wanted = [span for span in shards if all(first <= at < last for at, (first, last) in zip(entry.index, span, strict=False))]
        if not wanted:
            continue
        try:
            ours = entry.layout.to_ours(files.read(key), like.shape[depth:])
        except ValueError as error:
            raise CheckpointError(f"{files.folder}: {key} {error}.") from error
        for span in wanted:
            at = tuple(i - first for i, (first, _) in zip(entry.index, span, strict=False))
            shards[span][at] = ours[tuple(slice(first, last) for first, last in span[depth:])]
    arrays = [jax.device_put(shards[span], device) for device, span in spans.items()]
    return jax.make_array_from_single_device_arrays(like.shape, sharding, arrays)


def _span(cut: slice, size: int) -> tuple[int, int]:
    first, last, _ = cut.indices(size)
    return first, last
