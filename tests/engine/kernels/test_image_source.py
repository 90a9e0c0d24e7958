"""The CUDA source of the image kernels, on the CPU: as C++ for its bits, by NVRTC for its syntax.

One thread runs the whole grid, because the loops stride over it.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import shutil
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.kernels.cuda.image_pipeline import SOURCE, defines
from legato_engine.kernels.cuda.module import compile_source
from legato_engine.kernels.image_staging import HostImage, stage
from legato_engine.kernels.images import CropGeometry, CutPlan, resize
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.models.moondream.vision import Vision, patches

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


def expected_crops(pixels_HWC, tiling):
    """The crops by the reference resize."""
    size, window = GEOMETRY.crop_size, GEOMETRY.crop_size - 2 * GEOMETRY.margin * 14
    crops = [resize(pixels_HWC, size, size)]
    if tiling != (1, 1):
        canvas = resize(pixels_HWC, *(GEOMETRY.canvas_size(tiles) for tiles in tiling))
        corners = np.ndindex(tiling)
        crops += [canvas[y * window :, x * window :][:size, :size] for y, x in corners]
    return np.stack(crops)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 250), st.integers(1, 250), st.sampled_from(TILINGS), st.integers(0, 2))
def test_patches_are_those_of_the_host(kernels, height, width, tiling, spare):
    """Resized, cut, normalised and patched as on the host, to the bit; spare crops are zeros."""
    rng = np.random.default_rng(height * 997 + width)
    pixels_HWC = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
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
