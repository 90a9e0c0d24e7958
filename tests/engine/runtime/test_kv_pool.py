"""The size of the KV pool, and an engine with e4m3 keys and values."""

from __future__ import annotations

import os
import types
from pathlib import Path

import msgspec
import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.errors import InvalidField
from legato_engine.models.moondream import family, presets
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.models.moondream.weights import random_weights
from legato_engine.runtime import kv_pool
from legato_engine.runtime.kv_pool import allocate, decode_buckets, num_pages_for, token_bytes
from safetensors.torch import save_file

from benchmarks.speculation.run import with_settings
from tests.engine.core.test_memory import Alone, run_all, shared
from tests.engine.models.moondream.published import layout_b


def device(kind):
    """A stand-in device with what sizes depend on."""
    return types.SimpleNamespace(torch_device=torch.device(kind))


@pytest.mark.parametrize(
    ("kind", "most", "sizes"),
    [
        ("cpu", 6, (1, 2, 4, 6)),
        ("cpu", 48, (1, 2, 4, 8, 16, 32, 48)),
        ("cuda", 2, (1, 2, 4, 8, 16, 24, 32)),
        ("cuda", 160, (1, 2, 4, 8, 16, 24, 32, 64, 128, 160)),
    ],
)
def test_batches_double_up_to_the_most(kind, most, sizes):
    """A GPU has all sizes that a prompt may need, and one for questions between the last two."""
    assert decode_buckets(device(kind), most) == sizes


def moondream3(scale_L2=None):
    """A stand-in model: 192 KiB a position in bfloat16."""
    return types.SimpleNamespace(
        num_layers=24,
        num_kv_heads=32,
        head_dim=64,
        max_context=32768,
        dtype=torch.bfloat16,
        kv_scale_L2=scale_L2,
    )


def test_a_token_takes_its_layers_keys_and_values():
    """A position of Moondream 3 has the right size in either dtype."""
    assert token_bytes(moondream3()) == 192 * 1024
    assert token_bytes(moondream3(torch.ones(24, 2))) == 96 * 1024


def test_e4m3_has_twice_the_pages():
    """A page of 16 positions takes 3 MiB of a GPU's free memory, or half of that in e4m3."""
    gpu = types.SimpleNamespace(name="gpu", free_memory=lambda: 40 * 2**30)
    assert num_pages_for(moondream3(), gpu, 16, 4, 0.5) == 20 * 2**30 // (3 * 2**20)
    assert num_pages_for(moondream3(torch.ones(24, 2)), gpu, 16, 4, 0.5) == 20 * 2**30 * 2 // (
        3 * 2**20
    )


def test_a_context_that_only_e4m3_has_room_for():
    """If one context does not fit in the model's dtype, only scales let the engine start."""
    gpu = types.SimpleNamespace(name="gpu", free_memory=lambda: 4 * 2**30)
    with pytest.raises(InvalidField, match="one full context needs 2049"):
        num_pages_for(moondream3(), gpu, 16, 1, 1.0)
    assert num_pages_for(moondream3(torch.ones(24, 2)), gpu, 16, 1, 1.0) > 2048


def test_features_of_images_are_left_room():
    """The pool gets its fraction of what they leave, and an error counts them."""
    gpu = types.SimpleNamespace(name="gpu", free_memory=lambda: 40 * 2**30)
    assert num_pages_for(moondream3(), gpu, 16, 4, 0.5, 10 * 2**30) == 15 * 2**30 // (3 * 2**20)
    with pytest.raises(InvalidField, match=r"0 pages of KV cache beside 41\.0 GiB of image feat"):
        num_pages_for(moondream3(), gpu, 16, 4, 0.5, 41 * 2**30)


def small(max_context=4096):
    """A stand-in model of 128 KiB a position in float32."""
    return types.SimpleNamespace(
        num_layers=16,
        num_kv_heads=8,
        head_dim=128,
        max_context=max_context,
        dtype=torch.float32,
        kv_scale_L2=None,
    )


def cpu():
    """A stand-in CPU."""
    return types.SimpleNamespace(
        name="cpu", free_memory=lambda: None, torch_device=torch.device("cpu")
    )


def test_a_cpus_pool_is_bounded_by_its_free_memory(monkeypatch):
    """By the share that is allowed, and by full contexts for all running sequences."""
    monkeypatch.setattr(kv_pool, "available_memory", lambda: 2 * 2**30)
    assert num_pages_for(small(), cpu(), 16, 16, 0.5) == 2**30 // (16 * token_bytes(small()))
    assert num_pages_for(small(64), cpu(), 16, 16, 0.5) == (16 + 8) * 4 + 1
    with pytest.raises(InvalidField, match="one full context needs 257"):
        num_pages_for(small(), cpu(), 16, 16, 0.2)


def test_a_cpus_pages_take_memory_when_they_are_used():
    """A pool of 2 GiB takes next to nothing, and one page about its own size in each layer."""
    before = _resident()
    kv = allocate(small(), cpu(), 1024, 16)
    assert kv.k_LNHSE.nbytes + kv.v_LNHSE.nbytes == 2 * 2**30
    assert _resident() - before < 64 * 2**20
    kv.k_LNHSE[:, 7] = 1.0
    kv.v_LNHSE[:, 7] = 1.0
    assert _resident() - before < 128 * 2**20
    assert not kv.k_LNHSE[:, 8].any()


def _resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- eight bit
# An engine with e4m3 keys and values: half the memory, and batch-invariant bits.

CONFIG = EngineConfig(
    model="moondream3", device="cpu", threads=1, max_running=7, page_size=4, max_prefill_rows=3
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A small checkpoint with scales of keys and values, under the name moondream3."""
    small = presets.tiny_random3_config()
    state = random_weights(small, 0, torch.device("cpu"), torch.float32).state_dict()
    tensors = layout_b(state, small, kv_scales=True)
    for name, tensor in tensors.items():
        if "kv_quantizer" in name:
            tensor.fill_(0.004)
    file = tmp_path_factory.mktemp("weights") / "moondream3.safetensors"
    save_file(tensors, file)

    def read(source, preset):
        """Read it as published weights, with bytes for tokens."""
        return family._bundle(source, preset(), StandInTokenizer(), file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(family._NAMES, "moondream3", (presets.tiny_random3_config, read))
        yield msgspec.structs.replace(CONFIG, weights=str(file))


@pytest.fixture(scope="module")
def assembly(config):
    """One engine for all tests."""
    made = assemble(config)
    yield made
    made.device.close()


def test_scales_in_the_file_quarter_a_pool_of_float32(config, assembly):
    """By default the pool is e4m3; kv_dtype model gives the model's dtype."""
    plain = assemble(msgspec.structs.replace(config, kv_dtype="model"))
    plain.device.close()
    assert assembly.kv.k_LNHSE.dtype is assembly.kv.v_LNHSE.dtype is torch.float8_e4m3fn
    assert plain.kv.k_LNHSE.dtype is torch.float32
    assert plain.kv.k_LNHSE.nbytes == 4 * assembly.kv.k_LNHSE.nbytes
    assert plain.kv.scale_L2 is None
    assert assembly.kv.scale_L2 is assembly.model.kv_scale_L2
    assert assembly.info.kv_dtype == "float8_e4m3fn"
    assert 4 * assembly.info.kv_token_bytes == plain.info.kv_token_bytes
    assert plain.kv.k_LNHSE.nbytes * 2 == plain.num_pages * 4 * plain.info.kv_token_bytes


def test_an_unknown_dtype_stops_the_start():
    """Only dtypes with a known name are taken."""
    with pytest.raises(InvalidField) as caught:
        assemble(EngineConfig(model="random-tiny", device="cpu", kv_dtype="e4m3"))
    assert caught.value.metadata["field"] == "kv_dtype"


def test_scales_that_the_weights_lack_are_calibrated():
    """Each layer's keys and values get a scale of their own."""
    assembly = assemble(EngineConfig(model="random-tiny3", device="cpu", kv_dtype="fp8"))
    scale_L2 = assembly.kv.scale_L2
    assembly.device.close()
    assert scale_L2 is not None
    assert scale_L2.isfinite().all()
    assert (scale_L2 > 0).all()
    assert len(scale_L2.unique()) > 1


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_batches_and_cached_prefixes_change_no_answer(assembly, temperature):
    """Every skill has the same answer alone, in order and all at once.

    Tokens, values and log-probabilities are equal.

    Pages are small, so that prefixes end inside them and are copied; cached prefixes were computed
    in another launch.
    """
    alone = run_all(Alone(assembly), 0, depth=1, temperature=temperature)
    assert shared(alone) == (0, 0)
    for seed, depth in ((0, 1), (1, 2)):
        run = run_all(assembly, seed, depth=depth, temperature=temperature)
        assert run.answers == alone.answers
        assert min(shared(run)) > 0


def test_speculation_changes_no_answer(assembly):
    """A step that verifies draft tokens reads what single steps would have stored."""
    alone = run_all(Alone(assembly), 0, depth=1)
    run = run_all(with_settings(assembly, speculation="fixed:3"), 2, depth=2)
    assert run.answers == alone.answers
