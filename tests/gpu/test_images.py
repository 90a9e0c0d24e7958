"""On a GPU: images are cut to Pillow's bits, encoded in graphs of any size, stitched and refined.

Shape legend: N crops, T tokens, P values of a patch, D vision width.
"""

from __future__ import annotations

import concurrent.futures
import copy
import io
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np
import pytest
import simplejpeg
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.device.cuda import CudaDevice, JpegDecoder
from legato_engine.images.decoding import DecodeJpeg, decode_baseline
from legato_engine.images.headers import inspect
from legato_engine.images.memory import PixelMemory, Pixels
from legato_engine.ipc.messages import Done
from legato_engine.kernels.accelerated import ImagePipeline, StitchPool
from legato_engine.kernels.images import (
    MAX_WORDS,
    NUM_PIXEL_BYTES,
    CropGeometry,
    CutPlan,
    HostImage,
    stage,
)
from legato_engine.models.moondream import outline_shapes
from legato_engine.models.moondream.preprocess import crop_geometry, crop_image, select_tiling
from legato_engine.models.moondream.presets import moondream2_config
from legato_engine.models.moondream.refiner import Crop
from legato_engine.models.moondream.vision import Vision, patches
from legato_engine.models.moondream.weights import random_weights
from legato_engine.runtime.graphs import GraphRunner
from legato_engine.runtime.model_runner import RefineStep
from legato_engine.types import EncodedImage, QuerySpec, SamplingParams
from PIL import Image

from tests.engine.core.test_refinements import HEIGHT, WIDTH, ask, outline, truth
from tests.engine.core.world import World
from tests.engine.models.moondream.refiner import scripted
from tests.engine.models.moondream.refiner.shapes import overlap
from tests.gpu.inputs import HOPPER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


VISION = moondream2_config().vision
GEOMETRY = crop_geometry(VISION)
SIZES = [
    (600, 850),
    (640, 480),
    (378, 378),
    (379, 379),
    (1080, 1920),
    (1, 1),
    (1, 700),
    (2000, 380),
    (400, 5000),
    (4096, 4096),
]


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """The vision encoder's scaling of levels to -1..1."""
    return pixels.to(torch.bfloat16).div_(255.0).sub_(0.5).div_(0.5)


def noise(height: int, width: int) -> np.ndarray:
    """[height, width, 3], half of it at the ends of the range."""
    rng = np.random.default_rng(height * 10007 + width)
    pixels_HWC = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.where(rng.random((height, width, 1)) < 0.5, pixels_HWC, pixels_HWC // 128 * 255)


def expected_patches(pixels_HWC: np.ndarray) -> torch.Tensor:
    """Patches cut by Pillow on the host, normalised by torch on the device."""
    crops = crop_image(Image.fromarray(pixels_HWC), VISION)
    return patches(normalised(torch.from_numpy(crops.pixels_NHWC).cuda()), VISION.patch_size)


@pytest.fixture(scope="module")
def pipeline() -> ImagePipeline:
    """A pipeline with the sizes of moondream2."""
    levels = normalised(torch.arange(256, dtype=torch.uint8, device="cuda"))
    return ImagePipeline(GEOMETRY, levels)


@pytest.fixture(scope="module")
def host() -> HostImage:
    """Pinned memory for the largest image."""
    return HostImage(
        torch.empty(NUM_PIXEL_BYTES, dtype=torch.uint8, pin_memory=True),
        torch.empty(MAX_WORDS, dtype=torch.int32, pin_memory=True),
    )


def empty_patches(count: int) -> torch.Tensor:
    """[count, T, P] left over from another image."""
    shape = (count, VISION.num_tokens, 3 * VISION.patch_size**2)
    return torch.full(shape, 7.0, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("size", SIZES)
def test_patches_are_those_of_the_reference(
    pipeline: ImagePipeline, host: HostImage, size: tuple[int, int]
) -> None:
    """Every size and tiling gives the bits of the host's crops, after any other image."""
    pixels_HWC = noise(*size)
    tiling = select_tiling(*size, VISION)
    plan = CutPlan(*size, tiling, GEOMETRY)
    patches_NTP = empty_patches(plan.num_crops)
    pipeline.upload(host, stage(pixels_HWC, plan, host))
    pipeline.cut(patches_NTP)
    assert torch.equal(patches_NTP, expected_patches(pixels_HWC))
    assert pipeline.tiling.tolist() == list(tiling)


def test_pinned_pixels_are_not_copied_first(pipeline: ImagePipeline, host: HostImage) -> None:
    """An image in pinned memory is uploaded from there, and gives the same patches."""
    slab = torch.empty(1 << 22, dtype=torch.uint8, pin_memory=True)
    memory = PixelMemory(slab.numpy())
    for size in [(640, 480), (200, 100)]:
        pixels_HWC = memory.allocate((*size, 3))
        pixels_HWC[:] = noise(*size)
        plan = CutPlan(*size, select_tiling(*size, VISION), GEOMETRY)
        staged = stage(pixels_HWC, plan, host)
        assert staged.pixels.data_ptr() == pixels_HWC.ctypes.data
        patches_NTP = empty_patches(plan.num_crops)
        pipeline.upload(host, staged)
        pipeline.cut(patches_NTP)
        assert torch.equal(patches_NTP, expected_patches(pixels_HWC))


def test_one_graph_cuts_every_image(pipeline: ImagePipeline, host: HostImage) -> None:
    """A captured cut, replayed after another upload, cuts that image; unused crops are zero."""
    patches_NTP = empty_patches(13)
    pipeline.cut(patches_NTP)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pipeline.cut(patches_NTP)
    for size in [(640, 480), (200, 100), (768, 1024)]:
        pixels_HWC = noise(*size)
        plan = CutPlan(*size, select_tiling(*size, VISION), GEOMETRY)
        pipeline.upload(host, stage(pixels_HWC, plan, host))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(patches_NTP[: plan.num_crops], expected_patches(pixels_HWC))
        assert not patches_NTP[plan.num_crops :].any()


@pytest.mark.parametrize("geometry", [GEOMETRY, CropGeometry(56, 14, 1)])
def test_one_graph_stitches_every_tiling(geometry: CropGeometry) -> None:
    """Stitched and pooled features are the model's within one rounding, whatever the tiling."""
    tokens, dim = geometry.grid**2, VISION.dim
    features_NTD = torch.randn(13, tokens, dim, device="cuda").bfloat16()
    tiling = torch.tensor([1, 1], dtype=torch.int32, device="cuda")
    joined_TD = torch.empty(tokens, 2 * dim, dtype=torch.bfloat16, device="cuda")
    pool = StitchPool(geometry)
    pool(features_NTD, tiling, joined_TD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool(features_NTD, tiling, joined_TD)
    for rows, columns in [(1, 1), (2, 4), (4, 2), (3, 4), (1, 9), (6, 1), (3, 3)]:
        tiling.copy_(torch.tensor([rows, columns], dtype=torch.int32))
        graph.replay()
        expected_TD = features_NTD[0].float()
        if (rows, columns) != (1, 1):
            tiles_NTD = features_NTD[1 : 1 + rows * columns].float()
            expected_TD = reconstruct(tiles_NTD, (rows, columns), geometry)
        assert torch.equal(joined_TD[:, :dim], features_NTD[0])
        torch.testing.assert_close(joined_TD[:, dim:].float(), expected_TD, rtol=2**-8, atol=1e-5)


def reconstruct(
    tiles_NTD: torch.Tensor, tiling: tuple[int, int], geometry: CropGeometry
) -> torch.Tensor:
    """The vision encoder's own reconstruction at these sizes."""
    config = msgspec.structs.replace(
        VISION,
        crop_size=geometry.crop_size,
        patch_size=geometry.patch_size,
        overlap_margin=geometry.margin,
        num_layers=0,
    )
    with torch.inference_mode():
        return Vision(config, 8).reconstruct(tiles_NTD, tiling)


# ---------------------------------------------------------------- refiner
# Refinement of outlines on a GPU.


@pytest.fixture(scope="module", params=["f32", "bf16"])
def assembly(request, tmp_path_factory):
    """The scripted model and its refiner on the GPU."""
    folder = tmp_path_factory.mktemp("scripted")
    scripted.write_model(folder)
    scripted.write_head(folder / "head.pt")
    config = EngineConfig(
        model="legato-tiny",
        weights=str(folder),
        refiner=str(folder / "head.pt"),
        device="cuda",
        dtype=request.param,
    )
    made = assemble(config)
    yield made
    made.device.close()


def likeness(found):
    """The overlap of an outline with the truth."""
    box, extent = found.box, np.array([WIDTH, HEIGHT])
    low = np.array([box.x_min, box.y_min]) * extent
    stretch = np.array([box.x_max, box.y_max]) * extent - low
    rings = [ring * stretch + low for ring in outline_shapes.polygons(found.path)]
    xs, ys = (np.arange(count, dtype=np.float64) + 0.5 for count in (WIDTH, HEIGHT))
    return overlap(truth(), outline_shapes.enclosed(rings, xs, ys))


def test_an_outline_is_refined_among_others_as_alone(assembly):
    """A captured graph gives the same bits each time, between decodes of other requests."""
    world = World(assembly)
    ask(world, "alone")
    (alone,) = world.run("alone")
    assert not outline(alone).coarse
    assert likeness(outline(alone)) > 0.85
    for number in range(5):
        ask(world, f"r{number}")
    world.submit("q", QuerySpec(question="What?"), sampling=SamplingParams(max_tokens=60))
    *together, _ = world.run(*(f"r{number}" for number in range(5)), "q")
    assert [done.result for done in together] == [alone.result] * 5
    world.close()


def test_a_captured_refinement_is_an_eager_one(assembly):
    """Captured and eager refinement agree in every slot, repeatedly."""
    refiner, device = assembly.refiner, assembly.device
    side = refiner.answer.shape[0]
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (side, side, 3), np.uint8)
    mask = random.integers(0, 2, (side, side), np.uint8)
    given = Crop((side, side), 0, 0, (side, side), pixels, mask)
    answers = []
    for captures in (True, False):
        step = RefineStep(refiner, device, 2, GraphRunner(device, captures=captures))
        step.warm_up()
        for slot in (0, 1, 0):
            step.forward(slot, given)
            device.compute.record().wait()
            answers.append(torch.from_numpy(step.answer(slot)))
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert 0 < answers[0].mean() < 1


CUDA = torch.device("cuda", 0)
CROPS, LAYERS = 9, 3


@pytest.fixture
def seeded_inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def tower() -> tuple[Vision, torch.Tensor]:
    """An encoder of few layers, and patches [N, T, P] of nine crops without padding."""
    config = moondream2_config()
    sizes = msgspec.structs.replace(config.vision, num_layers=LAYERS)
    few = msgspec.structs.replace(config.text, num_layers=1)
    small = msgspec.structs.replace(config, vision=sizes, text=few)
    vision = random_weights(small, 0, CUDA, torch.bfloat16).vision
    vision.patch_emb.widen(8)
    shape = (CROPS, sizes.num_tokens, vision.patch_emb.in_features)
    return vision, torch.randn(shape, device=CUDA).bfloat16()


@HOPPER
@pytest.mark.usefixtures("seeded_inference")
def test_shared_counters_change_no_bit():
    """With shared counters the encoder keeps its bits for new crops, eager and replayed.

    It agrees with float32 within rounding.
    """
    vision, patches_NTP = tower()
    counted, exact = copy.deepcopy(vision), copy.deepcopy(vision).float()
    counted.count_apart()
    device = CudaDevice(0)
    features_NTD = torch.empty_like(vision.encode_patches(patches_NTP))

    def encode() -> None:
        features_NTD.copy_(counted.encode_patches(patches_NTP))

    replay = device.capture(encode)
    for _ in range(3):
        patches_NTP.copy_(torch.randn(patches_NTP.shape))
        features_NTD.fill_(torch.nan)
        torch.cuda.synchronize()
        device.compute.submit(replay)
        torch.cuda.synchronize()
        assert torch.equal(features_NTD, vision.encode_patches(patches_NTP))
        assert torch.equal(features_NTD, counted.encode_patches(patches_NTP))
        truth_NTD = exact.encode_patches(patches_NTP.float())
        assert (features_NTD.float() - truth_NTD).norm() < 0.02 * truth_NTD.norm()
    device.close()


@HOPPER
@pytest.mark.usefixtures("seeded_inference")
@pytest.mark.parametrize("count", range(1, CROPS))
def test_a_crop_has_the_same_bits_in_any_batch(count):
    """A crop's bits do not depend on the number of crops, although kernels, tiles and graphs do."""
    vision, patches_NTP = tower()
    vision.count_apart()
    device = CudaDevice(0)
    out_NTD = torch.zeros_like(vision.encode_patches(patches_NTP))

    def encode(first: int, stop: int) -> None:
        out_NTD[first:stop].copy_(vision.encode_patches(patches_NTP[first:stop]))

    whole = device.capture(partial(encode, 0, CROPS))
    device.compute.submit(whole)
    torch.cuda.synchronize()
    whole_NTD = out_NTD.clone()
    for first in (0, CROPS - count):
        some = device.capture(partial(encode, first, first + count))
        out_NTD.fill_(torch.nan)
        device.compute.submit(some)
        torch.cuda.synchronize()
        part = slice(first, first + count)
        assert torch.equal(out_NTD[part], whole_NTD[part])
    device.close()


# ---------------------------------------------------------------- JPEGs


@pytest.fixture(scope="module")
def jpeg_decoder():
    pytest.importorskip("torchvision")
    return JpegDecoder(torch.device("cuda", 0))


def jpeg(height: int, width: int, seed: int = 0, **options: object) -> bytes:
    """A photograph of clouds: smooth noise."""
    rng = np.random.default_rng(seed)
    small_HWC = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    image = Image.fromarray(small_HWC).resize((width, height), Image.Resampling.BICUBIC)
    image = image.convert(str(options.pop("mode", "RGB")))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, **options)
    return file.getvalue()


def libjpeg_that_repeats_colours(data, pixels_HWC):
    """Decode without interpolating colours that are stored at half the resolution."""
    pixels_HWC[:] = simplejpeg.decode_jpeg(data, "RGB", fastupsample=True)
    return True


def decoded(data: bytes, *decoder: DecodeJpeg) -> Pixels:
    header = inspect(data, max_pixels=1 << 22, max_bytes=len(data))
    assert header.is_baseline
    pixels_HWC = decode_baseline(data, header, PINNED.allocate, *decoder)
    assert pixels_HWC is not None
    return pixels_HWC


PINNED = PixelMemory(np.zeros(1 << 25, np.uint8))


@pytest.mark.parametrize("size", [(600, 850), (1, 1), (17, 33), (2048, 2048)])
@pytest.mark.parametrize(
    "options", [{"subsampling": 0}, {"subsampling": 2}, {"mode": "L"}, {"exif": b"turned"}], ids=str
)
def test_nvjpeg_shows_what_libjpeg_shows(jpeg_decoder, options, size):
    """Also grey images, turned ones and those with colours at half the resolution."""
    if "exif" in options:
        turned = Image.Exif()
        turned[274] = 6
        options = {"exif": turned}
    data = jpeg(*size, **options)
    ours_HWC, truth_HWC = decoded(data, jpeg_decoder), decoded(data, libjpeg_that_repeats_colours)
    assert ours_HWC.shape == truth_HWC.shape
    errors_HWC = np.abs(ours_HWC.astype(int) - truth_HWC.astype(int))
    assert errors_HWC.mean() < 1


def test_a_broken_file_is_left_to_others_and_harms_no_later_one(jpeg_decoder):
    """A file without its scan, and one of another size, are not decoded; the next one is."""
    data = jpeg(600, 850)
    expected_HWC = decoded(data, jpeg_decoder)
    for broken, size in ((data[:300], (600, 850, 3)), (b"JPEG", (8, 8, 3)), (data, (850, 600, 3))):
        assert not jpeg_decoder(broken, np.empty(size, np.uint8))
        assert np.array_equal(decoded(data, jpeg_decoder), expected_HWC)
    cut_HWC = np.empty((600, 850, 3), np.uint8)
    jpeg_decoder(data[: len(data) // 2], cut_HWC)  # may go well
    assert np.array_equal(decoded(data, jpeg_decoder), expected_HWC)


def test_threads_share_a_decoder_that_allocates_nothing(jpeg_decoder):
    """Images of all sizes come out as those of one thread, without a further device allocation."""
    files = [jpeg(100 + 83 * index, 2000 - 77 * index, index) for index in range(16)]
    expected = [decoded(data, jpeg_decoder) for data in files]
    reserved = torch.cuda.memory_reserved()
    with concurrent.futures.ThreadPoolExecutor(1) as one:
        again = list(one.map(decoded, files, [jpeg_decoder] * len(files)))
    assert torch.cuda.memory_reserved() == reserved
    with concurrent.futures.ThreadPoolExecutor(4) as four:
        shared = list(four.map(decoded, files * 4, [jpeg_decoder] * len(files) * 4))
    assert all(np.array_equal(*each) for each in zip(again, expected, strict=True))
    assert all(np.array_equal(*each) for each in zip(shared, expected * 4, strict=True))


def test_an_engine_with_nvjpeg_answers():
    """A new image is decoded inline, a second one on a thread beside the first one's answer."""
    pytest.importorskip("torchvision")
    config = EngineConfig(
        model="legato-tiny", device="cuda", jpeg_decoder="gpu", max_running=4, log_level="warning"
    )
    made = assemble(config)
    world = World(made)
    for name in "ab":
        blob = world.blobs.put(jpeg(480, 640, ord(name)))
        image = EncodedImage(blob=blob, mime_type="image/jpeg")
        world.submit(name, QuerySpec(question="What is there?"), image)
    assert all(isinstance(each, Done) for each in world.run("a", "b"))
    assert world.core.load().images_cached == 2
    world.close()
    made.device.close()
