"""Assembly of an engine from its configuration, and what no engine can serve."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import types

import legato_tiny
import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from legato_engine.config import EngineConfig
from legato_engine.core import assembly
from legato_engine.core.assembly import assemble
from legato_engine.core.process import UnservableConfig, unservable
from legato_engine.errors import InvalidField
from legato_engine.kernels.cpu.library import library
from legato_engine.models.moondream import family, presets
from legato_engine.models.moondream.preprocess import CroppedImage, WholeImage
from legato_engine.models.moondream.weights import random_weights
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.types import ImageProperties
from safetensors.torch import save_file

from tests.engine.models.gguf import gguf_files

# ---------------------------------------------------------------- loading
# Assembly of an engine from its configuration.

CONFIG = EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=1)
INFO = ImageProperties(image_id="img", width=300, height=200, cache_hit=False)


@pytest.mark.parametrize(("encodes", "kind"), [(None, CroppedImage), (True, WholeImage)])
def test_images_are_left_whole_only_for_a_runner_that_encodes_them(monkeypatch, encodes, kind):
    """The runner decides, not the device."""
    if encodes is not None:
        monkeypatch.setattr(ModelRunner, "encodes_images", encodes)
        monkeypatch.setattr(assembly, "warm_up", lambda frontend, scheduler: None)
    made = assembly.assemble(CONFIG)
    try:
        image = made.frontend.prepare_image(np.zeros((200, 300, 3), np.uint8), "key", INFO)
        assert isinstance(image.pixels, kind)
    finally:
        made.device.close()


def test_a_cpu_has_one_launch_in_flight_and_a_gpu_two():
    """Unless the setting says otherwise."""
    made = assembly.assemble(CONFIG)
    try:
        gpu = dataclasses.replace(
            made, device=types.SimpleNamespace(torch_device=torch.device("cuda"))
        )
        assert (made.pipeline_depth, gpu.pipeline_depth) == (1, 2)
        for depth in (1, 2):
            config = msgspec.structs.replace(CONFIG, pipeline_depth=depth)
            for each in (made, gpu):
                assert dataclasses.replace(each, config=config).pipeline_depth == depth
    finally:
        made.device.close()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dtype": "f16"}, "unknown dtype 'f16'; use auto, f32 or bf16"),
        ({"vision_dtype": "int8"}, "unknown vision_dtype 'int8'; use auto or fp8"),
        ({"jpeg_decoder": "nvjpeg"}, "unknown jpeg_decoder 'nvjpeg'; use cpu or gpu"),
        ({"kv_dtype": "f32"}, "unknown kv_dtype 'f32'; use auto, model or fp8"),
        (
            {"weight_dtype": "fp9"},
            "unknown weight_dtype 'fp9'; use auto, model, packed, fp8, int8, int4 or stored",
        ),
        ({"cpu_kernels": "own"}, "unknown cpu_kernels 'own'; use auto or torch"),
        ({"max_prefill_rows": 33}, "0 to 32"),
        ({"images_per_launch": 0}, "1 to 4"),
        ({"adapter_slots": 0}, "at least 1"),
        ({"max_adapter_rank": 513}, "1 to 512"),
        ({"speculation": "fixed:0"}, "unknown speculation 'fixed:0'"),
    ],
)
def test_settings_for_no_model_are_refused_before_one_is_loaded(settings, told):
    """The error has the name of the setting and its limit."""
    reached: list[str] = []
    config = msgspec.structs.replace(CONFIG, **settings)
    with pytest.raises(InvalidField, match=re.escape(told)) as caught:
        assembly.assemble(config, lambda stage, fraction: reached.append(stage))
    assert caught.value.metadata["field"] in settings
    assert reached == []


def test_a_cpu_has_no_jpeg_decoder_of_a_gpu():
    """The error names the setting and the alternative."""
    config = msgspec.structs.replace(CONFIG, device="cpu", jpeg_decoder="gpu")
    with pytest.raises(InvalidField, match="use jpeg_decoder cpu") as caught:
        assembly.assemble(config)
    assert caught.value.metadata["field"] == "jpeg_decoder"


@pytest.mark.skipif(library("auto") is None, reason="no C++ compiler or no AVX2 here")
@pytest.mark.parametrize(("kernels", "threads"), [("auto", 1), ("torch", 3)])
def test_torch_has_one_thread_beside_the_kernels_own(kernels, threads):
    """Where all layers are Legato's; else it has those of the setting."""
    config = msgspec.structs.replace(CONFIG, threads=3, cpu_kernels=kernels)
    made = assembly.assemble(config)
    found = []
    made.device.compute.submit(lambda: found.append(torch.get_num_threads()))
    made.device.compute.record().wait()
    made.device.close()
    assert found == [threads]


@pytest.mark.parametrize("kind", ["packed", "fp8"])
def test_weights_that_only_gpus_have_are_refused_on_a_cpu(kind):
    """By name of the setting, of the device and of what to use instead."""
    cpu = types.SimpleNamespace(torch_device=torch.device("cpu"), name="cpu")
    with pytest.raises(InvalidField, match=f"{kind} need a GPU, not cpu: use int8") as caught:
        assembly._weight_dtype(EngineConfig(weight_dtype=kind), cpu)
    assert caught.value.metadata["field"] == "weight_dtype"
    assert assembly._weight_dtype(EngineConfig(), cpu) == "auto"


@pytest.mark.parametrize(
    ("weights", "said"), [("", "legato-tiny"), ("a.safetensors", "a.safetensors")]
)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_stored_blocks_are_those_of_a_gguf_file(weights, said, kind):
    """Of another file they are refused with the alternative."""
    device = types.SimpleNamespace(torch_device=torch.device(kind), name=kind)
    said = f"a GGUF file, which {said} is not: use weight_dtype auto"
    with pytest.raises(InvalidField, match=said) as caught:
        assembly._weight_dtype(EngineConfig(weights=weights, weight_dtype="stored"), device)
    assert caught.value.metadata["field"] == "weight_dtype"
    config = EngineConfig(weights="a.gguf", weight_dtype="stored")
    assert assembly._weight_dtype(config, device) == "stored"


def test_the_resident_path_keeps_the_weights_that_its_kernel_reads():
    """One copy of packed weights is not chosen where the path that needs the others is."""
    gpu = types.SimpleNamespace(torch_device=torch.device("cuda"), name="gpu")
    assert assembly._weight_dtype(EngineConfig(decode_path="resident"), gpu) == "model"
    assert assembly._weight_dtype(EngineConfig(), gpu) == "auto"


def test_a_draft_that_cannot_be_read_stops_the_start(tmp_path):
    """A named draft must be readable, unless speculation is off."""
    config = msgspec.structs.replace(CONFIG, draft=str(tmp_path / "absent"))
    assembly.assemble(config).device.close()
    with pytest.raises(InvalidField, match="absent cannot be read"):
        assembly.assemble(msgspec.structs.replace(config, speculation="fixed:2"))


def wide_vocabulary():
    """The tiny model with a vocabulary that holds the other model's tokenizer."""
    config = presets.tiny_random_config()
    text = msgspec.structs.replace(config.text, vocab_size=2048)
    return msgspec.structs.replace(config, text=text)


@pytest.fixture
def moondream2(monkeypatch, tmp_path):
    """A small checkpoint under the name moondream2, with a tokenizer of another model."""
    monkeypatch.setitem(family._NAMES, "moondream2", (wide_vocabulary, family._read_published))
    config = wide_vocabulary()
    state = random_weights(config, 0, torch.device("cpu"), torch.bfloat16).state_dict()
    file = tmp_path / "moondream.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in state.items()}, file)
    return msgspec.structs.replace(
        CONFIG,
        model="moondream2",
        weights=str(file),
        tokenizer=str(legato_tiny.path() / "tokenizer.json"),
    )


@pytest.mark.parametrize(("dtype", "name"), [("f32", "float32"), ("bf16", "bfloat16")])
def test_moondream2_loads_from_files_in_either_dtype(moondream2, dtype, name):
    """A checkpoint, a tokenizer and a dtype make a warm model, and progress rises meanwhile."""
    seen = []
    made = assembly.assemble(
        msgspec.structs.replace(moondream2, dtype=dtype),
        lambda stage, fraction: seen.append((fraction, stage)),
    )
    try:
        assert made.info.dtype == name
        assert made.model.dtype is getattr(torch, name)
    finally:
        made.device.close()
    assert seen == sorted(seen, key=lambda each: each[0])
    of_weights = [fraction for fraction, stage in seen if stage == "weights"]
    assert len(of_weights) > 20
    assert of_weights[0] == 0.1
    assert of_weights[-1] == pytest.approx(0.7)
    assert seen[-1] == (1.0, "ready")


def test_weights_that_do_not_fit_the_memory_are_refused(moondream2, monkeypatch):
    """The device's free memory is checked before the first weight is allocated."""
    monkeypatch.setattr(assembly, "available_memory", lambda: 1000)
    with pytest.raises(InvalidField, match="free on cpu") as caught:
        assembly.assemble(moondream2)
    assert caught.value.metadata["free_bytes"] == "1000"


# ---------------------------------------------------------------- what no engine can serve


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
