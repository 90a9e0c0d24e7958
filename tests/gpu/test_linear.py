"""On a GPU: a layer whose rows begin anywhere is as exact as any other.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from legato_engine.kernels import ops
from legato_engine.kernels.step import KINDS, StepMap, WeightKind, has_step_kernels
from legato_engine.layers.linear import Linear
from legato_engine.models.decoder.model import DecoderModel, DecoderNetwork
from legato_engine.models.paged_attention import DecodeBatch, KVCache

from benchmarks.decode.text_step import MODELS

CUDA = torch.device("cuda", 0)
LIMITS = {torch.bfloat16: 0.004, torch.float32: 1e-5}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("inputs", [588, 589, 592])
@pytest.mark.parametrize("dtype", LIMITS)
def test_rows_that_are_not_aligned(inputs, dtype):
    """The product over exactly its inputs, in the shape that was asked for."""
    torch.manual_seed(0)
    x_2TI = torch.randn(2, 729, inputs, device=CUDA).to(dtype)
    weight_OI = (torch.randn(1152, inputs, device=CUDA) / inputs**0.5).to(dtype)
    bias_O = torch.randn(1152, device=CUDA).to(dtype)
    out_2TO = ops.linear(x_2TI, weight_OI, bias_O)
    exact_2TO = x_2TI.double() @ weight_OI.double().t() + bias_O.double()
    assert out_2TO.shape == (2, 729, 1152)
    assert out_2TO.dtype is dtype
    error = (out_2TO.double() - exact_2TO).norm() / exact_2TO.norm()
    assert error < LIMITS[dtype]


@pytest.mark.parametrize("kind", list(KINDS.values()))
@pytest.mark.parametrize("inputs", [576, 1536])
def test_packed_products_are_those_of_the_weights_that_are_read(kind, inputs):
    """With a few tokens' kernel, and beyond it; a row has the same bits in any batch of these."""
    if not has_step_kernels(CUDA):
        pytest.skip("needs compute capability 8.0")
    torch.manual_seed(0)
    weight_OI = (torch.randn(960, inputs, device=CUDA) / inputs**0.5).bfloat16()
    packed, bias_O = StepMap(weight_OI, kind), torch.randn(960, device=CUDA).bfloat16()
    x_TI = torch.randn(40, inputs, device=CUDA).bfloat16()
    exact_TO = x_TI.double() @ packed.exact().double().t()
    few_TO = packed.multiply(x_TI[:32], None)
    for batch in (1, 3, 8, 9, 17, 24, 32, 40):
        for bias in (None, bias_O):
            out_TO = packed.multiply(x_TI[:batch].contiguous(), bias)
            truth_TO = exact_TO[:batch] + (0 if bias is None else bias.double())
            assert (out_TO.double() - truth_TO).norm() < 0.005 * truth_TO.norm()
            if bias is None and batch <= 32:
                assert torch.equal(out_TO, few_TO[:batch])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS.values())
def test_a_text_model_computes_with_its_packed_weights(kind, tied):
    """A step of SmolLM2's widths is that of the dequantised weights in float32."""
    if not has_step_kernels(CUDA):
        pytest.skip("needs compute capability 8.0")
    torch.manual_seed(0)
    config = dataclasses.replace(MODELS["SmolLM2-135M"], num_layers=2, tied_head=tied)
    with torch.device("meta"):
        network = DecoderNetwork(config).to(torch.bfloat16)
    network = network.to_empty(device=CUDA).requires_grad_(requires_grad=False)
    for parameter in network.parameters():
        parameter.normal_(0.0, 0.05) if parameter.dim() > 1 else parameter.fill_(1.0)
    exact = copy.deepcopy(network).float()
    assert network.cannot_quantise(CUDA) is None
    network.quantise(kind)
    for ours, theirs in zip(network.modules(), exact.modules(), strict=True):
        if isinstance(ours, Linear):
            assert isinstance(ours.packed, StepMap)
            assert isinstance(theirs, Linear)
            theirs.weight.copy_(ours.packed.exact())
    if tied:
        exact._tied_head = StepMap(exact.embed_tokens.weight.bfloat16(), kind_of_head(kind))
    found = [step(each) for each in (network, exact)]
    error = (found[0].double() - found[1].double()).norm() / found[1].norm()
    assert error < 0.02


def kind_of_head(kind):
    """That which a model's head has: no fewer than 8 bits."""
    return WeightKind.INT8 if kind is WeightKind.INT4 else kind


def step(network):
    """Logits of four rows at one position of random keys and values."""
    torch.manual_seed(1)
    model, config = DecoderModel(network), network.config
    shape = config.num_layers, 9, config.heads.num_kv_heads, 16, config.heads.head_dim
    kv = KVCache(*(torch.randn(shape).bfloat16().to(CUDA, model.dtype) for _ in range(2)))
    table_BM = torch.arange(1, 9, device=CUDA).view(4, 2)
    batch = DecodeBatch(torch.full((4,), 20, device=CUDA), table_BM)
    token_B, payload_B2 = torch.arange(4, device=CUDA), torch.zeros(4, 2, device=CUDA)
    with torch.inference_mode():
        return model.logits(model.decode(model.embed(token_B, payload_B2), batch, kv))
