"""Files and sizes that no engine can serve are refused with one sentence."""

import json
import shutil

import legato_tiny
import pytest
import safetensors.torch
import torch
from legato_engine.config import EngineConfig
from legato_engine.engine.loading import assemble
from legato_engine.engine.unservable import UnservableConfig, unservable
from legato_engine.errors import InvalidField


def refused(**settings):
    """The sentence, and the field, of what cannot be served."""
    with pytest.raises(UnservableConfig) as caught, unservable():
        assemble(EngineConfig(device="cpu", threads=1, **settings))
    assert isinstance(caught.value.cause, InvalidField)
    return str(caught.value), caught.value.cause.metadata["field"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no json", "is not JSON"),
        ("[]", "is not a byte-level tokenizer"),
        ('{"decoder": {"type": "ByteLevel"}}', "is not a tokenizer: "),
        ('{"decoder": {"type": "ByteLevel"}, "added_tokens": [{}]}', "is not a tokenizer: "),
    ],
)
def test_a_bad_tokenizer(tmp_path, content, reason):
    """The sentence names the file."""
    path = tmp_path / "bad.json"
    path.write_text(content)
    said, field = refused(tokenizer=str(path))
    assert f"{path} {reason}" in said
    assert field == "tokenizer"


def test_a_tokenizer_of_a_larger_vocabulary(tmp_path):
    """Its ids would have no embedding."""
    data = json.loads((legato_tiny.path() / "tokenizer.json").read_text())
    added = {"id": 100_000, "content": "<far>", "special": True}
    data["added_tokens"].append({**data["added_tokens"][0], **added})
    data["model"]["vocab"]["<far>"] = 100_000
    path = tmp_path / "large.json"
    path.write_text(json.dumps(data))
    said, field = refused(tokenizer=str(path))
    assert "the model's vocabulary ends before" in said
    assert field == "tokenizer"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(tmp_path, number):
    """The sentence names the tensor and the file."""
    folder = tmp_path / "damaged"
    shutil.copytree(legato_tiny.path(), folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    name = max(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[0] = number
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    said, field = refused(weights=str(folder))
    assert f"{name} in {folder / 'model.safetensors'}" in said
    assert field == "weights"


def test_more_cache_than_memory():
    """The sentence says how much is needed and how much there is."""
    said, field = refused(max_running=50_000_000)
    assert "the KV cache needs" in said
    assert "GiB are free" in said
    assert field == "max_running"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_memory_that_runs_out(error):
    """Whatever asks for it, and on whatever device."""
    with pytest.raises(UnservableConfig, match="memory ran out"), unservable():
        raise error


def test_other_errors_are_not_the_configurations():
    """A restart may help."""
    with pytest.raises(RuntimeError, match="device fault"), unservable():
        raise RuntimeError("device fault")
