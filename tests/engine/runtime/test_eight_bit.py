"""An engine with e4m3 keys and values: half the memory, and batch-invariant bits."""

from __future__ import annotations

import msgspec
import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble, with_speculation
from legato_engine.errors import InvalidField
from legato_engine.models.moondream import family, presets
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.models.moondream.weights import random_weights
from safetensors.torch import save_file

from tests.engine.engine.test_prefix_sharing import Alone, run_all, shared
from tests.engine.models.moondream.published import layout_b

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
    run = run_all(with_speculation(assembly, "fixed:3"), 2, depth=2)
    assert run.answers == alone.answers
