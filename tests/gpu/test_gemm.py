"""On Hopper: products with an epilogue, and of rows that begin anywhere, are exact; so is e4m3.

Shape legend: T rows, K values of a row, O outputs of a layer.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda.bindings import runtime
from legato_engine.config import LoadOptions
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, reference
from legato_engine.kernels.cuda import gemm
from legato_engine.kernels.cuda.gemm import launch_cleared, recording_stream
from legato_engine.kernels.map_codes import KINDS, format_of, map_codes
from legato_engine.kernels.step import StepMap, has_step_kernels
from legato_engine.layers import fp8
from legato_engine.layers.fp8 import Fp8Linear
from legato_engine.layers.linear import Linear
from legato_engine.models.decoder.model import DecoderModel, DecoderNetwork
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.models.moondream.weights import random_weights
from legato_engine.models.paged_attention import DecodeBatch, KVCache
from legato_engine.models.registry import resolve
from torch import nn

from benchmarks.decode.text_step import MODELS
from tests.engine.kernels.cases import BLOCKS, random_codes
from tests.gpu.inputs import DIMS, FLIPPED, HOPPER, assert_same, rows

pytestmark = pytest.mark.gpu


CUDA = torch.device("cuda", 0)
SIZES = [(6561, 1152, 1152), (6561, 4304, 1152), (730, 10240, 2048), (129, 64, 96)]
TALL = [(6561, 1152, 3456), (6561, 1152, 4304), (2187, 1152, 3456), (729, 1152, 4304)]
ROUNDED = 0.0025  # of a result's root mean square: roundings to bf16


@pytest.fixture
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def drawn(*shape: int, gain: float = 1.0) -> torch.Tensor:
    """Normal values in bf16."""
    return (torch.randn(*shape, device=CUDA) * gain).bfloat16()


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the truth."""
    return float((ours.double() - exact).norm() / exact.norm())


@HOPPER
@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize(("count", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize(("gelu", "adds"), [(False, False), (True, False), (False, True)])
def test_a_product_is_exact_but_for_one_rounding(count, inputs, outputs, gelu, adds):
    """With a bias, a gelu or a sum, among other columns that stay as they were."""
    x_TI = drawn(count, inputs + 16)[:, :inputs]
    weight_OI, bias_O = drawn(outputs, inputs, gain=inputs**-0.5), drawn(outputs)
    add_TO = drawn(count, outputs) if adds else None
    wide_TW = torch.full((count, outputs + 256), 7.0, device=CUDA, dtype=torch.bfloat16)
    out_TO = wide_TW[:, 128 : 128 + outputs]
    assert gemm.can_multiply(x_TI, weight_OI, bias_O, out_TO)
    gemm.multiply(x_TI, weight_OI, bias_O, out_TO, add_TO=add_TO, gelu=gelu)
    exact_TO = x_TI.double() @ weight_OI.double().t() + bias_O.double()
    if gelu:
        exact_TO = F.gelu(exact_TO, approximate="tanh")
    if add_TO is not None:
        exact_TO += add_TO.double()
    assert error(out_TO, exact_TO) < ROUNDED
    others_TW = torch.cat([wide_TW[:, :128], wide_TW[:, 128 + outputs :]], dim=1)
    assert torch.equal(others_TW, torch.full_like(others_TW, 7.0))


@HOPPER
@pytest.mark.usefixtures("_inference")
def test_a_sum_lies_where_its_first_term_was():
    """One term, of several leading dimensions; with few rows two terms, and none is touched."""
    weight_OI, bias_O = drawn(1152, 4304, gain=0.015), drawn(1152)
    for tokens, terms in ((729, 1), (3, 2)):
        x_2TI, to_2TO = drawn(2, tokens, 4304), drawn(2, tokens, 1152)
        exact = x_2TI.double() @ weight_OI.double().t() + bias_O.double() + to_2TO.double()
        out, more = ops.linear_onto(to_2TO, x_2TI, weight_OI, bias_O)
        assert out.data_ptr() == to_2TO.data_ptr()
        assert (more is None) == (terms == 1)
        assert error(out.double() + (0 if more is None else more.double()), exact) < ROUNDED


@HOPPER
@pytest.mark.usefixtures("_inference")
def test_rows_depend_on_no_other():
    """A row has the same bits among rows of NaN."""
    x_TI, weight_OI, bias_O = drawn(6561, 1152), drawn(1152, 1152, gain=0.03), drawn(1152)
    to_TO = drawn(6561, 1152)
    whole_TO, _ = ops.linear_onto(to_TO.clone(), x_TI, weight_OI, bias_O)
    x_TI[1::2] = torch.nan
    half_TO, _ = ops.linear_onto(to_TO.clone(), x_TI, weight_OI, bias_O)
    assert torch.equal(half_TO[::2], whole_TO[::2])
    assert bool(half_TO[1::2].isnan().all())


@HOPPER
@pytest.mark.usefixtures("_inference")
def test_a_captured_product_reads_its_operands_anew():
    """A replay over other values gives what a call gives."""
    x_TI, weight_OI, bias_O = drawn(729, 1152), drawn(1152, 1152, gain=0.03), drawn(1152)
    to_TO, out_TO = drawn(729, 1152), drawn(729, 1152)
    device = CudaDevice(0)

    def work() -> None:
        out_TO.copy_(ops.linear_onto(to_TO.clone(), x_TI, weight_OI, bias_O)[0])

    replay = device.capture(work)
    for _ in range(2):
        for operand in (x_TI, to_TO, bias_O):
            operand.copy_(torch.randn(operand.shape))
        torch.cuda.synchronize()
        device.compute.submit(replay)
        torch.cuda.synchronize()
        expected_TO, _ = ops.linear_onto(to_TO.clone(), x_TI, weight_OI, bias_O)
        assert torch.equal(out_TO, expected_TO)
    device.close()


@HOPPER
@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("count", "inputs", "outputs"), TALL)
def test_a_counted_product_is_exact_and_repeats(count, inputs, outputs, gelu):
    """After other work of its stream, called and replayed, whenever its counter is clear."""
    x_TI, given_TI = drawn(count, inputs), drawn(count, inputs)
    weight_OI, bias_O = drawn(outputs, inputs, gain=inputs**-0.5), drawn(outputs)
    out_TO = torch.empty(count, outputs, device=CUDA, dtype=torch.bfloat16)
    counters = gemm.counters(2, CUDA)
    device = CudaDevice(0)

    def work() -> None:
        counters.zero_()
        x_TI.copy_(given_TI)
        for counter in counters:
            out_TO.fill_(torch.nan)
            gemm.multiply(x_TI, weight_OI, bias_O, out_TO, gelu=gelu, counter=counter)

    replay = device.capture(work)
    for _ in range(3):
        given_TI.copy_(torch.randn(given_TI.shape))
        exact_TO = given_TI.double() @ weight_OI.double().t() + bias_O.double()
        exact_TO = F.gelu(exact_TO, approximate="tanh") if gelu else exact_TO
        torch.cuda.synchronize()
        device.compute.submit(work)
        torch.cuda.synchronize()
        called_TO = out_TO.clone()
        device.compute.submit(replay)
        torch.cuda.synchronize()
        assert error(out_TO, exact_TO) < ROUNDED
        assert torch.equal(out_TO, called_TO)
    device.close()


def recorded(work: Callable[[], object]) -> list[runtime.cudaGraphNodeType]:
    """The kinds of nodes of what `work` gives to torch's current stream; nothing runs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        runtime.cudaStreamBeginCapture(stream.cuda_stream, mode)
        work()
        _, graph = runtime.cudaStreamEndCapture(stream.cuda_stream)
    _, nodes, count = runtime.cudaGraphGetNodes(graph, 16)
    kinds = [runtime.cudaGraphNodeGetType(node)[1] for node in nodes[:count]]
    runtime.cudaGraphDestroy(graph)
    return kinds


@HOPPER
@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("gelu", [False, True])
def test_nothing_is_cleared_before_a_counted_product(gelu):
    """One kernel for the tower's tallest products; without a counter the library clears one."""
    outputs = 4304 if gelu else 3456
    x_TI, weight_OI, bias_O = drawn(6561, 1152), drawn(outputs, 1152), drawn(outputs)
    out_TO = torch.empty(6561, outputs, device=CUDA, dtype=torch.bfloat16)
    (counter,) = gemm.counters(1, CUDA)

    def multiply(counter: torch.Tensor | None) -> None:
        gemm.multiply(x_TI, weight_OI, bias_O, out_TO, gelu=gelu, counter=counter)

    multiply(counter)
    multiply(None)
    kernel = runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel
    memset = runtime.cudaGraphNodeType.cudaGraphNodeTypeMemset
    assert recorded(lambda: multiply(counter)) == [kernel]
    assert memset in recorded(lambda: multiply(None))


CASES = [("value", 1, True), ("other", 1, False), ("value", 2, False), ("", 1, False)]


@HOPPER
@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize(("clears", "kernels", "launches"), CASES)
def test_only_one_kernel_after_cleared_memory_is_launched(clears, kernels, launches):
    """Work that clears other memory, runs two kernels or clears nothing is left to the library."""
    memory = {name: torch.ones(64, device=CUDA, dtype=torch.uint8) for name in ("value", "other")}
    out = torch.ones(4, device=CUDA)

    def enqueue(stream: int) -> None:
        if clears:
            runtime.cudaMemsetAsync(memory[clears].data_ptr(), 0, 4, stream)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            for _ in range(kernels):
                out.mul_(2.0)

    out.mul_(2.0)
    assert launch_cleared(recording_stream(CUDA), enqueue, memory["value"]) == launches
    assert torch.equal(out, torch.full_like(out, 4.0 if launches else 2.0))
    assert all(bool(each.all()) for each in memory.values())


# ---------------------------------------------------------------- rows that begin anywhere
# On a GPU: a layer whose rows begin anywhere is as exact as any other.
#
# Shape legend: T rows, I inputs, O outputs.

LIMITS = {torch.bfloat16: 0.004, torch.float32: 1e-5}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("of", [*KINDS, *BLOCKS])
@pytest.mark.parametrize("inputs", [576, 1536])
def test_packed_products_are_those_of_the_weights_that_are_read(of, inputs):
    """With a few tokens' kernel, and beyond it; a row has the same bits in any batch of these."""
    if not has_step_kernels(CUDA):
        pytest.skip("needs compute capability 8.0")
    torch.manual_seed(0)
    if of in KINDS:
        weight_OI = (torch.randn(960, inputs, device=CUDA) / inputs**0.5).bfloat16()
        codes = map_codes(weight_OI, format_of(KINDS[of]))
    else:
        codes = random_codes(of, 960, inputs, of_gpu=True, device=CUDA)
    packed = StepMap(codes)
    exact_OI = codes.dequantised()
    assert torch.equal(packed.exact(), exact_OI)
    assert torch.equal(packed.dense(), exact_OI.bfloat16())
    bias_O = torch.randn(960, device=CUDA).bfloat16()
    x_TI = torch.randn(40, inputs, device=CUDA).bfloat16()
    exact_TO = x_TI.double() @ exact_OI.double().t()
    few_TO = packed.multiply(x_TI[:32], None)
    for batch in (1, 3, 8, 9, 17, 24, 32, 40):
        for bias in (None, bias_O):
            out_TO = packed.multiply(x_TI[:batch].contiguous(), bias)
            truth_TO = exact_TO[:batch] + (0 if bias is None else bias.double())
            assert (out_TO.double() - truth_TO).norm() < 0.005 * truth_TO.norm()
            if bias is None and batch <= 32:
                assert torch.equal(out_TO, few_TO[:batch])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
        embeddings_VD = exact.embed_tokens.weight.bfloat16()
        exact._tied_head = StepMap(map_codes(embeddings_VD, format_of(kind).of_head))
    found = [step(each) for each in (network, exact)]
    error = (found[0].double() - found[1].double()).norm() / found[1].norm()
    assert error < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "name", [*(name for name in BLOCKS if "large" not in name), "Q4_K_M", "Q5_K_M"]
)
def test_a_gguf_file_keeps_its_blocks(tmp_path, name, tied):
    """A step of its blocks, or of the nearest of Q8_0, is that of their values in float32."""
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    from tests.engine.models.gguf import test_gguf

    path = tmp_path / "model.gguf"
    test_gguf.write_mix(path, name, tied=tied)
    bundle: Any = resolve("llama", weights=str(path))
    exact = bundle.load(CUDA, torch.float32)
    ours = bundle.load(CUDA, torch.bfloat16, LoadOptions(weight_dtype="stored"))
    pairs: Any = zip(ours._network.modules(), exact._network.modules(), strict=True)
    for mine, other in pairs:
        if name.endswith("_M") and isinstance(mine, Linear | nn.Embedding):  # whose error grows
            packed: Any = None if isinstance(mine, nn.Embedding) else mine.packed
            values_OI = mine.weight if packed is None else packed.exact()
            assert (values_OI - other.weight).norm() < 8e-3 * other.weight.norm()
            other.weight.copy_(values_OI)
    found = [step(each._network) for each in (ours, exact)]
    error = (found[0].double() - found[1].double()).norm() / found[1].norm()
    assert error < 0.03


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


def _lacks_fp8() -> bool:
    return not torch.cuda.is_available() or not ops.can_multiply_e4m3(CUDA)


FP8 = pytest.mark.skipif(_lacks_fp8(), reason="needs a CUDA device with fp8 arithmetic")

COUNTS = (1, 7, 8, 729)
SUM_ROUNDED = 2.0**-7  # of a row: bf16 rounds to 2**-9, and fast sums keep about 13 bits


@pytest.fixture
def seeded_inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@FP8
@pytest.mark.usefixtures("seeded_inference")
@pytest.mark.parametrize("dim", DIMS)
def test_plain_rows_are_the_reference(dim):
    """Every byte and every scale of plain rows is torch's, whatever the number of rows."""
    for count in COUNTS:
        x_TK = rows(count, dim)
        assert_same(ops.quantise(x_TK), reference.quantise(x_TK), 0.0)


@FP8
@pytest.mark.usefixtures("seeded_inference")
@pytest.mark.parametrize("dim", DIMS)
def test_gelu_rows_are_the_reference(dim):
    """After a gelu less a centre values are torch's, but for ties that fall the other way."""
    x_TK = torch.randn(729, dim, device=CUDA).mul_(3).bfloat16()
    centre_K = torch.rand(dim, device=CUDA).bfloat16()
    for rows_TK, less_K in ((x_TK, centre_K), (x_TK * 1e3, centre_K), (x_TK, 0 * centre_K)):
        ours = ops.quantise_gelu(rows_TK, less_K)
        assert_same(ours, reference.quantise_gelu(rows_TK, less_K), FLIPPED)


@FP8
@pytest.mark.usefixtures("seeded_inference")
def test_rows_that_are_zero_or_not_finite_stay_so():
    """A row of zeros is zeros; a row with NaN or infinity holds a value that is no number."""
    x_TK = rows(4, 1152)
    x_TK[0] = 0
    x_TK[1, 700] = float("nan")
    x_TK[2, 3] = float("inf")
    ours = ops.quantise(x_TK)
    assert (ours.values[0].float() == 0).all()
    assert ours.values.float().isnan().any(-1).tolist() == [False, True, True, False]


@FP8
@pytest.mark.usefixtures("seeded_inference")
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1152, 3456), (4304, 1152), (2304, 8192), (2048, 6144), (8192, 2048)]
)
def test_a_layer_is_its_emulation(inputs, outputs):
    """The multiplication is float32's of the same e4m3 values, but for what its sums round."""
    linear = Linear(inputs, outputs).to(CUDA, torch.bfloat16)
    ours = Fp8Linear(linear)
    x = ops.quantise(rows(3 * 243, inputs).view(3, 243, inputs))
    out = ours.multiply(x)
    assert out.shape == (3, 243, outputs)
    operands = (x.values.flatten(0, 1), x.scale.flatten(0, 1), ours.weight, ours.scale)
    truth = fp8.emulated(*operands, ours.bias.float()).view_as(out)
    error = (out.float() - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert error.max().item() < SUM_ROUNDED


@FP8
@pytest.mark.usefixtures("seeded_inference")
def test_the_tower_can_be_captured():
    """A captured tower gives the same embeddings for new pixels as one that runs at once."""
    config = tiny_random_config()
    vision = random_weights(config, 0, CUDA, torch.bfloat16).vision
    side = config.vision.crop_size
    seen = torch.randint(0, 256, (2, side, side, 3), dtype=torch.uint8, device=CUDA)
    vision.use_fp8(0, vision.input_means(seen))
    pixels = torch.zeros(3, side, side, 3, dtype=torch.uint8, device=CUDA)
    out_TX = torch.zeros_like(vision(pixels, (1, 2)))
    device = CudaDevice(0)

    def encode() -> None:
        out_TX.copy_(vision(pixels, (1, 2)))

    replay = device.capture(encode)
    pixels.copy_(torch.randint(0, 256, pixels.shape, dtype=torch.uint8))
    torch.cuda.synchronize()
    device.compute.submit(replay)
    torch.cuda.synchronize()
    assert torch.equal(out_TX, vision(pixels, (1, 2)))
    device.close()
