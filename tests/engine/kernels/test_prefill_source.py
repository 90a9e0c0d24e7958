"""The CUDA source of the prefill's kernels, on the CPU: as C++ for its bits, by NVRTC for its size.

A warp exchanges only what it has loaded itself, so that two runs stand for its lanes: the first
notes what every lane gives, over memory that is thrown away, the second takes it.

Shape legend: T tokens, H heads, E head dim, P positions, R rotated pairs, N pages, S positions per
page, M pages of a sequence.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import shutil
import subprocess

import pytest
import torch
from legato_engine.kernels import reference
from legato_engine.kernels.cuda.compiler import compile_source
from legato_engine.kernels.cuda.prefill import SOURCE, defines
from legato_engine.layers.rope import Rope

from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import usages

HEADS, HEAD_DIM, PAGE, PAGES = 3, 64, 4, 9
THREADS = 256
SHIM = """
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
struct Index { int x; };
static Index blockIdx, threadIdx;
static u32 given[32][64];
static int calls;
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
static uint4 load_fresh(const void* p) { return *(const uint4*)p; }
static i64 load_fresh_i64(const i64* p) { return *p; }
extern "C" void set_lane(int block, int thread, int note) {
    blockIdx.x = block; threadIdx.x = thread; noting = note; calls = 0;
}
"""


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("num_heads", [5, 32])
def test_the_source_compiles_without_spills(tmp_path, monkeypatch, num_heads, arch):
    """Both kernels compile where they run and keep everything in registers."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    found = usages(compile_source(SOURCE, defines(num_heads, 16), arch))
    assert set(found) == {"rotate_and_cache", "add3"}
    assert not any(usage.stack for usage in found.values())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The source as a library of this machine."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("source")
    source = importlib.resources.files("legato_engine.kernels.cuda") / "sources" / SOURCE
    file, library = folder / "prefill.cpp", folder / "prefill.so"
    file.write_text(SHIM + source.read_text().replace('#include "common.cuh"', ""))
    options = [f"-D{name}={value}" for name, value in defines(HEADS, PAGE).items()]
    command = [compiler, "-O2", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", *options]
    subprocess.run([*command, str(file), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointers(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    """What a kernel takes them by."""
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def rotate_and_cache(kernels, qkv_T3HE, rope, pages_M, caches, start):
    """The kernel, warp by warp."""
    count = qkv_T3HE.shape[0]
    fixed = pointers(rope.cos_PR, rope.sin_PR, pages_M)
    real = pointers(qkv_T3HE), pointers(*caches)
    for warp in range(-(-count * HEADS * 8 // 32)):
        wasted = [x.clone() for x in (qkv_T3HE, *caches)]
        waste = pointers(wasted[0]), pointers(*wasted[1:])
        for note, (qkv, pair) in ((1, waste), (0, real)):
            for lane in range(32):
                kernels.set_lane(warp // 8, warp % 8 * 32 + lane, note)
                kernels.rotate_and_cache(*qkv, *fixed, *pair, start, count)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 14), (5, 11), (7, 23)])
def test_rotation_has_the_bits_of_the_reference(kernels, start, count):
    """Queries and keys turn as in torch, keys and values reach their slots, the rest stays."""
    generator = torch.Generator().manual_seed(start)
    rope = Rope(10000.0, 32, 40)
    rope.fill(torch.device("cpu"))
    qkv_T3HE = torch.randn(count, 3, HEADS, HEAD_DIM, generator=generator).bfloat16()
    caches = [torch.full((PAGES + 1, HEADS, PAGE, HEAD_DIM), 7.0).bfloat16() for _ in range(2)]
    pages_M = torch.randperm(PAGES, generator=generator) + 1
    positions_T = torch.arange(start, start + count)
    angles = rope.at(positions_T)
    q_THE, k_THE = (reference.rotate(qkv_T3HE[:, i], *angles) for i in (0, 1))
    expected = torch.stack([q_THE, k_THE, qkv_T3HE[:, 2]], 1)
    expected_caches = [cache.clone() for cache in caches]
    where = pages_M[positions_T // PAGE], positions_T % PAGE
    for cache, new in zip(expected_caches, (k_THE, qkv_T3HE[:, 2]), strict=True):
        reference.write_kv(cache, new, *where)
    rotate_and_cache(kernels, qkv_T3HE, rope, pages_M, caches, start)
    assert torch.equal(qkv_T3HE, expected)
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        assert torch.equal(cache, expected_cache)


def test_a_sum_of_three_is_rounded_once(kernels):
    """The sum is that of float32, and nothing behind the last term is written."""
    x, y, z = (torch.randn(3, 40).mul_(10.0**i).bfloat16() for i in (0, 1, -1))
    out = torch.full((136,), 7.0).bfloat16()
    for thread in range(THREADS):
        kernels.set_lane(0, thread, 0)
        kernels.add3(*pointers(x, y, z, out), x.numel() // 8)
    assert torch.equal(out[:120].view_as(x), (x.float() + y.float() + z.float()).bfloat16())
    assert torch.equal(out[120:], torch.full((16,), 7.0).bfloat16())
