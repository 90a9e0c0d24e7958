"""Products of the decode step: packed weights, shared memory and launches."""

from __future__ import annotations

import dataclasses
import importlib.resources
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.kernels.cuda import attention, capability, decoder, skinny_gemm, tau_decoder
from legato_engine.kernels.cuda.attention import MAX_TOKENS, attention_forms
from legato_engine.kernels.cuda.capability import Gpu
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    DecoderSizes,
    decode_form,
    fitting_stages,
    out_shared,
)
from legato_engine.kernels.cuda.skinny_gemm import (
    fold_norm,
    pack,
    pack_codes,
    packed_map,
    pair_rotated,
)
from legato_engine.kernels.cuda.tau_decoder import TauSizes
from legato_engine.kernels.cuda.value_heads import ValueSizes, value_stages
from legato_engine.kernels.map_codes import GROUP, KINDS, WeightKind, format_of, map_codes
from legato_engine.models.moondream.decode_step import tau_sizes, value_sizes
from legato_engine.models.moondream.presets import (
    legato_tiny_config,
    moondream2_config,
    moondream3_config,
)
from legato_engine.models.moondream.text import WeightKinds

from tests.engine.kernels.cases import BLOCKS, FORMATS, random_codes

# ---------------------------------------------------------------- skinny gemm
# What the launches take of shared memory fits the GPU, and agrees with the kernels' headers.

MOST = 232448  # bytes of shared memory that a thread block of an H200 may have
PROCESSOR = 233472  # that a processor has, `RESERVED` of them taken for each thread block
RESERVED = 1024
EXPERT_STATIC = 4096  # what the experts' kernels know of routes
GAINS_STATIC = 1024
STATIC = 384  # bytes at most that these kernels have beside the dynamic ones
STAGE = 4096  # keys and values of a step
PART = 68 * 4  # a token's part
PAGE = 16
QUANTISED = [WeightKind.E4M3, WeightKind.INT8, WeightKind.INT4]
EXPERT_KINDS = [
    WeightKinds(),
    WeightKinds(experts=WeightKind.E4M3),
    *(WeightKinds(kind, kind.of_head, kind) for kind in QUANTISED),
]
"""Those of Moondream 3, also as its publisher has quantised it."""
CONFIGS = {"moondream2": moondream2_config(), "legato-tiny": legato_tiny_config()}


def sizes_of(name: str) -> tuple[DecoderSizes, ValueSizes]:
    """A model's sizes, as its kernels are compiled."""
    config = CONFIGS[name]
    text = config.text
    pages = -(-text.max_context // PAGE)
    decode = DecoderSizes(
        dim=text.dim,
        ff_dim=text.ff_dim,
        num_heads=text.num_heads,
        rotary_dim=text.rotary_dim,
        vocab_size=text.vocab_size,
        page_size=PAGE,
        max_pages=pages,
    )
    return decode, value_sizes(config)


def expert_sizes(kinds: WeightKinds) -> TauSizes:
    """Moondream 3's sizes, in its whole context."""
    decode, _ = sizes_of("moondream2")  # the same but for the context
    decode = dataclasses.replace(
        decode,
        max_pages=attention.MAX_CONTEXT // PAGE,
        weight_kind=kinds.maps,
        head_kind=kinds.head,
    )
    return tau_sizes(moondream3_config(), decode, kinds.experts)


def expert_shared(kinds: WeightKinds, batch: int) -> dict[str, int]:
    """Dynamic shared memory of the launches of Moondream 3's experts."""
    sizes = expert_sizes(kinds)
    launches = {
        "experts_up": tau_decoder.up_stages(sizes, batch),
        "experts_out": tau_decoder.out_stages(sizes, batch),
    }
    assert min(stages for stages, _ in launches.values()) >= 2
    return {name: num_bytes for name, (_, num_bytes) in launches.items()}


def dynamic_shared(name, batch):
    """Dynamic shared memory of each kernel's launch."""
    decode, region = sizes_of(name)
    assert region.inner_dim is not None
    tiles = skinny_gemm.tiles_for(batch)
    fitted = fitting_stages(decode, DEFAULT_STAGES)
    inner_stages, bins_stages = value_stages(region)
    whole = {
        "layer_in": fitted.layer_in[tiles],
        "head": fitted.head[tiles],
        "value_inner": inner_stages[tiles],
    }
    shared = {name: skinny_gemm.whole_shared(decode.dim, batch, n) for name, n in whole.items()}
    form, stages = decode_form(decode, batch), fitted.layer_out[tiles]
    shared["layer_out"] = out_shared(decode, form, batch, stages)
    bins = region.inner_dim, region.parts, batch, bins_stages[tiles]
    shared["value_bins"] = skinny_gemm.parts_shared(*bins)
    if batch <= decoder.MOST_TOKENS and decoder.fits(decode):
        shared["layer_boundary"] = decoder.shared_bytes(decode)
    return shared


def most_tokens(name: str) -> int:
    """Of a launch that fits the current GPU."""
    stages = fitting_stages(sizes_of(name)[0], DEFAULT_STAGES)
    return skinny_gemm.most_tokens(stages.layer_in, stages.layer_out, stages.head)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch", range(1, MAX_TOKENS + 1))
def test_every_launch_fits_the_gpu(name, batch):
    """No batch asks for more than a thread block may have, nor for more than its kernel allows."""
    full = dynamic_shared(name, 8 * skinny_gemm.tiles_for(batch))
    for kernel, num_bytes in dynamic_shared(name, batch).items():
        assert num_bytes + STATIC <= MOST, kernel
        assert num_bytes <= full[kernel], kernel


@pytest.mark.parametrize("kinds", EXPERT_KINDS)
@pytest.mark.parametrize("batch", range(1, MAX_TOKENS + 1))
def test_the_experts_launches_fit_the_gpu(batch, kinds):
    """As above; each takes more than half of a processor, and the gains fit beside it."""
    for kernel, num_bytes in expert_shared(kinds, batch).items():
        assert num_bytes > MOST // 2, kernel
        assert num_bytes + EXPERT_STATIC + GAINS_STATIC + 2 * 1024 <= PROCESSOR, kernel


@pytest.mark.parametrize("batch", range(1, MAX_TOKENS + 1))
def test_the_rings_of_attention_fit_the_gpu(batch):
    """The rings of all warps, and what they compute, leave room for one thread block alone."""
    assert MOST // 2 < attention.shared_bytes(1, DEFAULT_STAGES.attend, batch) <= MOST


@pytest.mark.parametrize("batch", [1, 8])
def test_attention_that_is_split_fits_beside_other_kernels(batch):
    """Where a cluster shares a head, a step of one group keeps two kernels on a processor."""
    mine = attention.shared_bytes(4, DEFAULT_STAGES.attend_split, batch)
    for name in ("layer_in", "layer_out", "layer_boundary"):
        others = dynamic_shared("moondream2", batch)[name] + STATIC
        assert mine + others + 2 * RESERVED <= PROCESSOR, name


@pytest.mark.parametrize("kinds", EXPERT_KINDS)
@pytest.mark.parametrize("batch", [1, 2])
def test_attention_that_is_split_fits_beside_the_experts(kinds, batch):
    """Likewise for a few rows of Moondream 3, and the gains beside both."""
    mine = attention.shared_bytes(4, DEFAULT_STAGES.attend_split, batch) + GAINS_STATIC
    for kernel, num_bytes in expert_shared(kinds, batch).items():
        assert mine + num_bytes + EXPERT_STATIC + 2 * RESERVED <= PROCESSOR, kernel


def test_a_warp_has_room_for_what_it_computes():
    """With splits a ring also holds its warp's parts, and those of the lines that it adds up."""
    for splits in attention.SPLITS[1:]:
        parts = attention.GROUP + attention.GROUP // splits
        assert parts * PART <= DEFAULT_STAGES.attend_split * STAGE


@pytest.mark.parametrize("batch", range(1, MAX_TOKENS + 1))
def test_wide_kernels_never_share_a_processor(batch):
    """At Moondream 2's sizes every kernel takes more than half of the memory.

    One does not, for one or two tokens: with a ring that deep it is slower.
    """
    for kernel, num_bytes in dynamic_shared("moondream2", batch).items():
        assert num_bytes > MOST // 2 or (kernel == "layer_in" and batch <= 2), kernel


def test_narrow_kernels_have_a_processor_each(monkeypatch):
    """Where a thread block takes less, an H200 has as many processors as there are blocks."""
    monkeypatch.setattr(skinny_gemm, "num_processors", lambda: 132)
    decode, region = sizes_of("legato-tiny")
    assert (3 * decode.dim + decode.ff_dim) // 16 <= skinny_gemm.num_processors()
    assert decode.vocab_size // 16 <= skinny_gemm.num_processors()
    assert decode.dim // 16 <= skinny_gemm.num_processors()
    assert region.inner_dim is not None
    assert 2 * region.inner_dim // 16 <= skinny_gemm.num_processors()


@pytest.mark.parametrize("blocks", [1, 20, 120, 131, 132, 133, 512, 896, 1320, 1321, 3200])
def test_a_grid_is_even(monkeypatch, blocks):
    """All thread blocks have the same number of blocks, or one less, and run at once."""
    monkeypatch.setattr(skinny_gemm, "num_processors", lambda: 132)
    grid = skinny_gemm.even_grid(blocks)
    counts = {len(range(first, blocks, grid)) for first in range(grid)}
    assert grid <= 132
    assert max(counts) == -(-blocks // 132)
    assert min(counts) >= max(counts) - 1


@pytest.mark.parametrize("blocks", [4, 20, 120, 132, 512, 896, 900, 1320, 3200])
def test_a_grid_is_of_whole_clusters(monkeypatch, blocks):
    """Every thread block of every cluster has something to do, and all run at once."""
    monkeypatch.setattr(skinny_gemm, "num_processors", lambda: 132)
    grid = skinny_gemm.even_grid(blocks, skinny_gemm.CLUSTER)
    assert grid % skinny_gemm.CLUSTER == 0
    assert grid <= min(blocks, 132)


@pytest.mark.parametrize("batch", range(1, MAX_TOKENS + 1))
def test_a_batch_takes_the_fewest_tiles(batch):
    """Tiles hold the batch, and the next smaller number of them would not."""
    tiles = skinny_gemm.tiles_for(batch)
    assert batch <= 8 * tiles
    assert all(batch > 8 * fewer for fewer in skinny_gemm.TILES if fewer < tiles)


def constants(file: str) -> dict[str, int]:
    """The `constexpr int` numbers of a source that others of them do not need the compiler for."""
    folder = importlib.resources.files("legato_engine.kernels.cuda") / "sources"
    found: dict[str, int] = {}
    text = (folder / file).read_text()
    for name, product in re.findall(r"^constexpr int (\w+) = ([\w *]+);", text, re.MULTILINE):
        factors = [found.get(factor, factor) for factor in product.split(" * ")]
        if all(str(factor).isdigit() for factor in factors):
            found[name] = 1
            for factor in factors:
                found[name] *= int(factor)
    return found


def test_the_header_has_the_same_numbers():
    """Threads, groups, padding and finishers are those of the sources, and barriers as large."""
    header = constants("stage_ring.cuh")
    assert header["WARPS"] == skinny_gemm.WARPS
    assert header["WORKERS"] == skinny_gemm.WORKERS == skinny_gemm.THREADS - 64
    assert header["GROUP"] == GROUP
    assert header["PAD"] == skinny_gemm.PAD
    assert header["INPUT_BARRIERS"] == skinny_gemm.INPUT_BARRIERS
    header = constants("block_map.cuh")
    assert header["SUM_BARRIERS"] == skinny_gemm.SUM_BARRIERS


def test_attention_has_the_same_numbers():
    """Sizes are those of `paged_attention.cu`: a stage has the keys and values of one step."""
    files = ("kv_tiles.cuh", "softmax_parts.cuh", "paged_attention.cu")
    source = {name: value for file in files for name, value in constants(file).items()}
    assert source["TILE"] == attention.TILE
    assert source["MOST"] == attention.GROUP
    assert 2 * source["TILE"] * attention.HEAD_DIM * 2 == STAGE
    assert attention.shared_bytes(4, 1, 1) == source["LINES"] * (STAGE + 8)
    assert attention.shared_bytes(1, 0, 3) == 2 * 2 * source["LINES"] * 3 * PART


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("gpu", "tokens"), [((8, 0), 32), ((8, 6), 8), ((8, 9), 8), ((9, 0), 32), ((12, 0), 8)]
)
def test_launches_are_cut_to_the_shared_memory_of_each_gpu(monkeypatch, name, gpu, tokens):
    """Rings get shallower and launches of Moondream 2 smaller; on Hopper nothing changes."""
    monkeypatch.setattr(capability, "current_gpu", lambda: Gpu(gpu))
    decode, _ = sizes_of(name)
    stages = fitting_stages(decode, DEFAULT_STAGES)
    if gpu == (9, 0):
        assert stages == DEFAULT_STAGES
    assert most_tokens(name) == (tokens if name == "moondream2" else MAX_TOKENS)
    for form in attention_forms(DEFAULT_STAGES.attend, DEFAULT_STAGES.attend_split):
        shared = attention.shared_bytes(form.splits, form.stages, 8, form.line_warps)
        assert shared <= Gpu(gpu).shared
    for kinds in EXPERT_KINDS:  # Moondream 3's experts have no room in less, but for int4
        has_room = Gpu(gpu).shared > 100 * 1024 or kinds.experts is WeightKind.INT4
        assert (tau_decoder.max_tokens(expert_sizes(kinds)) >= 8) == has_room


# ---------------------------------------------------------------- packing
# Packed weights are in the kernels' order, and folded maps equal the maps they replace.
#
# Shape legend: O outputs, I inputs, B tokens.

WARPS = 8


def read_back(packed, outputs, inputs, parts):
    """[O, I] weights out of their packed order, as `skinny_gemm.cuh` describes it.

    A block of 16 rows, then its stages. Of a stage each warp has 64 inputs: a run of 32 lanes with
    8 values each for rows 0-7 and the first 32 inputs, one for the others, then rows 8-15.
    """
    groups = inputs // parts // 64
    chunk = 64 * max(g for g in range(1, WARPS + 1) if groups % g == 0)
    at = torch.arange(outputs * inputs)
    value, lane, run = at % 8, at // 8 % 32, at // 256 % 4
    warp = at // 1024 % (chunk // 64)
    stage = at // (16 * chunk) % (inputs // chunk)
    row = at // (16 * inputs) * 16 + run // 2 * 8 + lane // 4
    column = stage * chunk + warp * 64 + run % 2 * 32 + lane % 4 * 8 + value
    weights_OI = torch.full((outputs, inputs), -1, dtype=packed.dtype)
    weights_OI[row, column] = packed.flatten()
    return weights_OI


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.sampled_from([1, 2, 4]))
def test_every_weight_stands_where_it_is_read(blocks, groups, parts):
    """Reading weights back in the kernels' documented order gives the map again."""
    outputs, inputs = 16 * blocks, 64 * groups * parts
    weights_OI = torch.arange(outputs * inputs, dtype=torch.int32).view(outputs, inputs)
    packed = pack(weights_OI, parts)
    assert packed.is_contiguous()
    assert torch.equal(read_back(packed, outputs, inputs, parts), weights_OI)


@pytest.mark.parametrize("heads", [1, 5, 32])
def test_rotated_pairs_share_a_lane(heads):
    """The partner of a rotated row is 8 rows after it; the rest of a head keeps its order."""
    order = pair_rotated(heads, torch.device("cpu"))
    assert torch.equal(order.sort().values, torch.arange(3 * heads * 64))
    within = order.view(3 * heads, 4, 2, 8) - 64 * torch.arange(3 * heads).view(-1, 1, 1, 1)
    first, second = within[:, :, 0], within[:, :, 1]
    assert torch.equal(second[:, :2], first[:, :2] + 16)
    assert torch.equal(first[:, :2].flatten(1), torch.arange(16).expand(3 * heads, -1))
    assert torch.equal(within[:, 2:].flatten(1), torch.arange(32, 64).expand(3 * heads, -1))


def folded_map(x_BI, weights_OI, folded_O2):
    """The map of raw inputs as the kernels compute it, in float64."""
    x_BI, (sums_O, biases_O) = x_BI.double(), folded_O2.double().unbind(1)
    mean_B1 = x_BI.mean(1, keepdim=True)
    scale_B1 = (x_BI.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    return scale_B1 * (x_BI @ weights_OI.double().T - mean_B1 * sums_O) + biases_O


def random_map(dtype):
    """A map with its bias, and a norm's scale and shift."""
    generator = torch.Generator().manual_seed(3)
    shapes = (48, 192), (48,), (192,), (192,)
    weights, bias, scale, shift = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return weights, bias, (scale + 1, shift)


def test_a_folded_norm_is_the_norm_before_the_map():
    """Scale, mean and deviation taken out of the sum give the same outputs."""
    weights_OI, bias_O, (scale_I, shift_I) = random_map(torch.float64)
    x_BI = torch.randn(7, 192, dtype=torch.float64) * 3 + 5
    normed_BI = F.layer_norm(x_BI, (192,), scale_I, shift_I, eps=1e-5)
    folded = folded_map(x_BI, *fold_norm(weights_OI, bias_O, (scale_I, shift_I)))
    torch.testing.assert_close(folded, F.linear(normed_BI, weights_OI, bias_O), rtol=0, atol=1e-4)


def test_a_mean_falls_out_of_rounded_weights():
    """What is taken off for the mean is the sum of the weights as they are stored."""
    weights_OI, bias_O, norm = random_map(torch.bfloat16)
    scaled_OI, folded_O2 = fold_norm(weights_OI, bias_O, norm)
    assert scaled_OI.dtype is torch.bfloat16
    x_BI = torch.ones(1, 192)  # a deviation of zero: what is left of the mean counts 316 times
    expected_O = weights_OI.double() @ norm[1].double() + bias_O.double()
    torch.testing.assert_close(
        folded_map(x_BI, scaled_OI, folded_O2)[0], expected_O, rtol=0, atol=0.05
    )


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.03), ("int8", 0.01), ("int4", 0.1)])
@pytest.mark.parametrize("parts", [1, 2])
def test_quantised_maps_are_near_their_weights(name, most, parts):
    """Read back in their own order, rows and columns are those of the map; zeros stay zeros."""
    torch.manual_seed(0)
    weights_OI = torch.randn(48, 256).bfloat16()
    weights_OI[5] = 0.0
    order_O = torch.randperm(48)
    packed = packed_map(weights_OI, KINDS[name], parts, order_O)
    read_OI = packed.dequantised()
    assert (read_OI - weights_OI.float()).norm() < most * weights_OI.float().norm()
    assert (read_OI[5] == 0).all()
    assert packed.data.nbytes <= weights_OI.nbytes * packed.kind.stage_bytes(64) // 2048
    rows, columns = slice(0, 48), slice(64, 192)
    assert torch.equal(packed.part(rows, columns), read_OI[:, columns].bfloat16())


@pytest.mark.parametrize("group", [64, 128])
def test_int4_has_a_scale_for_each_group(group):
    codes = map_codes(torch.randn(48, 384), format_of(KINDS["int4"], group))
    assert codes.scales is not None
    assert codes.scales.shape == (48, 384 // group)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parts", [1, 2])
def test_codes_are_packed_with_their_values(name, parts):
    """Of any format, in any order of rows; a scale of 128 inputs is that of each 64 of them."""
    codes = random_codes(name, 48, 384, of_gpu=True)
    for order_O in (None, torch.randperm(48)):
        packed = pack_codes(codes, parts, order_O)
        assert torch.equal(packed.dequantised(), codes.dequantised())


def test_blocks_keep_their_scales_and_minima_but_those_of_q4_k():
    """A GPU has them in fp16, as the file of the other formats: 2^-11 off at most."""
    for name in BLOCKS:
        exact_OI = random_codes(name, 48, 384).dequantised()
        codes = random_codes(name, 48, 384, of_gpu=True)
        if name != "Q4_K":
            assert torch.equal(codes.dequantised(), exact_OI)
            continue
        assert codes.scales is not None
        assert codes.minima is not None
        size_OG = 15 * codes.scales.abs() + codes.minima.abs()
        size_OI = size_OG.float().repeat_interleave(32, dim=1)
        assert ((codes.dequantised() - exact_OI).abs() <= 2**-11 * size_OI + 1e-6).all()
