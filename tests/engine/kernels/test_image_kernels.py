"""The image kernels on the CPU: their source, tables of weights, and plans of cuts."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.resources
import math
import shutil
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from legato_engine.kernels.cuda.image_pipeline import SOURCE, defines
from legato_engine.kernels.cuda.module import compile_source
from legato_engine.kernels.images import (
    HEADER_WORDS,
    MAX_PIXELS,
    MAX_WORDS,
    PRECISION_BITS,
    TARGET_WORDS,
    CropGeometry,
    CutPlan,
    HostImage,
    num_weights,
    stage,
    table,
)
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.models.moondream.vision import Vision, patches
from PIL import Image

# ---------------------------------------------------------------- image source
# The CUDA source of the image kernels, on the CPU: as C++ for its bits, by NVRTC for its syntax.
#
# One thread runs the whole grid, because the loops stride over it.

GEOMETRY = CropGeometry(crop_size=56, patch_size=14, margin=1)
SHIM = """
#include <cstring>
#define __global__
#define __device__ static inline
struct Index { int x; };
static Index blockIdx, threadIdx, blockDim{1}, gridDim{1};
extern "C" void set_block(int x) { blockIdx.x = x; }
static inline float __uint_as_float(unsigned int bits) {
    float value; std::memcpy(&value, &bits, 4); return value;
}
static inline unsigned int __float_as_uint(float value) {
    unsigned int bits; std::memcpy(&bits, &value, 4); return bits;
}
"""
TILINGS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4), (1, 7), (5, 1)]


def test_the_source_compiles(tmp_path, monkeypatch):
    """NVRTC takes the source at the sizes of every model."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="the kernel compiler is not installed")
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    try:
        codes = [
            compile_source(SOURCE, defines(geometry), "sm_90")
            for geometry in (GEOMETRY, CropGeometry(378, 14, 4))
        ]
    except RuntimeError as error:
        pytest.skip(f"NVRTC's library is not installed: {error}")
    assert codes[0] != codes[1]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The source as a library of this machine."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("source")
    source = importlib.resources.files("legato_engine.kernels.cuda") / "sources" / SOURCE
    file, library = folder / "picture.cpp", folder / "picture.so"
    file.write_text(SHIM + source.read_text())
    options = [f"-D{name}={value}" for name, value in defines(GEOMETRY).items()]
    command = [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", *options]
    subprocess.run([*command, str(file), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def call(kernel, *arguments):
    """Call with pointers of tensors."""
    kernel(
        *(
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else value
            for value in arguments
        )
    )


def levels():
    """The 256 levels as the vision tower normalises them, bfloat16."""
    return torch.arange(256, dtype=torch.uint8).to(torch.bfloat16).div_(255.0).sub_(0.5).div_(0.5)


def noise(height, width):
    """[height, width, 3], half of it at the ends of the range, where results are clipped."""
    rng = np.random.default_rng(height * 10007 + width)
    pixels_HWC = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    ends_HWC = rng.choice(np.array([0, 255], np.uint8), (height, width, 3))
    return np.where(rng.random((height, width, 1)) < 0.5, pixels_HWC, ends_HWC)


def by_pillow(pixels_HWC, height, width):
    """The same by Pillow."""
    image = Image.fromarray(pixels_HWC)
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS))


def expected_crops(pixels_HWC, tiling):
    """The crops by Pillow."""
    size, window = GEOMETRY.crop_size, GEOMETRY.crop_size - 2 * GEOMETRY.margin * 14
    crops = [by_pillow(pixels_HWC, size, size)]
    if tiling != (1, 1):
        canvas = by_pillow(pixels_HWC, *(GEOMETRY.canvas_size(tiles) for tiles in tiling))
        corners = np.ndindex(tiling)
        crops += [canvas[y * window :, x * window :][:size, :size] for y, x in corners]
    return np.stack(crops)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 250), st.integers(1, 250), st.sampled_from(TILINGS), st.integers(0, 2))
@example(1, 1, (1, 1), 0)
@example(1, 500, (1, 7), 0)
@example(500, 1, (5, 1), 0)
@example(56, 56, (1, 1), 0)
@example(56, 900, (1, 1), 0)
@example(900, 56, (1, 1), 0)
@example(3000, 5, (2, 2), 0)
@example(700, 20, (3, 4), 0)
@example(583, 480, (2, 2), 0)
@example(582, 480, (2, 2), 0)
def test_patches_are_those_of_the_host(kernels, height, width, tiling, spare):
    """Resized, cut, normalised and patched as by Pillow, to the bit; spare crops are zeros."""
    pixels_HWC = noise(height, width)
    plan = CutPlan(height, width, tiling, GEOMETRY)
    host = HostImage(
        torch.empty(pixels_HWC.size, dtype=torch.uint8),
        torch.empty(plan.num_words, dtype=torch.int32),
    )
    staged = stage(pixels_HWC, plan, host)
    assert (staged.pixels.numel(), staged.num_words) == (pixels_HWC.size, plan.num_words)
    num_between = sum(3 * h * w for h, w in (target.intermediate_size for target in plan.targets))
    between = torch.empty(num_between, dtype=torch.uint8)
    call(kernels.image_first_pass, host.pixels, host.plan, between)
    wide_NTP = torch.full((plan.num_crops + spare, 16, 592), 7, dtype=torch.bfloat16)
    out_NTP, beyond_NTP = wide_NTP.split([588, 4], dim=-1)
    operands = (levels(), out_NTP, out_NTP.stride(1), len(out_NTP))
    call(kernels.image_patches, between, host.plan, *operands)
    crops = torch.from_numpy(expected_crops(pixels_HWC, tiling))
    values = crops.to(torch.bfloat16).div_(255.0).sub_(0.5).div_(0.5)
    assert torch.equal(out_NTP[: plan.num_crops], patches(values, 14))
    assert not out_NTP[plan.num_crops :].any()
    assert torch.equal(beyond_NTP, torch.full_like(beyond_NTP, 7))


@pytest.mark.parametrize("tiling", TILINGS)
def test_stitched_features_are_those_of_the_model(kernels, tiling):
    """Stitching and pooling agree with the vision tower's own; one rounding, of the average."""
    config = tiny_random_config().vision
    assert (config.crop_size, config.patch_size, config.overlap_margin) == (56, 14, 1)
    count, tokens, dim = 1 + tiling[0] * tiling[1], 16, 6
    generator = torch.Generator().manual_seed(3)
    features_NTD = torch.randn(count, tokens, dim, generator=generator).bfloat16()
    out_TD = torch.empty(tokens, 2 * dim, dtype=torch.bfloat16)
    for token in range(tokens):
        kernels.set_block(token)
        words = torch.tensor(tiling, dtype=torch.int32)
        call(kernels.stitch_pool, features_NTD, words, out_TD, dim // 2)
    assert torch.equal(out_TD[:, :dim], features_NTD[0])
    vision = Vision(config, 8)
    local_TD = features_NTD[0].float()
    if tiling != (1, 1):
        local_TD = vision.reconstruct(features_NTD[1:].float(), tiling)
    torch.testing.assert_close(out_TD[:, dim:].float(), local_TD, rtol=2**-8, atol=1e-6)
    kernels.set_block(0)


def test_averages_round_as_torch_does(kernels):
    """Ties go to even, and NaN stays NaN."""
    bits_D = torch.tensor([0x3F80, 0x3F81, 0x3F82, 0x3F83, 0x7F80, 0x7FC0], dtype=torch.int16)
    features_NTD = torch.zeros(3, 16, 6, dtype=torch.bfloat16)
    features_NTD[:, 0::2] = bits_D.view(torch.bfloat16)
    features_NTD[:, 1::2] = (bits_D + 1).view(torch.bfloat16)  # half way between them lies a tie
    out_TD = torch.empty(16, 12, dtype=torch.bfloat16)
    for token in range(16):
        kernels.set_block(token)
        call(kernels.stitch_pool, features_NTD, torch.tensor([1, 2], dtype=torch.int32), out_TD, 3)
    config = tiny_random_config().vision
    expected_TD = Vision(config, 8).reconstruct(features_NTD[1:].float(), (1, 2)).bfloat16()
    assert torch.equal(out_TD[:, 6:].isnan(), expected_TD.isnan())
    assert torch.equal(out_TD[:, 6:].nan_to_num(), expected_TD.nan_to_num())
    kernels.set_block(0)


# ---------------------------------------------------------------- lanczos
# Tables of weights.


@given(st.integers(1, 5000), st.integers(1, 1500))
def test_a_table_stays_inside_the_image(size_in, size_out):
    """No weight lies outside of the image, and the weights of a pixel add up to one."""
    weights = table(size_in, size_out)
    ends_O = weights.starts_O + weights.counts_O
    assert weights.starts_O.min() >= 0
    assert ends_O.max() <= size_in
    assert weights.weights_OK.shape == (size_out, num_weights(size_in, size_out))
    assert weights.counts_O.max() <= weights.weights_OK.shape[1]
    sums_O = weights.weights_OK.sum(axis=1)
    assert np.abs(sums_O - (1 << PRECISION_BITS)).max() <= weights.weights_OK.shape[1]


@pytest.mark.parametrize(("size_in", "size_out"), [(850, 378), (379, 910), (4000, 378), (7, 1176)])
def test_weights_are_those_of_the_math_library(size_in, size_out):
    """A weight worked out one by one is the one in the table."""
    weights = table(size_in, size_out)
    scale = size_in / size_out
    stretch = max(scale, 1.0)

    def lanczos(x):
        if x == 0.0:
            return 1.0
        if not -3.0 <= x < 3.0:
            return 0.0
        part = x / 3.0 * math.pi
        return math.sin(x * math.pi) / (x * math.pi) * (math.sin(part) / part)

    for pixel in range(size_out):
        start, count = int(weights.starts_O[pixel]), int(weights.counts_O[pixel])
        centre = (pixel + 0.5) * scale
        row = [lanczos((tap + start - centre + 0.5) * (1.0 / stretch)) for tap in range(count)]
        total = 0.0
        for value in row:
            total += value
        fixed = [value / total * (1 << PRECISION_BITS) for value in row]
        expected = [int(value + math.copysign(0.5, value)) for value in fixed]
        assert weights.weights_OK[pixel, :count].tolist() == expected
        assert not weights.weights_OK[pixel, count:].any()


def test_tables_cannot_be_changed():
    """Tables are read-only, because they are shared."""
    assert table(10, 20) is table(10, 20)
    with pytest.raises(ValueError, match="read-only"):
        table(10, 20).weights_OK[0, 0] = 1


# ---------------------------------------------------------------- plans of cuts

FULL_GEOMETRY = CropGeometry(crop_size=378, patch_size=14, margin=4)


def test_the_layout_of_a_plan():
    """The words say what the kernels read from them, by the order of the passes."""
    plan = CutPlan(height=640, width=480, tiling=(4, 2), geometry=FULL_GEOMETRY)
    words = np.full(plan.num_words + 1, -7, np.int32)
    assert plan.write(words) == plan.num_words
    assert words[-1] == -7
    assert words[:HEADER_WORDS].tolist() == [4, 2, 480, 9]
    whole = words[HEADER_WORDS:][:TARGET_WORDS].tolist()
    tables_at = HEADER_WORDS + 2 * TARGET_WORDS
    assert whole == [378, 480, 1, tables_at, 378, 13, tables_at + 378 * 15, 378, 9]
    canvas = words[HEADER_WORDS + TARGET_WORDS :][:TARGET_WORDS].tolist()
    columns_at = tables_at + 378 * (15 + 11)
    assert canvas == [640, 644, 0, columns_at, 644, 7, columns_at + 644 * 9, 1176, 7]


def test_an_untiled_image_has_no_canvas():
    """The canvas of a tiling of (1, 1) has no pixels, whatever the words held before."""
    plan = CutPlan(height=300, width=200, tiling=(1, 1), geometry=FULL_GEOMETRY)
    words = np.full(MAX_WORDS, -7, np.int32)
    plan.write(words)
    assert plan.num_crops == 1
    assert not words[HEADER_WORDS + TARGET_WORDS :][:TARGET_WORDS].any()


@pytest.mark.parametrize(
    ("size", "tiling", "fits"),
    [
        ((4096, 4096), (3, 3), True),
        ((4097, 4096), (3, 3), False),
        ((2000, 8000), (1, 6), True),
        ((1, MAX_PIXELS), (1, 1), False),
        ((MAX_PIXELS, 1), (1, 1), False),
        ((1, 1), (1, 1), True),
        ((1, 30000), (1, 1), True),
    ],
)
def test_what_has_room(size, tiling, fits):
    """Large and very long images do not fit; the largest square does."""
    height, width = size
    assert CutPlan(height, width, tiling, FULL_GEOMETRY).fits is fits


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([(1, 1), (3, 4), (1, 9)]))
def test_what_fits_is_within_the_buffers(height, width, tiling):
    """A plan that fits overruns neither the pixels between the passes nor the words."""
    plan = CutPlan(height, width, tiling, FULL_GEOMETRY)
    if plan.fits:
        assert (
            sum(h * w for h, w in (target.intermediate_size for target in plan.targets))
            <= MAX_PIXELS
        )
        assert plan.num_words <= MAX_WORDS
        assert height * width <= MAX_PIXELS


def test_a_plan_is_a_value():
    """Two plans of one image are equal."""
    plan = CutPlan(30, 20, (1, 1), FULL_GEOMETRY)
    assert plan == dataclasses.replace(plan)
    assert plan != dataclasses.replace(plan, tiling=(2, 1))
