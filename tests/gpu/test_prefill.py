"""On a GPU: a span's prefill by kernels is what torch computes, in its own pages only.

Shape legend: T tokens, H heads, E head dim, D width, P positions, L layers, N pages, S positions
per page, M pages of a sequence.
"""

from __future__ import annotations

import copy
import dataclasses

import msgspec
import pytest
import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, pages
from legato_engine.kernels.cuda import prefill
from legato_engine.kernels.map_codes import KINDS
from legato_engine.kernels.pages import LayerCache, Span
from legato_engine.layers import fp8
from legato_engine.layers.rope import Rope
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.model import MoondreamModel
from legato_engine.models.moondream.presets import legato_tiny_config, moondream2_config
from legato_engine.models.moondream.weights import random_weights
from legato_engine.models.paged_attention import KVCache, PrefillSpan
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
PAGE, PICTURE = 16, 730
SPANS = [(0, 1), (0, PICTURE), (0, 2048), (3, 45), (PICTURE, 7), (PICTURE, 130)]


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """The joint projection of a span, where it stands, and caches that hold other things."""

    qkv_T3HE: torch.Tensor
    span: Span
    cache: LayerCache

    def copy(self) -> Case:
        """The same with tensors of its own."""
        k_NHSE, v_NHSE, scale_2 = self.cache
        cache = LayerCache(k_NHSE.clone(), v_NHSE.clone(), scale_2)
        return Case(self.qkv_T3HE.clone(), self.span, cache)

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """By what fits."""
        return ops.rotate_and_cache(self.qkv_T3HE.flatten(1, 2), self.span, *self.cache)

    def run_plain(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """By torch."""
        places = self.span.metadata(self.qkv_T3HE.shape[0], PAGE)
        return ops.rotate_and_cache(self.qkv_T3HE.flatten(1, 2), places, *self.cache)


def case(start: int, count: int, num_heads: int, *, narrow: bool = False) -> Case:
    """Pages in any order, and one more than the span needs; in `narrow` ones some saturate."""
    rope = Rope(10000.0, 32, 2048)
    rope.fill(DEVICE)
    num_pages = -(-(start + count) // PAGE) + 1
    shape = (num_pages + 5, num_heads, PAGE, 64)
    scale_2 = torch.tensor([0.007, 0.3], device=DEVICE) if narrow else None
    k_NHSE, v_NHSE = (
        pages.quantise(torch.randn(shape, device=DEVICE).bfloat16(), scale)
        for scale in pages.units(scale_2)
    )
    pages_M = torch.randperm(num_pages + 4, device=DEVICE)[:num_pages] + 1
    qkv_T3HE = torch.randn(count, 3, num_heads, 64, device=DEVICE).bfloat16()
    if narrow:
        qkv_T3HE[-1, :, 0, :2] = torch.nan
    span = Span(start, pages_M[None], rope.cos_PR, rope.sin_PR)
    return Case(qkv_T3HE, span, LayerCache(k_NHSE, v_NHSE, scale_2))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("num_heads", [5, 32])
@pytest.mark.parametrize(("start", "count"), SPANS)
def test_rotation_has_the_bits_of_torch(start, count, num_heads, narrow):
    """Queries, keys, values and every byte of both caches are what torch's operations leave."""
    ours = case(start, count, num_heads, narrow=narrow)
    theirs = ours.copy()
    assert prefill.can_rotate(ours.qkv_T3HE, ours.span.cos_PR, ours.cache.k_NHSE)
    for mine, expected in zip(ours.run(), theirs.run_plain(), strict=True):
        assert torch.equal(mine.isnan(), expected.isnan())
        assert torch.equal(mine.nan_to_num(), expected.nan_to_num())
    for mine, expected in zip(ours.cache[:2], theirs.cache[:2], strict=True):
        assert torch.equal(no_sign_of_nan(mine), no_sign_of_nan(expected))


def no_sign_of_nan(cache_NHSE: torch.Tensor) -> torch.Tensor:
    """The bits of a cache; its NaN are all one."""
    if cache_NHSE.dtype is not pages.E4M3:
        return cache_NHSE
    bits = pages.indexable(cache_NHSE)
    return bits.masked_fill(bits & 0x7F == 0x7F, 0x7F)


def test_fused_attention_takes_the_views():
    """Rotated views of the joint projection go into a fused attention without a copy."""
    views = [x[None] for x in case(0, PICTURE, 32).run()]
    assert not any(view.is_contiguous() for view in views)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        out_BTHE = ops.full_attention(*views)
    exact_BTHE = ops.full_attention(*(view.float() for view in views))
    torch.testing.assert_close(out_BTHE.float(), exact_BTHE, rtol=0.02, atol=0.005)


@pytest.mark.parametrize("shape", [(1, 320), (PICTURE, 2048), (7, 8)])
def test_a_sum_of_three_is_rounded_once(shape):
    """The kernel's sum is float32's, rounded."""
    x, y, z = (torch.randn(shape, device=DEVICE).mul_(10.0**i).bfloat16() for i in (0, 1, -1))
    assert prefill.can_add(x, y, z)
    assert torch.equal(ops.add3(x, y, z), (x.float() + y.float() + z.float()).bfloat16())


def shallow_moondream2() -> MoondreamConfig:
    """Moondream 2's widths in few layers."""
    config = moondream2_config()
    return msgspec.structs.replace(
        config,
        text=msgspec.structs.replace(config.text, num_layers=3),
        vision=msgspec.structs.replace(config.vision, num_layers=1),
    )


CONFIGS = {"legato-tiny": legato_tiny_config, "moondream2": shallow_moondream2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_are_copied_in_every_layer_and_no_other_changes(dtype):
    """Keys and values of any dtype, to the bit; a page onto itself is none."""
    shape = (3, 5, 32, PAGE, 64)
    keys, values = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    assert prefill.can_copy(keys, values)
    expected = [cache.view(torch.uint8).clone() for cache in (keys, values)]
    for cache in expected:
        cache[:, 4] = cache[:, 1].clone()
        cache[:, 3] = cache[:, 2].clone()
    pairs_K2 = torch.tensor([[1, 4], [0, 0], [2, 3]], device=DEVICE)
    ops.copy_pages(keys, values, pairs_K2)
    assert torch.equal(keys.view(torch.uint8), expected[0])
    assert torch.equal(values.view(torch.uint8), expected[1])


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """A model in bf16, the same weights in float32, a picture's input and where it goes."""

    model: MoondreamModel
    exact: MoondreamModel
    x_TD: torch.Tensor
    pages_M: torch.Tensor

    def span(self) -> PrefillSpan:
        """From the start, all see all."""
        return PrefillSpan(0, self.pages_M, bidirectional=True)

    def cache(self, dtype: torch.dtype) -> KVCache:
        """Pages that nothing has filled."""
        model = self.model
        shape = (model.num_layers, len(self.pages_M) + 1, model.num_kv_heads, PAGE, model.head_dim)
        return KVCache(*(torch.full(shape, 7.0, dtype=dtype, device=DEVICE) for _ in range(2)))


@pytest.fixture(scope="module", params=CONFIGS)
def world(request):
    """Random weights; the picture's pages run backwards."""
    config = CONFIGS[request.param]()
    network = random_weights(config, 0, DEVICE, torch.bfloat16)
    model, exact = (MoondreamModel(config, n) for n in (network, copy.deepcopy(network).float()))
    generator = torch.Generator(DEVICE).manual_seed(1)
    x_TD = torch.randn(PICTURE, config.text.dim, device=DEVICE, generator=generator).bfloat16()
    pages_M = torch.arange(-(-PICTURE // PAGE), 0, -1, device=DEVICE)
    return World(model, exact, x_TD, pages_M)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square of the difference over that of the truth."""
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def test_a_prefill_is_as_exact_as_torch(world, monkeypatch):
    """Against float32 the kernels err no more than 1.02 times what torch errs in bf16."""
    exact_cache, cache, plain_cache = (
        world.cache(dtype) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    exact_TD = world.exact.prefill(world.x_TD.float(), world.span(), exact_cache)
    ours_TD = world.model.prefill(world.x_TD, world.span(), cache)
    monkeypatch.setattr(prefill, "can_rotate", lambda *_: False)
    monkeypatch.setattr(prefill, "can_add", lambda *_: False)
    plain_TD = world.model.prefill(world.x_TD, world.span(), plain_cache)
    assert error(ours_TD, exact_TD) <= 1.02 * error(plain_TD, exact_TD)
    for name in ("k_LNHSE", "v_LNHSE"):
        ours, plain, exact = (getattr(c, name) for c in (cache, plain_cache, exact_cache))
        assert error(ours, exact) <= 1.02 * error(plain, exact)
        assert torch.equal(ours[:, 0], torch.full_like(ours[:, 0], 7.0))


@pytest.mark.parametrize("count", [2, 4])
def test_pictures_in_one_pass_are_as_exact_as_alone(world, count):
    """Each has its keys and values in its own pages, and errs as little as by itself."""
    num_pages = len(world.pages_M)
    pages_CM = torch.arange(1, count * num_pages + 1, device=DEVICE).view(count, num_pages).flip(1)
    x_CPD = torch.stack([world.x_TD.roll(index, 0) for index in range(count)])
    caches = []
    for model, dtype in ((world.exact, torch.float32), *[(world.model, torch.bfloat16)] * 2):
        shape = (model.num_layers, 1 + pages_CM.numel(), model.num_kv_heads, PAGE, model.head_dim)
        pair = (torch.full(shape, 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
        caches.append(KVCache(*pair))
    exact_cache, alone_cache, cache = caches
    for x_PD, pages_M in zip(x_CPD, pages_CM, strict=True):
        span = PrefillSpan(0, pages_M, bidirectional=True)
        world.exact.cache_span(x_PD.float(), span, exact_cache)
        world.model.cache_span(x_PD, span, alone_cache)
    world.model._network.text.cache_stacked(x_CPD, pages_CM, cache)
    for name in ("k_LNHSE", "v_LNHSE"):
        ours, alone, exact = (getattr(c, name) for c in (cache, alone_cache, exact_cache))
        assert error(ours, exact) <= 1.02 * error(alone, exact)


def test_a_captured_prefill_reads_its_inputs_anew(world):
    """A graph of a prefill, replayed over another input and other pages, gives the eager bits."""
    x_TD, pages_M = world.x_TD.clone(), world.pages_M.clone()
    cache, out_TD = world.cache(torch.bfloat16), torch.empty_like(x_TD)

    def work() -> None:
        span = PrefillSpan(0, pages_M, bidirectional=True)
        out_TD.copy_(world.model.prefill(x_TD, span, cache))

    device = CudaDevice(0)
    torch.cuda.synchronize()
    replay = device.capture(work)
    x_TD.copy_(world.x_TD.flip(0))
    pages_M.copy_(world.pages_M.flip(0))
    cache.k_LNHSE.fill_(7.0)
    cache.v_LNHSE.fill_(7.0)
    torch.cuda.synchronize()
    replay()
    torch.cuda.synchronize()
    eager = world.cache(torch.bfloat16)
    span = PrefillSpan(0, world.pages_M.flip(0), bidirectional=True)
    assert torch.equal(out_TD, world.model.prefill(world.x_TD.flip(0), span, eager))
    assert torch.equal(cache.k_LNHSE, eager.k_LNHSE)
    assert torch.equal(cache.v_LNHSE, eager.v_LNHSE)


# ---------------------------------------------------------------- images in e4m3


@pytest.fixture(scope="module")
def image_text(world):
    """The decoder with copies of its blocks in e4m3, and the same weights in float32."""
    if not ops.can_multiply_e4m3(DEVICE):
        pytest.skip("needs a GPU with fp8 arithmetic")
    text = copy.deepcopy(world.model._network.text)
    text.use_fp8()
    text.count_apart()
    return text, world.exact._network.text


def filled(text, x_CPD, pages_CM):
    """Keys and values of images in one pass."""
    heads = text._num_heads
    shape = (len(text.blocks), 1 + pages_CM.numel(), heads, PAGE, x_CPD.shape[-1] // heads)
    kv = KVCache(*(torch.zeros(shape, dtype=x_CPD.dtype, device=DEVICE) for _ in range(2)))
    text.cache_stacked(x_CPD, pages_CM, kv)
    return torch.cat([kv.k_LNHSE[:, pages_CM], kv.v_LNHSE[:, pages_CM]]), kv


@pytest.mark.parametrize("count", [1, 2])
def test_an_image_in_e4m3_is_as_exact_as_its_emulation(world, image_text, monkeypatch, count):
    """Against float32 products of tensor cores err as emulated ones do, alone and together."""
    text, exact = image_text
    num_pages = len(world.pages_M)
    pages_CM = torch.arange(1, count * num_pages + 1, device=DEVICE).view(count, num_pages)
    x_CPD = torch.stack([world.x_TD.roll(index, 0) for index in range(count)])
    ours, _ = filled(text, x_CPD, pages_CM)
    plain, _ = filled(world.model._network.text, x_CPD, pages_CM)
    truth, _ = filled(exact, x_CPD.float(), pages_CM)
    alone, _ = filled(text, x_CPD[-1:], pages_CM[:1])
    with monkeypatch.context() as patched:
        patched.setattr(fp8, "multiplied", fp8.emulated)
        emulated, _ = filled(text, x_CPD, pages_CM)
    rounded = error(emulated, truth)
    assert 2 * error(plain, truth) < rounded < 0.1
    assert error(ours, truth) < 1.05 * rounded
    assert error(ours, emulated) < 0.9 * rounded  # a late bit of a sum may move a value a step
    assert error(alone[:, 0], truth[:, -1]) < 1.05 * rounded
    assert error(ours[:, -1], alone[:, 0]) < 0.9 * rounded


@pytest.mark.parametrize("count", [1, 2])
def test_a_captured_image_in_e4m3_has_the_eager_bits(world, image_text, count):
    """A graph allocates nothing when it is replayed, and reads embeddings and pages anew."""
    text, _ = image_text
    num_pages = len(world.pages_M)
    pages_CM = torch.arange(1, count * num_pages + 1, device=DEVICE).view(count, num_pages)
    x_CPD = torch.stack([world.x_TD.roll(index, 0) for index in range(count)])
    _, kv = filled(text, x_CPD, pages_CM)

    def work() -> None:
        text.cache_stacked(x_CPD, pages_CM, kv)

    device = CudaDevice(0)
    torch.cuda.synchronize()
    replay = device.capture(work)
    x_CPD.copy_(x_CPD.flip(1))
    pages_CM.copy_(pages_CM.flip(1))
    kv.k_LNHSE.zero_()
    kv.v_LNHSE.zero_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    device.compute.submit(replay)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    expected, _ = filled(text, x_CPD, pages_CM)
    assert torch.equal(torch.cat([kv.k_LNHSE[:, pages_CM], kv.v_LNHSE[:, pages_CM]]), expected)
    device.close()


@pytest.mark.parametrize("kind", ["packed", "int4"])
def test_images_in_e4m3_stay_when_the_maps_are_packed(world, image_text, kind):
    """Bits of all blocks but the last, which is packed, are those before."""
    text, _ = image_text
    if text.cannot_quantise(KINDS[kind]):
        pytest.skip("these sizes cannot be packed")
    packed = copy.deepcopy(text)
    packed.quantise(KINDS[kind])
    pages_CM = world.pages_M[None]
    before, after = (filled(each, world.x_TD[None], pages_CM)[0] for each in (text, packed))
    layers = len(text.blocks)
    for ours, expected in zip(after.split(layers), before.split(layers), strict=True):
        assert torch.equal(ours[:-1], expected[:-1])
        assert error(ours[-1], expected[-1]) < 0.3
