"""The CUDA sources of the prefill's kernels and of fused attention, on the CPU."""

from __future__ import annotations

import ctypes
import importlib.resources
import itertools
import shutil
import subprocess
from itertools import product

import pytest
import torch
from legato_engine.kernels import pages, reference
from legato_engine.kernels.cuda.capability import gpu_of_arch
from legato_engine.kernels.cuda.fused_attention import SOURCE as FUSED_SOURCE
from legato_engine.kernels.cuda.fused_attention import (
    WARP_SOURCE,
    cut_tiles,
    shared_bytes,
    warp_defines,
    warp_shared,
)
from legato_engine.kernels.cuda.fused_attention import defines as fused_defines
from legato_engine.kernels.cuda.module import compile_source
from legato_engine.kernels.cuda.prefill import SOURCE, defines
from legato_engine.layers.rope import Rope

from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import ARCHS, usages

HEADS, HEAD_DIM, PAGE, PAGES = 3, 64, 4, 9
THREADS = 256
SHIM = """
#include <cmath>
#include <cstring>
#define __global__
#define __device__ inline
#define __forceinline__
#define __launch_bounds__(...)
typedef unsigned short bf16;
typedef unsigned int u32;
typedef long long i64;
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x, y, z; };
static Index blockIdx, threadIdx;
static u32 given[32][64];
static int calls;
static void wait_previous() {}
static bool noting;
static u32 __shfl_xor_sync(u32, u32 value, int lanes) {
    int lane = threadIdx.x % 32, call = calls++;
    if (noting) given[lane][call] = value;
    return given[lane ^ lanes][call];
}
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float low_float(u32 pair) { pair <<= 16; float f; std::memcpy(&f, &pair, 4); return f; }
static float high_float(u32 pair) { return low_float(pair >> 16); }
static u32 bits(float f) {
    u32 b; std::memcpy(&b, &f, 4); return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
static u32 pack(float low, float high) { return bits(low) | bits(high) << 16; }
struct uint2 { u32 x, y; };
#if KV_BYTES == 1
typedef unsigned char Element;
static float e4m3(int code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code & 128 ? -value : value;
}
static Element to_element(float x, float scale) {  // the nearest code; of two the even one
    float value = low_float(bits(x)) / scale;
    int best = 0;
    for (int code = 1; code < 127; code++) {
        float size = std::fabs(value);
        float gain = std::fabs(e4m3(best) - size) - std::fabs(e4m3(code) - size);
        if (gain > 0 || (gain == 0 && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(value) ? 128 : 0);
}
static float from_element(Element x, float scale) { return e4m3(x) * scale; }
#else
typedef bf16 Element;
#endif
static uint4 load_fresh(const void* p) { return *(const uint4*)p; }
static i64 load_fresh_i64(const i64* p) { return *p; }
extern "C" void set_row(int y, int z) { blockIdx.y = y; blockIdx.z = z; }
extern "C" void set_lane(int block, int thread, int note) {
    blockIdx.x = block; threadIdx.x = thread; noting = note; calls = 0;
}
"""


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    ("arch", "kv_bytes"), [("sm_80", 2), ("sm_90", 2), ("sm_100", 2), ("sm_89", 1), ("sm_90", 1)]
)
@pytest.mark.parametrize("num_heads", [5, 32])
def test_the_source_compiles_without_spills(tmp_path, monkeypatch, num_heads, arch, kv_bytes):
    """All kernels compile where they run and keep everything in registers."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    found = usages(compile_source(SOURCE, defines(num_heads, 16, kv_bytes), arch))
    assert set(found) == {"rotate_and_cache", "add3", "copy_pages"}
    assert not any(usage.stack for usage in found.values())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The source as libraries of this machine, by the bytes of a key's or value's element."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = importlib.resources.files("legato_engine.kernels.cuda") / "sources" / SOURCE
    built = {}
    for kv_bytes in (1, 2):
        folder = tmp_path_factory.mktemp("source")
        file, library = folder / "prefill.cpp", folder / "prefill.so"
        file.write_text(SHIM + source.read_text().replace('#include "kv_element.cuh"', ""))
        options = [f"-D{name}={value}" for name, value in defines(HEADS, PAGE, kv_bytes).items()]
        command = [compiler, "-O2", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", *options]
        subprocess.run([*command, str(file), "-o", str(library)], check=True)
        built[kv_bytes] = ctypes.CDLL(str(library))
    return built


def pointers(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    """What a kernel takes them by."""
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def rotate_and_cache(kernels, qkv_CT3HE, rope, pages_CM, caches, scale_2, start, place=None):
    """Run the kernel, warp by warp."""
    kernels = kernels[caches[0].element_size()]
    num_sequences, count = qkv_CT3HE.shape[:2]
    scales = ctypes.c_void_p(None if scale_2 is None else scale_2.data_ptr())
    fixed = pointers(rope.cos_PR, rope.sin_PR, pages_CM)
    real = pointers(qkv_CT3HE), pointers(*caches)
    given = ctypes.c_void_p(None if place is None else place.data_ptr())
    numbers = given, start, count, pages_CM.stride(0)
    for sequence, warp in product(range(num_sequences), range(-(-count * HEADS * 8 // 32))):
        kernels.set_row(sequence, 0)
        wasted = [x.clone() for x in (qkv_CT3HE, *caches)]
        waste = pointers(wasted[0]), pointers(*wasted[1:])
        for note, (qkv, pair) in ((1, waste), (0, real)):
            for lane in range(32):
                kernels.set_lane(warp // 8, warp % 8 * 32 + lane, note)
                kernels.rotate_and_cache(*qkv, *fixed, *pair, scales, *numbers)
    kernels.set_row(0, 0)


SCALE_2 = torch.tensor([0.005, 0.3])


@pytest.mark.parametrize("scale_2", [None, SCALE_2], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 14), (5, 11), (7, 23)])
def test_rotation_has_the_bits_of_the_reference(kernels, start, count, scale_2):
    """Queries and keys of two sequences are rotated as in torch and written to their slots.

    Nothing else changes. With e4m3, some of which saturates, keys and values become what is read
    back.
    """
    generator = torch.Generator().manual_seed(start)
    rope = Rope(10000.0, 32, 40)
    rope.fill(torch.device("cpu"))
    qkv_CT3HE = torch.randn(2, count, 3, HEADS, HEAD_DIM, generator=generator).bfloat16()
    scales = pages.units(scale_2)
    like = torch.full((2 * PAGES + 1, HEADS, PAGE, HEAD_DIM), 7.0).bfloat16()
    caches = [pages.quantise(like, scale).clone() for scale in scales]
    pages_CM = (torch.randperm(2 * PAGES, generator=generator) + 1).view(2, PAGES)[:, :-1]
    positions_T = torch.arange(start, start + count)
    angles = rope.at(positions_T.repeat(2))
    qkv_N3HE = qkv_CT3HE.flatten(0, 1)
    q_NHE, k_NHE = (reference.rotate(qkv_N3HE[:, i], *angles) for i in (0, 1))
    new = (k_NHE, qkv_N3HE[:, 2].clone())
    stored = [pages.quantise(x, scale) for x, scale in zip(new, scales, strict=True)]
    read = [pages.dequantise(x, s, like.dtype) for x, s in zip(stored, scales, strict=True)]
    expected = torch.stack([q_NHE, *read], 1)
    expected_caches = [cache.clone() for cache in caches]
    where = pages_CM[:, positions_T // PAGE].flatten(), (positions_T % PAGE).repeat(2)
    for cache, new_NHE in zip(expected_caches, stored, strict=True):
        pages.write_kv(cache, new_NHE, *where)
    rotate_and_cache(kernels, qkv_CT3HE, rope, pages_CM, caches, scale_2, start)
    assert torch.equal(qkv_N3HE, expected)
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        assert torch.equal(pages.indexable(cache), pages.indexable(expected_cache))


def test_a_place_in_memory_is_that_of_an_argument(kernels):
    """Tokens before the padding are rotated and written from there; nothing else changes."""
    generator = torch.Generator().manual_seed(1)
    rope = Rope(10000.0, 32, 40)
    rope.fill(torch.device("cpu"))
    given = torch.randn(1, 9, 3, HEADS, HEAD_DIM, generator=generator).bfloat16()
    pages_CM = torch.randperm(PAGES, generator=generator)[None]
    caches = [torch.zeros(PAGES, HEADS, PAGE, HEAD_DIM).bfloat16() for _ in range(2)]
    expected_caches = [cache.clone() for cache in caches]
    ours, theirs = given.clone(), given[:, :6].clone()
    place_2 = torch.tensor([7, 6])
    rotate_and_cache(kernels, ours, rope, pages_CM, caches, None, 3, place_2)
    rotate_and_cache(kernels, theirs, rope, pages_CM, expected_caches, None, 7)
    assert torch.equal(ours, torch.cat([theirs, given[:, 6:]], 1))
    for cache, expected in zip(caches, expected_caches, strict=True):
        assert torch.equal(cache, expected)


def test_a_sum_of_three_is_rounded_once(kernels):
    """The sum is that of float32, and nothing after the last term is written."""
    x, y, z = (torch.randn(3, 40).mul_(10.0**i).bfloat16() for i in (0, 1, -1))
    out = torch.full((136,), 7.0).bfloat16()
    for thread in range(THREADS):
        kernels[2].set_lane(0, thread, 0)
        kernels[2].add3(*pointers(x, y, z, out), x.numel() // 8)
    assert torch.equal(out[:120].view_as(x), (x.float() + y.float() + z.float()).bfloat16())
    assert torch.equal(out[120:], torch.full((16,), 7.0).bfloat16())


def test_pages_are_copied_in_every_layer(kernels):
    """Their keys and values, to the last byte, and no other page changes."""
    shape = (2, PAGES, HEADS, PAGE, HEAD_DIM)
    caches = [torch.randn(shape).bfloat16() for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        cache[:, 7] = cache[:, 2]
        cache[:, 1] = cache[:, 4]
    pairs_K2 = torch.tensor([[2, 7], [0, 0], [4, 1]])
    page_loads = HEADS * PAGE * HEAD_DIM // 8
    for layer, which in itertools.product(range(2), range(2 * len(pairs_K2))):
        kernels[2].set_row(layer, which)
        for thread in range(-(-page_loads // THREADS) * THREADS):
            kernels[2].set_lane(thread // THREADS, thread % THREADS, 0)
            kernels[2].copy_pages(*pointers(*caches, pairs_K2), PAGES, page_loads)
    for cache, expected_cache in zip(caches, expected, strict=True):
        assert torch.equal(cache, expected_cache)


# ---------------------------------------------------------------- fused attention source
# Fused attention: its source's registers hold what they must, and its tiles are every head's.

MOST_SHARED = 227 * 1024  # bytes of a thread block on Hopper
FEW = 256
SIZES = [(72, 16, 729), (64, 32, 730), (64, 5, 129), (72, 4, 1000)]


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("head_dim", "num_heads", "num_tokens"), SIZES)
def test_nothing_is_kept_in_local_memory(tmp_path, monkeypatch, head_dim, num_heads, num_tokens):
    """Scores, weights and results stay in registers, for images' sizes and larger ones."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    constants = fused_defines(head_dim, num_heads, num_tokens)
    found = usages(compile_source(FUSED_SOURCE, constants, "sm_90a"))
    # Between two blocks of keys there is no loop to speak of, and a compiler may plan less well.
    assert found["fused_attention"].stack <= (128 if num_tokens < FEW else 0)
    assert shared_bytes(constants) + found["fused_attention"].static <= MOST_SHARED


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("head_dim", "num_heads", "num_tokens"), SIZES[:2])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_of_warps_stays_in_registers(
    tmp_path, monkeypatch, arch, head_dim, num_heads, num_tokens
):
    """On every architecture; two thread blocks share a multiprocessor."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    constants = warp_defines(head_dim, num_heads, num_tokens)
    found = usages(compile_source(WARP_SOURCE, constants, arch))["warp_attention"]
    assert found.stack == 0
    assert found.registers <= 255
    assert 2 * (warp_shared(head_dim) + found.static) <= gpu_of_arch(arch).shared


@pytest.mark.parametrize("tokens", [129, 729, 730, 1000])
@pytest.mark.parametrize("blocks", [1, 132])
def test_tiles_cover_every_head_in_no_more_time(tokens, blocks):
    """Heads are wide or narrow as a whole; the last round is never longer than with wide ones."""
    wide_of_head, narrow_of_head = -(-tokens // 192), -(-tokens // 128)
    for heads in (*range(1, 40), 80, 144, 208, 416):
        tiles, wide = cut_tiles(heads, tokens, 3, blocks)
        wide_heads, rest = divmod(wide, wide_of_head)
        narrow_heads, none = divmod(tiles - wide, narrow_of_head)
        assert rest == none == 0
        assert wide_heads + narrow_heads == heads
        wide_rounds, rounds = -(-wide // blocks), -(-tiles // blocks)
        assert 4 * wide_rounds + 3 * (rounds - wide_rounds) <= 4 * -(
            -heads * wide_of_head // blocks
        )


def test_nine_crops_leave_a_narrow_round():
    """Sixteen heads each on 132 processors: four rounds of wide tiles, and one of narrow ones."""
    tiles, wide = cut_tiles(9 * 16, 729, 3, 132)
    assert wide == 4 * 132
    assert tiles - wide == 72
