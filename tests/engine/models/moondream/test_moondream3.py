"""What Moondream 3 computes differently, checked from its weights by hand."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from legato_engine.layers.mlp import MLP, MoE
from legato_engine.models.moondream import decode_step
from legato_engine.models.moondream.config import Gelu, TauConfig
from legato_engine.models.moondream.model import MoondreamModel, Network
from legato_engine.models.moondream.presets import moondream2_config, moondream3_config
from legato_engine.models.paged_attention import DecodeBatch, KVCache, PrefillSpan
from legato_engine.types import PromptToken

from tests.engine.models.moondream.test_model import payload_of
from tests.engine.models.paged_session import PAGE_SIZE, PagedSession

COORD, SIZE = 5, 6
DTYPE = torch.bfloat16


def first_values(weights, x_TD, start, heads):
    """[T, H, E] values of the first layer after tau, by the formula."""
    normed = torch.nn.functional.layer_norm(
        x_TD, x_TD.shape[1:], weights["text.blocks.0.ln.weight"], weights["text.blocks.0.ln.bias"]
    )
    name = "text.blocks.0.attn"
    y = normed @ weights[f"{name}.qkv.weight"].T + weights[f"{name}.qkv.bias"]
    f = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    a_TH = torch.tanh(f @ weights[f"{name}.tau.wqwv"][heads:].T)
    p_T1 = torch.arange(start, start + len(x_TD), dtype=torch.float64)[:, None]
    g_TH = 0.5 + 1 / (1 + torch.exp(-weights[f"{name}.tau.alpha"] * torch.log(p_T1 + 1)))
    v_THE = y[:, -x_TD.shape[1] :].unflatten(1, (heads, -1))
    return v_THE * (a_TH + g_TH)[:, :, None]


def cached(cache_NHSE, pages_M, start, stop):
    """[T, H, E] cached at positions."""
    places = range(start, stop)
    return torch.stack([cache_NHSE[pages_M[p // PAGE_SIZE], :, p % PAGE_SIZE] for p in places])


def test_tau_scales_values_before_they_are_cached(tiny3_config, make_model):
    """A suffix after a shared prefix counts positions from the sequence's start."""
    model, weights = make_model(tiny3_config)
    weights = {name: tensor.double() for name, tensor in weights.items()}
    session = PagedSession(model)
    x_TD = torch.randn(60, model.width, generator=torch.Generator().manual_seed(0))
    pages_M = torch.tensor([7, 3, 9, 4])
    model.prefill(x_TD[:17], PrefillSpan(0, pages_M, bidirectional=True), session.kv)
    model.prefill(x_TD[17:], PrefillSpan(17, pages_M, bidirectional=False), session.kv)
    heads = tiny3_config.text.num_heads
    expected_THE = first_values(weights, x_TD.double(), 0, heads)
    actual_THE = cached(session.kv.v_LNHSE[0], pages_M, 0, 60)
    torch.testing.assert_close(actual_THE.double(), expected_THE, rtol=1e-4, atol=1e-5)
    shifted_THE = first_values(weights, x_TD[17:].double(), 0, heads)
    assert (shifted_THE - actual_THE[17:]).abs().max() > 0.01


def test_experts_begin_at_their_layer(tiny3_model):
    """Layers before the first with experts have an MLP."""
    kinds = [type(block.mlp) for block in tiny3_model._network.text.blocks]
    assert kinds == [MLP, MoE, MoE]


def test_heads_read_the_normed_residual(tiny3_config, make_model):
    """Coord and size bins are linear layers after the region's own norm."""
    model, weights = make_model(tiny3_config)
    weights = {name: tensor.double() for name, tensor in weights.items()}
    hidden_BD = 5 + 3 * torch.randn(4, model.width, generator=torch.Generator().manual_seed(1))
    x = hidden_BD.double()
    x = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, correction=0, keepdim=True) + 1e-5)
    x = x * weights["region.ln.weight"] + weights["region.ln.bias"]
    coord_BN, size_BN = (
        x @ weights[f"region.{kind}_decoder.weight"].T + weights[f"region.{kind}_decoder.bias"]
        for kind in ("coord", "size")
    )
    width_B, height_B = size_BN[:, :1024].argmax(-1), size_BN[:, 1024:].argmax(-1)
    coords = payload_of(model, hidden_BD, torch.full((4,), COORD))
    sizes = payload_of(model, hidden_BD, torch.full((4,), SIZE))
    assert coords[:, 0].tolist() == [b / 1024 for b in coord_BN.argmax(-1).tolist()]
    expected = torch.stack([2.0 ** (b / 1023 * 10 - 10) for b in (width_B, height_B)], dim=1)
    torch.testing.assert_close(sizes, expected.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("reaches_one", "divisor"), [(False, 1024), (True, 1023)])
def test_the_divisor_of_coords_is_a_switch(tiny3_config, make_model, reaches_one, divisor):
    """The last bin is just below one, or one."""
    region = msgspec.structs.replace(tiny3_config.region, coord_reaches_one=reaches_one)
    config = msgspec.structs.replace(tiny3_config, region=region)
    network = make_model(config)[0]._network
    network.region.coord_decoder.bias[1023] = 1e6
    payload = payload_of(
        MoondreamModel(config, network), torch.zeros(1, config.text.dim), torch.tensor([COORD])
    )
    assert payload[0, 0].item() == pytest.approx(1023 / divisor, abs=1e-7)


def test_the_gelu_of_tau_is_a_switch(tiny3_config, make_model):
    """The exact gelu changes results slightly."""
    prompt = tuple(PromptToken(token) for token in range(30, 60))
    hidden = []
    for gelu in Gelu:
        text = msgspec.structs.replace(tiny3_config.text, tau=TauConfig(gelu=gelu))
        model, _ = make_model(msgspec.structs.replace(tiny3_config, text=text))
        hidden.append(PagedSession(model).prefill(0, None, prompt))
    assert 0 < (hidden[0] - hidden[1]).abs().max() < 0.01


def test_a_decode_step_needs_no_data(tiny3_config):
    """A whole step runs on fake tensors, so a graph can capture it."""
    with torch.device("meta"):
        network = Network(tiny3_config).requires_grad_(False)
        model = MoondreamModel(tiny3_config, network)
        shape = (model.num_layers, 9, model.num_kv_heads, PAGE_SIZE, model.head_dim)
        kv = KVCache(torch.empty(shape), torch.empty(shape))
        tokens_B, payload_B2 = torch.empty(5, dtype=torch.int64), torch.empty(5, 2)
        pages_BM = torch.empty(5, 4, dtype=torch.int64)
        x_BD = model.embed(tokens_B, payload_B2)
        hidden_BD = model.decode(x_BD, DecodeBatch(tokens_B, pages_BM), kv)
        assert model.logits(hidden_BD).shape == (5, model.vocab_size)
        assert payload_of(model, hidden_BD, tokens_B).shape == (5, 2)


def test_kernels_refuse_what_they_do_not_know(monkeypatch):
    """Step kernels run Moondream 2 and 3, and refuse what they do not compute."""
    monkeypatch.setattr(decode_step, "supports_decoder", lambda sizes, device, dtype: True)
    replace = msgspec.structs.replace
    two, three = moondream2_config(), moondream3_config()
    moe = three.text.moe
    assert moe is not None
    empty = torch.empty(1, 1, 1, PAGE_SIZE, 1)
    kv = KVCache(empty, empty)
    for known in (two, three, replace(two, region=three.region), replace(three, region=two.region)):
        assert decode_step.has_kernels(known, kv, DTYPE)
    for text in (
        replace(two.text, tau=three.text.tau),
        replace(two.text, moe=moe),
        replace(three.text, moe=replace(moe, num_experts=128)),
        replace(three.text, moe=replace(moe, num_active=16)),
        replace(three.text, moe=replace(moe, inner_dim=1000)),
    ):
        assert not decode_step.has_kernels(replace(three, text=text), kv, DTYPE)
    for inner_dim in (48, 100):
        region = replace(two.region, inner_dim=inner_dim)
        assert not decode_step.has_kernels(replace(two, region=region), kv, DTYPE)


def test_bfloat16_is_near_float32(tiny3_config, make_model):
    """With every expert active no route can change, so bfloat16 only rounds."""
    text = tiny3_config.text
    everyone = msgspec.structs.replace(text.moe, num_active=text.moe.num_experts)
    config = msgspec.structs.replace(tiny3_config, text=msgspec.structs.replace(text, moe=everyone))
    prompt = tuple(PromptToken(token) for token in range(30, 60))
    model, _ = make_model(config)
    logits = model.logits(PagedSession(model).prefill(0, None, prompt))
    half = MoondreamModel(config, make_model(config)[0]._network.to(torch.bfloat16))
    rounded = half.logits(PagedSession(half).prefill(0, None, prompt))
    assert half.dtype is torch.bfloat16
    assert (rounded - logits).abs().max() < 0.1 * logits.abs().max()
