"""Assembly of an engine from its configuration."""

from __future__ import annotations

import dataclasses
import re
import types

import legato_tiny
import msgspec
import numpy as np
import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core import assembly
from legato_engine.errors import InvalidField
from legato_engine.kernels.cpu.library import library
from legato_engine.models.moondream import family, presets
from legato_engine.models.moondream.preprocess import CroppedImage, WholeImage
from legato_engine.models.moondream.weights import random_weights
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.types import ImageInfo
from safetensors.torch import save_file

CONFIG = EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=1)
INFO = ImageInfo(image_id="img", width=300, height=200, cache_hit=False)


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
        ({"kv_dtype": "f32"}, "unknown kv_dtype 'f32'; use auto, model or fp8"),
        (
            {"weight_dtype": "fp9"},
            "unknown weight_dtype 'fp9'; use auto, model, packed, fp8, int8 or int4",
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
