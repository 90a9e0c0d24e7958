"""The refiner's file is read strictly."""

import msgspec
import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.models.moondream.presets import tiny_random3_config
from legato_engine.models.moondream.refiner import load_head
from safetensors.torch import save_file

from tests.engine.models.moondream.outlines.heads import random_head

CONFIG = tiny_random3_config()
LIKE = torch.zeros(1)


@pytest.fixture
def state():
    """A head's tensors."""
    return dict(random_head(CONFIG, dim=64).state_dict())


def load(path, like=LIKE):
    """The head in a file."""
    return load_head(path, CONFIG.vision, like)


def problem(path):
    """The error about a file."""
    with pytest.raises(InvalidField) as caught:
        load(path)
    assert caught.value.metadata["field"] == "refiner"
    assert path.name in str(caught.value)
    return str(caught.value)


def saved(path, content):
    """The file, of either kind."""
    if path.suffix == ".pt":
        torch.save(content, path)
    else:
        save_file(content, path)
    return path


@pytest.mark.parametrize("name", ["head.pt", "head.safetensors", "nested.pt"])
def test_every_tensor_is_read_from_every_kind_of_file(tmp_path, state, name):
    """A dict, a dict with `head`, or safetensors; the file determines the width."""
    content = {"head": state, "step": 7} if name == "nested.pt" else state
    head = load(saved(tmp_path / name, content))
    assert head.image_pe.shape[1] == 64
    assert head.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in head.state_dict().items())
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_tensors_take_the_models_dtype(tmp_path, state):
    """Whatever dtype they are stored in."""
    head = load(saved(tmp_path / "head.pt", state), LIKE.bfloat16())
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}


def test_what_is_missing_unknown_or_misshapen_is_named(tmp_path, state):
    """Each has its own line, an unknown one with the nearest expected name."""
    del state["final_norm.bias"]
    state["final_nrom.bias"] = torch.zeros(64)
    state["iou_head.0.weight"] = torch.zeros(64, 63)
    said = problem(saved(tmp_path / "head.pt", state))
    assert "final_norm.bias" in said
    assert "final_nrom.bias: unknown, the nearest expected name is final_norm.bias" in said
    assert "iou_head.0.weight: shape [64, 63], expected [64, 64]" in said
    assert "3 tensors" in said


def test_a_head_for_another_vision_encoder_is_refused(tmp_path):
    """Its shapes do not fit this vision encoder."""
    vision = msgspec.structs.replace(CONFIG.vision, dim=96)
    state = random_head(msgspec.structs.replace(CONFIG, vision=vision)).state_dict()
    said = problem(saved(tmp_path / "head.pt", dict(state)))
    assert "image_proj.weight: shape [32, 96, 1, 1], expected [32, 48, 1, 1]" in said


@pytest.mark.parametrize("dim", [0, 48])
def test_a_width_that_no_head_has_is_refused(tmp_path, state, dim):
    """Its norms have 32 groups."""
    state["mask_tokens"] = torch.zeros(4, dim)
    assert f"has a width of {dim}" in problem(saved(tmp_path / "head.pt", state))


@pytest.mark.parametrize("content", [[1, 2], {"head": {"a": 1}}, {"a": {"b": torch.zeros(1)}}])
def test_what_is_no_dict_of_tensors_is_refused(tmp_path, content):
    """Nothing else in a file is read."""
    assert "no dict of tensors" in problem(saved(tmp_path / "head.pt", content))


@pytest.mark.parametrize("name", ["head.pt", "head.safetensors"])
def test_what_cannot_be_read_is_said(tmp_path, name):
    """A missing file and a file of noise are errors."""
    path = tmp_path / name
    assert "cannot be read" in problem(path)
    path.write_bytes(b"noise" * 100)
    assert "cannot be read" in problem(path)
