"""Weights come back under the names and in the layout of the file, bit for bit, from one device and from eight."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import moejax
from moejax.hf.families import CheckpointError
from moejax.parallel.mesh import mesh_from

MODELS = pathlib.Path(__file__).parent.parent / "golden" / "models"
FAMILIES = sorted(folder.name for folder in MODELS.iterdir() if folder.is_dir())


def text(tensors: dict) -> dict:
    """Without the vision tower, which is not read."""
    return {key: tensor for key, tensor in tensors.items() if ".visual." not in key}


def changed(family: str, folder: pathlib.Path, change) -> pathlib.Path:
    """A golden checkpoint in `folder`, its tensors changed."""
    shutil.copy(MODELS / family / "config.json", folder)
    save_file(change(load_file(MODELS / family / "model.safetensors")), folder / "model.safetensors")
    return folder


def assert_equal(ours: dict, theirs: dict) -> None:
    """Same keys, shapes and bits."""
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype, key
        np.testing.assert_array_equal(ours[key], tensor, err_msg=key, strict=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_exported_from_eight_devices_equal_the_file_bit_for_bit(family, tmp_path):
    model = moejax.load_hf(MODELS / family, mesh=mesh_from(fsdp=2, expert=4))
    save_file(model.to_hf(model.params), tmp_path / "model.safetensors")
    assert_equal(load_file(tmp_path / "model.safetensors"), text(load_file(MODELS / family / "model.safetensors")))


@pytest.mark.parametrize("family", ["glm5_next_text", "mixtral"])
def test_reading_onto_eight_devices_equals_reading_onto_one(family):
    one, eight = moejax.load_hf(MODELS / family), moejax.load_hf(MODELS / family, mesh=mesh_from(fsdp=2, expert=4))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one.params), jax.device_get(eight.params))


def test_each_device_holds_its_experts_and_its_shard_alone():
    params = moejax.load_hf(MODELS / "mixtral", mesh=mesh_from(fsdp=2, expert=4)).params
    gate_EDF = params["unit"]["0"]["feed_forward"]["experts"]["gate_EDF"]  # 2 layers, 8 experts, width 32
    layers, experts, width, hidden = gate_EDF.shape
    assert {shard.data.shape for shard in gate_EDF.addressable_shards} == {(layers, experts // 4, width // 2, hidden)}
    assert {shard.data.shape for shard in params["embed"]["weight_VD"].addressable_shards} == {(96, width // 8)}


def pad_heads(tensors: dict) -> dict:
    """Kimi K3's A_log as its files have it: 128 entries, zeros behind the heads."""
    pad = lambda key, tensor: np.pad(tensor, (0, 128 - tensor.size)) if key.endswith("A_log") else tensor
    return {key: pad(key, tensor) for key, tensor in tensors.items()}


def test_padded_decays_of_kimi_k3_are_cut_and_written_back_padded(tmp_path):
    model = moejax.load_hf(changed("kimi_k3", tmp_path, pad_heads))
    assert model.params["head"]["0"]["mixer"]["A_log_H"].shape == (3,)
    assert_equal(model.to_hf(model.params), load_file(tmp_path / "model.safetensors"))


def test_padding_that_is_not_zero_is_refused(tmp_path):
    key = "model.layers.0.self_attn.A_log"
    ones = lambda tensors: tensors | {key: np.ones(128, np.float32)}
    with pytest.raises(CheckpointError, match=f"{key} has 128 entries where 3 are expected, and the rest is not zero padding"):
        moejax.load_hf(changed("kimi_k3", tmp_path, ones))


@pytest.mark.parametrize("name", ["mlp", "block_sparse_moe"])
def test_the_dense_layer_of_kimi_linear_is_found_under_both_names(name, tmp_path):
    dense = "model.layers.0.block_sparse_moe."
    rename = lambda tensors: {key.replace(dense, f"model.layers.0.{name}."): tensor for key, tensor in tensors.items()}
    model = moejax.load_hf(changed("kimi_linear", tmp_path, rename))
    assert f"model.layers.0.{name}.gate_proj.weight" in model.keys
    assert_equal(model.to_hf(model.params), load_file(tmp_path / "model.safetensors"))


def test_multimodal_files_have_their_own_prefix(tmp_path):
    nested = lambda tensors: {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    model = moejax.load_hf(changed("kimi_k3", tmp_path, nested))
    assert_equal(model.to_hf(model.params), load_file(tmp_path / "model.safetensors"))


def test_a_tied_model_has_no_output_projection(tmp_path):
    folder = changed("mixtral", tmp_path, lambda tensors: {key: tensor for key, tensor in tensors.items() if key != "lm_head.weight"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    model = moejax.load_hf(folder)
    assert "unembed" not in model.params
    assert_equal(model.to_hf(model.params), load_file(folder / "model.safetensors"))
