"""Linear layers: padded inputs, low-rank changes, experts, e4m3 and norms."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from legato_engine.errors import InvalidField
from legato_engine.kernels import activations, ops, reference
from legato_engine.kernels.cuda import norm, quantise
from legato_engine.kernels.cuda.module import compile_source, sources
from legato_engine.kernels.map_codes import WeightKind, format_of
from legato_engine.kernels.parameters import AdapterRows
from legato_engine.layers import fp8
from legato_engine.layers.attention import Attention
from legato_engine.layers.fp8 import Centres, Fp8Linear
from legato_engine.layers.linear import Linear, TileCounters
from legato_engine.layers.mlp import MLP, MoE
from legato_engine.models.moondream.presets import moondream2_config, tiny_random_config
from legato_engine.models.moondream.vision import VisionBlock
from legato_engine.models.moondream.weights import random_weights
from msgspec.structs import replace


def test_a_widened_layer_computes_what_it_did():
    """Rows of the old width and rows padded with zeros agree; widening twice changes nothing."""
    torch.manual_seed(0)
    layer = Linear(21, 5).requires_grad_(requires_grad=False)
    x_TI = torch.randn(2, 3, 21)
    before_TO = layer(x_TI)
    for _ in range(2):
        layer.widen(8)
        assert layer.weight.shape == (5, 24)
        assert layer.in_features == 24
        torch.testing.assert_close(layer(x_TI), before_TO)
        wide_TI = torch.nn.functional.pad(x_TI, (0, 3))
        assert torch.equal(layer(wide_TI), layer(x_TI))


def test_two_terms_stay_apart_where_no_product_adds_them():
    """On the CPU the first is the very tensor that came, the second what the layer makes."""
    torch.manual_seed(0)
    layer = Linear(16, 8)
    to_TO, x_TI = torch.randn(200, 8), torch.randn(200, 16)
    first, second = ops.linear_onto(to_TO, x_TI, layer.weight, layer.bias)
    assert first is to_TO
    assert second is not None
    assert torch.equal(second, layer(x_TI))


def test_counters_belong_to_their_layers_while_they_are_cleared():
    """Each layer has a zeroed counter inside, whatever was counted before, and none outside."""
    layers = [Linear(4, 3), Linear(3, 2)]
    counters = TileCounters(layers, torch.device("cpu"))
    for _ in range(2):
        with counters.cleared():
            first, second = (layer.counter for layer in layers)
            assert first is not None
            assert second is not None
            assert not first.any()
            assert not second.any()
            first.fill_(1)
            assert not second.any()
        assert all(layer.counter is None for layer in layers)
    with pytest.raises(ZeroDivisionError), counters.cleared():
        raise ZeroDivisionError
    assert all(layer.counter is None for layer in layers)


def test_counters_change_nothing_where_no_tiles_are_dealt_out():
    """On the CPU a layer gives the same with one and without."""
    torch.manual_seed(0)
    layer, x_TI = Linear(8, 6), torch.randn(5, 8)
    plain_TO, gelu_TO = layer(x_TI), layer.gelu(x_TI)
    with TileCounters([layer], torch.device("cpu")).cleared():
        assert torch.equal(layer(x_TI), plain_TO)
        assert torch.equal(layer.gelu(x_TI), gelu_TO)


# ---------------------------------------------------------------- lora
# Low-rank changes by slot: both forms of the operation mean the same.


def slots_of(ranks, inputs, outputs, max_rank):
    """Slots of these ranks after slot 0, zero beyond the ranks."""
    generator = torch.Generator().manual_seed(0)
    a_SRI = torch.zeros(len(ranks) + 1, max_rank, inputs, dtype=torch.float64)
    b_SRO = torch.zeros(len(ranks) + 1, max_rank, outputs, dtype=torch.float64)
    for slot, rank in enumerate(ranks, start=1):
        a_SRI[slot, :rank] = torch.randn(rank, inputs, generator=generator)
        b_SRO[slot, :rank] = torch.randn(rank, outputs, generator=generator)
    return a_SRI, b_SRO, torch.tensor([0, *ranks])


@pytest.mark.parametrize("slots", [[0], [2], [1, 0, 3, 2, 0, 1, 1], [0] * 7])
@pytest.mark.parametrize("rank", [16, 32])
def test_gathered_and_row_by_row_agree(slots, rank):
    """Each row gets its own slot's product, one slot may speak for all, and slot 0 adds nothing.

    The outputs may be some of a wider row's.
    """
    a_SRI, b_SRO, rank_S = slots_of([3, 16, 8], 24, 40, 32)
    x_TI, out_TO = torch.randn(7, 24).double(), torch.randn(7, 40).double()
    slot_T = torch.tensor(slots)
    expected = out_TO.clone()
    for row, slot in enumerate(slots if len(slots) > 1 else slots * 7):
        expected[row] += b_SRO[slot].t() @ (a_SRI[slot] @ x_TI[row])
    rows = AdapterRows(slot_T, rank_S, rank)
    for add in (
        lambda own_TO: reference.add_low_rank_gathered(own_TO, x_TI, a_SRI, b_SRO, slot_T, rank),
        lambda own_TO: ops.add_low_rank(own_TO, x_TI, a_SRI, b_SRO, rows),
    ):
        wide_TO = torch.cat([torch.ones(7, 3), out_TO, torch.ones(7, 2)], dim=1)
        own_TO = wide_TO[:, 3:43]
        assert add(own_TO).data_ptr() == own_TO.data_ptr()
        torch.testing.assert_close(own_TO, expected)
        assert (wide_TO[:, :3] == 1).all()
        assert (wide_TO[:, 43:] == 1).all()


# ---------------------------------------------------------------- moe
# A mixture of experts as a layer.

DIM, INNER, NUM_EXPERTS, NUM_ACTIVE = 32, 24, 6, 2


def make_moe(seed=0):
    """Experts and a router with random weights."""
    moe = MoE(DIM, INNER, NUM_EXPERTS, NUM_ACTIVE).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for tensor in moe.state_dict().values():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
    return moe


def rows(count=13):
    """Normed rows."""
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(1))


def test_the_order_of_experts_means_nothing():
    """Experts renumbered together with the router give the same rows."""
    moe, renumbered = make_moe(), make_moe()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    for name, tensor in moe.state_dict().items():
        renumbered.state_dict()[name].copy_(tensor[order])
    x_TD = rows()
    out_TD = renumbered(x_TD, capturable=False)
    torch.testing.assert_close(out_TD, moe(x_TD, capturable=False), rtol=1e-5, atol=1e-6)
    swapped = make_moe()
    swapped.fc1.weight.copy_(moe.fc1.weight[order])
    assert not torch.allclose(swapped(x_TD, capturable=False), out_TD)


def test_the_router_counts_its_bias():
    """A bias that outweighs everything sends every token to its two experts, at equal shares."""
    moe = make_moe()
    moe.router.weight.zero_()
    moe.router.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0, 9.0, 0.0]))
    x_TD = rows()
    expected_TD = torch.zeros_like(x_TD)
    for expert in (1, 4):
        u_TI, g_TI = (x_TD @ moe.fc1.weight[expert].T).chunk(2, -1)
        inner_TI = 0.5 * u_TI * (1 + torch.erf(u_TI / math.sqrt(2))) * (g_TI + 1)
        expected_TD += 0.5 * inner_TI @ moe.fc2.weight[expert].T
    torch.testing.assert_close(moe(x_TD, capturable=False), expected_TD, rtol=1e-5, atol=1e-5)


def test_e4m3_is_to_be_loaded():
    """Experts in e4m3 have a float32 scale for each output, under names that a file fills."""
    with torch.device("meta"):
        moe = MoE(DIM, INNER, NUM_EXPERTS, NUM_ACTIVE).to(torch.bfloat16)
        for layer in moe.layers:
            layer.use_codes(format_of(WeightKind.E4M3))
    state = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in moe.state_dict().items()}
    assert state == {
        "router.weight": (torch.bfloat16, (NUM_EXPERTS, DIM)),
        "router.bias": (torch.bfloat16, (NUM_EXPERTS,)),
        "fc1.weight": (torch.float8_e4m3fn, (NUM_EXPERTS, 2 * INNER, DIM)),
        "fc1.scale": (torch.float32, (NUM_EXPERTS, 2 * INNER)),
        "fc2.weight": (torch.float8_e4m3fn, (NUM_EXPERTS, DIM, INNER)),
        "fc2.scale": (torch.float32, (NUM_EXPERTS, DIM)),
    }


# ---------------------------------------------------------------- fp8
# Layers that multiply in e4m3, by emulation; and their kernels' source.
#
# Shape legend: T rows, K inputs, O outputs of a layer.

HALF_STEP = 2.0**-4  # of e4m3: three bits after the leading one, rounded to nearest
LAYER_ERROR = 0.045  # of one layer: both factors off by 2.6 % root mean square, and a margin
TOWER_ERROR = 0.06  # of one of two blocks
CPU = torch.device("cpu")


@pytest.fixture
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Of the whole tensor, in float64."""
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def sizes_of(outputs: int) -> torch.Tensor:
    """Float32 [O]: how large each output of `layer` is, over four decades."""
    return torch.logspace(-3, 1, outputs)


def layer(inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> Linear:
    """A linear layer of random weights, its outputs of unequal size."""
    linear = Linear(inputs, outputs).to(dtype)
    linear.weight.mul_(sizes_of(outputs)[:, None])
    linear.bias.mul_(sizes_of(outputs))
    return linear


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_a_value_is_off_by_half_a_step(size):
    """Quantised values are within half a step of e4m3, or of its smallest step, in every row."""
    x_TK = torch.randn(40, 64) * torch.logspace(-2, 2, 40)[:, None] * size
    rows = reference.quantise(x_TK)
    assert (rows.values.dtype, rows.scale.shape) == (torch.float8_e4m3fn, (40, 1))
    allowed_TK = x_TK.abs() * HALF_STEP * 1.001 + rows.scale * 2.0**-10
    assert ((rows.values.float() * rows.scale - x_TK).abs() <= allowed_TK).all()
    assert (rows.values.float().abs().amax(-1) == 448).all()


@pytest.mark.usefixtures("_inference")
def test_a_row_of_zeros_is_zeros():
    """A row without a largest value has a scale that is not zero."""
    rows = reference.quantise(torch.zeros(2, 16, dtype=torch.bfloat16))
    assert (rows.values.float() == 0).all()
    assert (rows.scale > 0).all()


@pytest.mark.usefixtures("_inference")
def test_a_value_that_is_no_number_stays_none():
    """NaN and infinity make their row's outputs not finite, and no other row's."""
    x_TK = torch.randn(3, 32)
    x_TK[0, 3], x_TK[2, 5] = float("nan"), float("inf")
    out_TO = Fp8Linear(layer(32, 16)).multiply(ops.quantise(x_TK))
    assert out_TO.isfinite().all(-1).tolist() == [False, True, False]
    assert not out_TO[::2].isfinite().any()


@pytest.mark.usefixtures("_inference")
def test_what_comes_before_is_not_rounded():
    """The gelu of bf16 rows is that of float32, less the centre, then quantised."""
    x_TK, centre_K = torch.randn(5, 48).bfloat16(), torch.randn(48).bfloat16()
    expected = reference.quantise(activations.gelu(x_TK.float()) - centre_K.float())
    ours = ops.quantise_gelu(x_TK, centre_K)
    assert torch.equal(ours.values.float(), expected.values.float())
    assert torch.equal(ours.scale, expected.scale)


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 144), (320, 960), (1152, 48), (4304, 16)])
def test_a_layer_is_close_to_float32(inputs, outputs):
    """One layer's relative error stays below `LAYER_ERROR`, however unequal rows and outputs."""
    linear = layer(inputs, outputs)
    sizes_T1 = torch.logspace(-2, 2, 64)[:, None]
    x_TK = torch.randn(2, 64, inputs) * sizes_T1
    ours, truth = Fp8Linear(linear).multiply(ops.quantise(x_TK)), linear(x_TK)
    assert ours.shape == truth.shape
    sizes_TO = sizes_T1 * sizes_of(outputs)
    assert relative_error(ours / sizes_TO, truth / sizes_TO) < LAYER_ERROR


@pytest.mark.usefixtures("_inference")
def test_the_emulation_is_the_multiplication():
    """What runs on a GPU gives the emulation's numbers: the same scales on the same sides."""
    linear = layer(64, 48, torch.bfloat16)
    ours = Fp8Linear(linear)
    rows = ops.quantise(torch.randn(33, 64).bfloat16())
    operands = (rows.values, rows.scale, ours.weight, ours.scale, ours.bias)
    torch.testing.assert_close(
        fp8.multiplied(*operands), fp8.emulated(*operands), rtol=2**-7, atol=1e-5
    )


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_centres_are_exact_and_take_away_what_rows_share(dtype):
    """Any centres leave a block's exact result; those of its inputs leave the error of the rest."""
    config = moondream2_config().vision
    config = replace(config, dim=288, ff_dim=1072, num_heads=4, crop_size=126)
    block = VisionBlock(config).to(dtype)
    for ln in (block.ln1, block.ln2):
        ln.bias.copy_(3 * torch.randn(config.dim))
    block.attn.qkv.bias.copy_(3 * torch.randn(3 * config.dim))
    x_NTD = torch.randn(2, 81, config.dim)
    exact = copy.deepcopy(block).float()
    truth_NTD = sum(exact(x_NTD.clone(), None)) - x_NTD
    means = exact.input_means(x_NTD)[1]
    zeros = Centres(*(torch.zeros_like(each) for each in means))
    errors = []
    for centres in (zeros, means):
        ours = copy.deepcopy(block)
        ours.use_fp8(config.num_heads, centres)
        terms = ours(x_NTD.to(dtype), None)
        errors.append(relative_error(terms[0].float() + terms[1].float() - x_NTD, truth_NTD))
    assert errors[0] < 4 * LAYER_ERROR
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.usefixtures("_inference")
def test_a_layer_needs_sizes_of_sixteen():
    """Sizes that the multiplication cannot take are refused before any use."""
    for inputs, outputs in ((40, 32), (32, 40)):
        with pytest.raises(InvalidField, match="multiples of 16"):
            Fp8Linear(Linear(inputs, outputs))


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_swap_keeps_the_tower(dtype):
    """After the swap every name is there, other tensors are the same, and embeddings are close."""
    config = tiny_random_config()
    vision = random_weights(config, 0, CPU, dtype).vision
    side = config.vision.crop_size
    pixels = torch.randint(0, 256, (3, side, side, 3), dtype=torch.uint8)
    truth_TX = copy.deepcopy(vision).float()(pixels, (1, 2))
    before = dict(vision.state_dict())
    vision.use_fp8(1)
    after = dict(vision.state_dict())
    quantised = {name.removesuffix(".scale") + ".weight" for name in after if ".scale" in name}
    assert len(quantised) == 4
    assert all(name.startswith("blocks.1.") and "ln" not in name for name in quantised)
    added = {name for name in after if not name.endswith(".scale")} - before.keys()
    assert added == {"blocks.1.mlp.centre"}
    for name, tensor in before.items():
        assert name in quantised or torch.equal(after[name], tensor), name
        assert after[name].dtype == (torch.float8_e4m3fn if name in quantised else dtype)
    out_TX = vision(pixels, (1, 2))
    assert out_TX.dtype == dtype
    assert 0.001 < relative_error(out_TX, truth_TX) < TOWER_ERROR


@pytest.mark.usefixtures("_inference")
def test_the_source_compiles_for_every_row(tmp_path, monkeypatch):
    """NVRTC takes the source for each row length of the models, also one warp's and the longest."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="the kernel compiler is not installed")
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    vision, text = moondream2_config().vision, moondream2_config().text
    dims = (vision.dim, vision.ff_dim, 2 * vision.dim, text.dim, text.ff_dim, 16)
    constants = [quantise.defines(dim) for dim in (*dims, quantise.MAX_DIM)]
    for each in constants:
        assert each["ROWS"] == 1 or each["WARPS"] == 1
        assert 32 * each["WARPS"] * each["ROWS"] <= 1024
    try:
        codes = {compile_source(quantise.SOURCE, each, "sm_90") for each in constants}
    except RuntimeError as error:
        pytest.skip(f"NVRTC's library is not installed: {error}")
    assert len(codes) == len(set(dims))


# ---------------------------------------------------------------- norm
# A residual sum and its norm, the tower that is made of them, and their kernels' source.
#
# Shape legend: N crops, T tokens, P values of a patch, D width, H heads, E head dim, K inputs.

LOAD = 16  # bytes of a load


def layer_norm(dim: int, dtype: torch.dtype) -> torch.nn.LayerNorm:
    """With weight and bias that are not its first ones."""
    layer = torch.nn.LayerNorm(dim, dtype=dtype)
    layer.weight.copy_(torch.randn(dim))
    layer.bias.copy_(torch.randn(dim))
    return layer


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
def test_the_sum_and_its_norm_are_torchs(dtype, count):
    """On the CPU every bit is that of an addition and a norm; the second term may repeat."""
    layer = layer_norm(48, dtype)
    x_NTK, y_NTK = torch.randn(3, 7, 48).to(dtype), torch.randn(count, 7, 48).to(dtype)
    expected = x_NTK + y_NTK
    for add_norm in (ops.add_norm, ops.add_norm_quantised):
        assert torch.equal(add_norm(x_NTK.clone(), y_NTK, layer)[0], expected)
    assert torch.equal(ops.add_norm(x_NTK, y_NTK, layer)[1], layer(expected))


@pytest.mark.usefixtures("_inference")
def test_the_norm_is_not_rounded_before_it_is_quantised():
    """The norm of a bf16 sum is that of float32, then quantised."""
    layer = layer_norm(48, torch.bfloat16)
    x_TK, y_TK = torch.randn(2, 5, 48).bfloat16()
    expected = reference.quantise(copy.deepcopy(layer).float()((x_TK + y_TK).float()))
    _, ours = ops.add_norm_quantised(x_TK, y_TK, layer)
    assert torch.equal(ours.values.float(), expected.values.float())
    assert torch.equal(ours.scale, expected.scale)


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tower_adds_block_by_block(dtype):
    """On the CPU every bit is that of pre-norm blocks that add what they compute to their input."""
    config = tiny_random_config()
    vision = random_weights(config, 0, CPU, dtype).vision
    sizes = config.vision
    patches_NTP = torch.randn(2, sizes.num_tokens, 3 * sizes.patch_size**2).to(dtype)
    x_NTD = vision.patch_emb(patches_NTP) + vision.pos_emb
    for block in vision.blocks:
        assert isinstance(block, VisionBlock)
        attention = block.attn
        assert isinstance(attention, Attention)
        assert isinstance(block.mlp, MLP)
        x_NTD = x_NTD + attention.join(ops.full_attention(*attention.split(block.ln1(x_NTD))))
        hidden = activations.gelu(block.mlp.fc1(block.ln2(x_NTD)))
        x_NTD = x_NTD + block.mlp.fc2(hidden)
    assert torch.equal(vision.encode_patches(patches_NTP), vision.post_ln(x_NTD))


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_gelu_is_the_tanh_form(dtype):
    """On the CPU every bit is that of the layer, then the tanh form of gelu."""
    linear = Linear(64, 48).to(dtype)
    x_TK = torch.randn(2, 9, 64).to(dtype) * 3
    assert torch.equal(linear.gelu(x_TK), activations.gelu(linear(x_TK)))


@pytest.mark.usefixtures("_inference")
def test_heads_are_read_where_the_projection_leaves_them():
    """Queries, keys and values are views of one tensor, aligned as kernels of attention ask."""
    sizes = moondream2_config().vision
    attn = Attention(sizes.dim, sizes.num_heads).bfloat16()
    heads = attn.split(torch.randn(1, 3, sizes.dim).bfloat16())
    first = heads[0].untyped_storage().data_ptr()
    for index, each_NTHE in enumerate(heads):
        assert each_NTHE.untyped_storage().data_ptr() == first
        assert each_NTHE.storage_offset() == index * sizes.dim
        assert each_NTHE.stride(-1) == 1
        places = (each_NTHE.storage_offset(), *each_NTHE.stride()[:-1])
        assert all(place * each_NTHE.element_size() % LOAD == 0 for place in places)


@pytest.mark.usefixtures("_inference")
def test_the_kernels_gelu_is_the_tanh_form():
    """By the constants in the source, x / (1 + 2^(x (LINEAR + CUBIC x^2))) is torch's gelu."""
    text = sources()[quantise.SOURCE]
    found = dict(re.findall(r"\b(LINEAR|CUBIC) = (-[0-9.]+)f", text))
    linear, cubic = float(found["LINEAR"]), float(found["CUBIC"])
    x = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    ours = x / (1 + torch.exp2(x * (linear + cubic * x * x)))
    # the other form, 1 + tanh, cancels where x is negative
    torch.testing.assert_close(ours, F.gelu(x, approximate="tanh"), rtol=1e-6, atol=1e-12)


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_the_source_of_norms_compiles_for_every_row(arch, tmp_path, monkeypatch):
    """NVRTC takes it for a warp's width and several warps'; without e4m3 one kernel is left."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="the kernel compiler is not installed")
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    try:
        codes = [
            compile_source(norm.SOURCE, quantise.defines(dim), arch)
            for dim in (moondream2_config().vision.dim, 2048)
        ]
    except RuntimeError as error:
        pytest.skip(f"NVRTC's library is not installed: {error}")
    for code in codes:
        assert b"add_norm\0" in code
        assert (b"add_norm_quantise\0" in code) == (arch != "sm_80")
