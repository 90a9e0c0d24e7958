"""Checkpoints load to the bit, or not at all."""

from __future__ import annotations

import json

import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.models.moondream.weights import load_weights, random_weights
from safetensors.torch import save_file

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tensors(tiny_config):
    """A checkpoint's tensors by plain name."""
    state = random_weights(tiny_config, 3, CPU, torch.float32).state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def load(config, path, dtype=torch.float32):
    """The loaded tensors by name."""
    return load_weights(config, path, CPU, dtype).state_dict()


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: f"model.{name}",
        lambda name: "model." + name.replace("text.", "text._orig_mod.", 1),
    ],
)
def test_a_file_loads_under_each_naming(tiny_config, tensors, tmp_path, rename):
    """Prefix and compiler wrappers in names are ignored."""
    path = tmp_path / "weights.safetensors"
    save_file({rename(name): tensor for name, tensor in tensors.items()}, path)
    loaded = load(tiny_config, path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_shards_load_through_their_index(tiny_config, tensors, tmp_path):
    """A folder with an index is read file by file."""
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    loaded = load(tiny_config, tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_weights_take_the_dtype_asked_for(tiny_config, tensors, tmp_path):
    """A float32 file loads as bfloat16, rotary tables apart."""
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load(tiny_config, tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}


def test_every_problem_is_named_at_once(tiny_config, tensors, tmp_path):
    """Missing, unknown and mis-shaped tensors are all in one error, with the nearest right name."""
    bad = dict(tensors)
    del bad["vision.post_ln.bias"]
    bad["text.blocks.0.attn.qvk.weight"] = bad.pop("text.blocks.0.attn.qkv.weight")
    bad["text.wte"] = torch.zeros(3, 64)
    save_file(bad, tmp_path / "model.safetensors")
    with pytest.raises(InvalidField) as caught:
        load(tiny_config, tmp_path)
    lines = caught.value.message.splitlines()
    assert "4 tensors" in lines[0]
    assert "  vision.post_ln.bias: missing, expected [48]" in lines
    assert "  text.blocks.0.attn.qkv.weight: missing, expected [192, 64]" in lines
    nearest = "the nearest expected name is text.blocks.0.attn.qkv.weight"
    assert f"  text.blocks.0.attn.qvk.weight: unknown, {nearest}" in lines
    assert "  text.wte: shape [3, 64], expected [300, 64]" in lines


def test_a_foreign_checkpoint_is_summed_up(tiny_config, tmp_path):
    """Hundreds of problems are counted, not printed."""
    save_file({"encoder.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidField) as caught:
        load(tiny_config, tmp_path)
    assert len(caught.value.message.splitlines()) < 30


def test_missing_and_broken_files_are_refused(tiny_config, tmp_path):
    """No weights, and no safetensors file, are errors that name the place."""
    with pytest.raises(InvalidField, match=tmp_path.name):
        load(tiny_config, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InvalidField, match=r"model\.safetensors"):
        load(tiny_config, tmp_path)


def test_random_weights_follow_their_seed(tiny_config):
    """The same seed gives the same weights, another seed others."""
    first, again, other = (
        random_weights(tiny_config, seed, CPU, torch.float32).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["text.wte"], other["text.wte"])
