"""Folders of safetensors: what is read, from which files, and what is refused by name."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import moejax
from moejax.hf.families import CheckpointError

MODELS = pathlib.Path(__file__).parent.parent / "golden" / "models"


def copy(family: str, folder: pathlib.Path, change=lambda tensors: tensors) -> pathlib.Path:
    """A golden checkpoint in `folder`, its tensors changed."""
    shutil.copy(MODELS / family / "config.json", folder)
    save_file(change(load_file(MODELS / family / "model.safetensors")), folder / "model.safetensors")
    return folder


def write_raw(path: pathlib.Path, name: str, dtype: str, array: np.ndarray) -> None:
    """A safetensors file of one tensor of any dtype, as its format has it: length of the header, header, bytes."""
    header = json.dumps({name: {"dtype": dtype, "shape": array.shape, "data_offsets": [0, array.nbytes]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + array.tobytes())


def equal(ours: dict, theirs: dict) -> bool:
    """Same keys, same bits."""
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "F8_E4M3", "FP8 weights"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "F32", "FP8 weights"),
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight_packed", "U8", "MXFP4 blocks"),
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight_scale", "U8", "MXFP4 blocks"),
        ("model.layers.2.self_attn.q_proj.weight", "F32", "multi-token-prediction (MTP) layers"),
        ("mtp.layers.0.self_attn.q_proj.weight", "F32", "multi-token-prediction (MTP) layers"),
        ("model.layers.0.self_attn.q_proj.weight_index", "U8", "dtype U8"),
    ],
)
def test_a_kind_of_tensor_that_is_not_read_is_refused_by_name(name, dtype, kind, tmp_path):
    copy("mixtral", tmp_path)
    write_raw(tmp_path / "more.safetensors", name, dtype, np.zeros(4, np.float32 if dtype == "F32" else np.uint8))
    places = dict.fromkeys(load_file(tmp_path / "model.safetensors"), "model.safetensors") | {name: "more.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError) as refused:
        moejax.load_hf(tmp_path)
    assert kind in str(refused.value) and name in str(refused.value)


def test_missing_and_unknown_keys_are_listed(tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.bias"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
        del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
        return tensors

    with pytest.raises(CheckpointError) as refused:
        moejax.load_hf(copy("mixtral", tmp_path, change))
    assert (
        "2 missing keys: model.layers.0.self_attn.q_proj.weight, model.layers.1.block_sparse_moe.experts.3.w2.weight; "
        "1 unknown keys: model.layers.0.self_attn.bias"
    ) in str(refused.value)


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path):
    key = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{key} has shape \(32, 16\), expected \(16, 32\)"):
        moejax.load_hf(copy("mixtral", tmp_path, lambda tensors: tensors | {key: np.ascontiguousarray(tensors[key].T)}))


def test_files_named_by_an_index_are_read(tmp_path):
    shutil.copy(MODELS / "mixtral" / "config.json", tmp_path)
    tensors = load_file(MODELS / "mixtral" / "model.safetensors")
    places = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(tensors)}
    for name in set(places.values()):
        save_file({key: tensor for key, tensor in tensors.items() if places[key] == name}, tmp_path / name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({"left.over": np.zeros(1, np.float32)}, tmp_path / "not-in-the-index.safetensors")
    model = moejax.load_hf(tmp_path)
    assert equal(model.to_hf(model.params), tensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        moejax.load_hf(tmp_path)


def test_another_file_with_the_same_keys_is_never_read(tmp_path):
    copy("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({key: tensor + 1 for key, tensor in tensors.items()}, tmp_path / "optimizer.safetensors")
    model = moejax.load_hf(tmp_path)
    assert equal(model.to_hf(model.params), tensors)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing.*Files of that kind there: optimizer\.safetensors"):
        moejax.load_hf(tmp_path)


def test_damaged_files_are_named(tmp_path):
    copy("mixtral", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is no whole safetensors file"):
        moejax.load_hf(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: is no json"):
        moejax.load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: is no json"):
        moejax.load_hf(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    shutil.copy(MODELS / "mixtral" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing.*there: none"):
        moejax.load_hf(tmp_path)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_become_float32_masters(dtype, tmp_path):
    narrow = lambda tensors: {key: tensor.astype(dtype) for key, tensor in tensors.items()}
    model = moejax.load_hf(copy("mixtral", tmp_path, narrow))
    assert model.params["embed"]["weight_VD"].dtype == "float32"
    assert equal(
        model.to_hf(model.params), {key: tensor.astype(np.float32) for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    )


def test_float64_without_x64_is_refused():
    with pytest.raises(ValueError, match="jax_enable_x64"):
        moejax.load_hf(MODELS / "mixtral", dtype="float64")
