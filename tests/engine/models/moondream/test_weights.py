"""Moondream's checkpoints and random weights."""

from __future__ import annotations

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


def test_weights_take_the_dtype_asked_for(tiny_config, tensors, tmp_path):
    """A float32 file loads completely as bfloat16."""
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load(tiny_config, tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}


def test_a_wrong_name_is_answered_with_the_right_one(tiny_config, tensors, tmp_path):
    """Problems are reported in the names of the published checkpoints."""
    bad = {f"model.{name}": tensor for name, tensor in tensors.items()}
    bad["model.text.blocks.0.attn.qvk.weight"] = bad.pop("model.text.blocks.0.attn.qkv.weight")
    save_file(bad, tmp_path / "model.safetensors")
    with pytest.raises(InvalidField) as caught:
        load(tiny_config, tmp_path)
    assert caught.value.message.splitlines()[1:] == [
        "  text.blocks.0.attn.qkv.weight: missing, expected [192, 64]",
        "  text.blocks.0.attn.qvk.weight: unknown, "
        "the nearest expected name is text.blocks.0.attn.qkv.weight",
    ]


def test_random_weights_follow_their_seed(tiny_config):
    """The same seed gives the same weights, another seed others."""
    first, again, other = (
        random_weights(tiny_config, seed, CPU, torch.float32).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["text.wte"], other["text.wte"])
