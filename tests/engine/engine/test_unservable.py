"""Files and sizes that no engine can serve are refused with one sentence."""

import json
import shutil

import legato_tiny
import pytest
import safetensors.torch
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.core.process import UnservableConfig, unservable
from legato_engine.errors import InvalidField

from tests.engine.models.gguf import gguf_files


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


@pytest.mark.parametrize(
    ("fields", "reason", "named"),
    [
        ({"tokenizer.ggml.merges": ["no pair"]}, "the tokenizer of model.gguf cannot be read", 0),
        ({"tokenizer.ggml.merges": [1, 2]}, "the tokenizer of model.gguf cannot be read", 0),
        ({"tokenizer.ggml.token_type": [1]}, "the tokenizer of model.gguf cannot be read", 0),
        ({"tokenizer.ggml.tokens": [7, 8]}, "the tokenizer of model.gguf cannot be read", 0),
        ({"tokenizer.ggml.tokens": ["a" * 5000, "b"]}, "a token of 5000 characters", 0),
        ({"tokenizer.ggml.eos_token_id": 1 << 30}, "eos_token_id is 1073741824, no token's id", 0),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id is 'x', no token's id", 0),
        ({"llama.block_count": 1000}, "has 11 tensors, too few for 1000 layers", 1),
        ({"llama.block_count": 1 << 31}, "num_hidden_layers is 2147483648, not a whole number", 1),
        ({"llama.attention.head_count": 0}, "num_attention_heads is 0, not a whole number", 1),
        ({"llama.embedding_length": 1 << 31}, "hidden_size is 2147483648, not a whole number", 1),
        ({"llama.context_length": "long"}, "llama.context_length is no number", 1),
        ({"llama.rope.freq_base": float("nan")}, "rope_theta is nan, not a positive number", 1),
        ({"split.count": "x"}, "is one of x files", 1),
    ],
)
def test_a_damaged_gguf(tmp_path, fields, reason, named):
    """Metadata of any type and size; no module is built for layers that are not there."""
    path = tmp_path / "model.gguf"
    gguf_files.write_small(path, fields)
    said, field = refused(weights=str(path))
    assert reason in said
    assert "\n" not in said
    assert field == ("tokenizer", "weights")[named]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", b"[" * 100_000, "config.json: "),
        ("config.json", b"\xff", "config.json: "),
        ("config.json", {"text.num_layers": 1 << 40}, "`int` <= 16777216"),
        ("config.json", {"text.num_layers": 100_000}, "too few for 10000"),
        ("config.json", {"text.num_heads": 0}, "`int` >= 1"),
        ("config.json", {"tokens.eos": 1 << 20}, "1048576 is no id of a vocabulary of"),
        ("model.safetensors", b"", "model.safetensors cannot be read"),
        ("model.safetensors", b"\x00" * 64, "model.safetensors cannot be read"),
        ("confidence.json", b"[" * 100_000, "confidence.json"),
    ],
)
def test_damaged_files_of_a_folder(tmp_path, file, content, reason):
    """One sentence that names the file."""
    folder = tmp_path / "damaged"
    shutil.copytree(legato_tiny.path(), folder)
    if isinstance(content, dict):
        config = json.loads((folder / file).read_bytes())
        for name, value in content.items():
            part, _, key = name.partition(".")
            config[part][key] = value
        content = json.dumps(config).encode()
    (folder / file).write_bytes(content)
    said, field = refused(weights=str(folder))
    assert reason in said
    assert field == "weights"


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"\x80\x02K\x01."])
def test_damaged_pickles(tmp_path, content):
    """A .pt file of any content."""
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    tokenizer = str(legato_tiny.path() / "tokenizer.json")
    said, field = refused(model="moondream2", weights=str(path), tokenizer=tokenizer)
    assert "model.pt" in said
    assert "\n" not in said
    assert field == "weights"


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
