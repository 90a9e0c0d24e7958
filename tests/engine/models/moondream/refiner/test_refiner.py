"""The refiner: its network, its file and its refinements."""

import msgspec
import numpy as np
import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.models.moondream.frontend import MoondreamFrontend
from legato_engine.models.moondream.presets import moondream3_config
from legato_engine.models.moondream.refiner import (
    MaskAttention,
    MaskHead,
    MoondreamRefiner,
    load_head,
)
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.models.moondream.vision import normalised, patches
from legato_engine.models.moondream.weights import random_weights
from legato_engine.types import ImageBox, ImageProperties, MaskOutline
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from tests.engine.models.moondream.refiner import scripted
from tests.engine.models.moondream.refiner.scripted import BRIGHT, DARK, random_head
from tests.engine.models.moondream.refiner.shapes import drawn, overlap

CONFIG = scripted.config()
CPU = torch.device("cpu")
WIDTH, HEIGHT = 320, 240
INFO = ImageProperties(image_id="i", width=WIDTH, height=HEIGHT, cache_hit=False)
SQUARE = "M 0,0 L 1,0 L 1,1 L 0,1 Z"


@pytest.fixture(scope="module")
def network():
    """Moondream 3, tiny, with random weights."""
    return random_weights(CONFIG, 0, CPU, torch.float32)


@pytest.fixture(scope="module")
def learnt(network, tmp_path_factory):
    """A refiner trained to find what is bright in its box."""
    path = tmp_path_factory.mktemp("head") / "model.pt"
    scripted.write_head(path)
    return MoondreamRefiner(CONFIG, network.vision, path)


def prepared(pixels_HWC):
    """The image as a frontend prepares it for a refiner."""
    frontend = MoondreamFrontend(CONFIG, StandInTokenizer()).keeping_images()
    return frontend.prepare_image(Image.fromarray(pixels_HWC), "k", INFO)


def refined(refiner, outline, image):
    """The refiner's calls in the engine's order."""
    given = refiner.prepare(outline, image)
    for device, host in zip(refiner.given, refiner.tensors(given), strict=True):
        device.copy_(host)
    refiner.refine()
    return refiner.finish(outline, given, refiner.answer.numpy())


def scene(x, y, half_width, half_height):
    """A bright ellipse on dark, and its mask."""
    ys, xs = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    truth = ((xs - x) / half_width) ** 2 + ((ys - y) / half_height) ** 2 < 1
    noise = np.random.default_rng(1).normal(0, 8, (HEIGHT, WIDTH, 3))
    pixels = np.where(truth[..., None], BRIGHT, DARK) + noise
    return pixels.clip(0, 255).astype(np.uint8), truth


@pytest.mark.parametrize(
    ("x", "y", "half_width", "half_height"), [(160, 120, 60, 40), (100, 90, 35, 60)]
)
def test_a_box_around_an_ellipse_becomes_the_ellipse(learnt, x, y, half_width, half_height):
    """The coarse outline overlaps it by less than 0.8, the refined one by more than 0.85."""
    pixels, truth = scene(x, y, half_width, half_height)
    box = ImageBox(
        x_min=(x - half_width) / WIDTH,
        y_min=(y - half_height) / HEIGHT,
        x_max=(x + half_width) / WIDTH,
        y_max=(y + half_height) / HEIGHT,
    )
    coarse = MaskOutline(path=SQUARE, box=box, label="egg")
    better = refined(learnt, coarse, prepared(pixels))
    overlaps = [
        overlap(truth, drawn(each.path, msgspec.structs.astuple(each.box), WIDTH, HEIGHT))
        for each in (coarse, better)
    ]
    assert overlaps[0] < 0.8
    assert overlaps[1] > 0.85
    assert (better.label, better.coarse) == ("egg", False)
    assert refined(learnt, coarse, prepared(pixels)) == better, "the same again"


def test_the_tap_is_what_a_shorter_encoder_gives(network):
    """A tapped encoder has a shorter encoder's features, and its own bits at the end."""
    vision = network.vision
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 56, 56, 3), np.uint8))
    fed = patches(normalised(pixels, torch.float32), 14)
    early, late = vision.encode_tapped(fed, 0)
    assert torch.equal(late, vision.encode_patches(fed))
    x, y = vision.blocks[0](vision.patch_emb(fed), vision.pos_emb)
    assert torch.equal(early, x + y)


def test_images_are_kept_for_a_refiner_only():
    """Kept originals count towards the cache's bytes."""
    pixels, _ = scene(10, 10, 5, 5)
    image = prepared(pixels)
    plain = MoondreamFrontend(CONFIG, StandInTokenizer()).prepare_image(
        Image.fromarray(pixels), "k", INFO
    )
    assert np.array_equal(image.pixels.original, pixels)
    assert plain.pixels.original is None
    assert image.num_bytes == plain.num_bytes + pixels.nbytes


def test_an_image_left_whole_is_there_already():
    """An uncropped image is its own original, whichever option is set first."""
    frontend = MoondreamFrontend(CONFIG, StandInTokenizer())
    pixels, _ = scene(10, 10, 5, 5)
    for made in (
        frontend.resizing_on_device().keeping_images(),
        frontend.keeping_images().resizing_on_device(),
    ):
        image = made.prepare_image(Image.fromarray(pixels), "k", INFO)
        assert np.array_equal(image.pixels.original, pixels)


def test_a_model_without_settings_for_it_takes_no_refiner(network, tmp_path):
    """Moondream 2 has no outlines."""
    config = msgspec.structs.replace(CONFIG, refiner=None)
    with pytest.raises(InvalidField, match="takes no refiner") as caught:
        MoondreamRefiner(config, network.vision, tmp_path / "head.pt")
    assert caught.value.metadata["field"] == "refiner"


# ---------------------------------------------------------------- head

GRID, SIDE, V = CONFIG.vision.grid, CONFIG.vision.crop_size, CONFIG.vision.dim


def given(count=1, seed=0):
    """Late and early features, and a mask."""
    torch.manual_seed(seed)
    late, early = torch.randn(2, count, GRID * GRID, V)
    return late, early, (torch.rand(count, SIDE, SIDE) > 0.5).float()


def test_shapes_of_moondream_3s_head():
    """At the published sizes: four masks of the crop's size and their predicted IoU."""
    vision = moondream3_config().vision
    with torch.device("meta"):
        head = MaskHead(vision.dim, vision.grid, 256, 4)
        late, early = torch.empty(2, 1, 729, 1152)
        logits, ratings = head(head.fused(late, early), torch.empty(1, 378, 378))
        refined = head.refine(late, early, torch.empty(1, 378, 378), 1)
    assert (logits.shape, ratings.shape) == ((1, 4, 378, 378), (1, 4))
    assert refined.shape == (1, 378, 378)
    names = {name: tuple(p.shape) for name, p in head.named_parameters()}
    assert len(names) == 150
    assert names["mask_encoder.conv3.0.weight"] == (64, 32, 3, 3)
    assert names["hq_fusion.early_proj.0.weight"] == (256, 1152)
    assert names["upsample.16.norm.weight"] == (32,)
    assert names["transformer_blocks.1.mlp.0.weight"] == (2048, 256)
    assert names["mask_mlps.3.4.bias"] == (32,)
    assert names["image_pe"] == (1, 256, 27, 27)


def test_the_upsampled_map_has_eight_times_the_resolution():
    """Three doublings, down to an eighth of the width."""
    head = random_head(CONFIG)
    assert head.upsample(torch.zeros(1, 32, GRID, GRID)).shape == (1, 4, 8 * GRID, 8 * GRID)


def test_attention_is_torchs():
    """The attention equals torch's with the same weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    ours = MaskAttention(32, 4)
    ours.load_state_dict(theirs.state_dict())
    query, key, value = torch.randn(2, 5, 32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    assert torch.allclose(ours(query, key, value), theirs(query, key, value)[0], atol=1e-6)


def test_the_head_is_the_references():
    """Logits, predicted IoU and five iterations equal a plain head in numpy."""
    head = random_head(CONFIG, seed=2)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    weights = {name: tensor.numpy() for name, tensor in head.state_dict().items()}
    late, early, mask = given()
    one = late[0].double().numpy(), early[0].double().numpy(), mask[0].double().numpy()
    logits, ratings = head(head.fused(late, early), mask)
    expected = scripted.masks_of(weights, *one)
    assert np.allclose(logits[0], expected[0], atol=2e-4)
    assert np.allclose(ratings[0], expected[1], atol=2e-5)
    refined = scripted.refine(weights, *one, 5)
    assert np.allclose(head.refine(late, early, mask, 5)[0], refined, atol=2e-4)


def test_refining_feeds_back_the_best_rated_mask():
    """Each iteration starts from the mask with the highest predicted IoU."""
    head = random_head(CONFIG, seed=4)
    late, early, mask = given(3)
    image, best = head.fused(late, early), set()
    by_hand = mask
    for _ in range(3):
        logits, ratings = head(image, by_hand)
        chosen = ratings.argmax(1)
        best |= set(chosen.tolist())
        by_hand = torch.stack([logits[b, m].sigmoid() for b, m in enumerate(chosen)])
    refined = head.refine(late, early, mask, 3)
    assert torch.allclose(refined, by_hand, atol=1e-6)
    assert refined.min() >= 0
    assert refined.max() <= 1
    assert not torch.allclose(refined, head.refine(late, early, mask, 2), atol=1e-4)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_answer_depends_on_all_that_is_given(which):
    """Late features, early features and the mask all matter."""
    head = random_head(CONFIG)
    late, early, mask = given()
    before = head.refine(late, early, mask, 1)
    late, early, mask = (given(seed=int(place == which))[place] for place in range(3))
    assert not torch.allclose(head.refine(late, early, mask, 1), before, atol=1e-3)


def test_the_same_gives_the_same_bits():
    """Two runs have the same bits."""
    head = random_head(CONFIG)
    late, early, mask = given()
    assert torch.equal(head.refine(late, early, mask, 5), head.refine(late, early, mask, 5))


# ---------------------------------------------------------------- weights
# The refiner's file is read strictly.

LIKE = torch.zeros(1)


@pytest.fixture
def state():
    """A head's tensors."""
    return dict(random_head(CONFIG, dim=64).state_dict())


def load(path, like=LIKE):
    """The head in a file."""
    return load_head(path, CONFIG.vision, like)


def problem(path):
    """The error about a file."""
    with pytest.raises(InvalidField) as caught:
        load(path)
    assert caught.value.metadata["field"] == "refiner"
    assert path.name in str(caught.value)
    return str(caught.value)


def saved(path, content):
    """The file, of either kind."""
    if path.suffix == ".pt":
        torch.save(content, path)
    else:
        save_file(content, path)
    return path


@pytest.mark.parametrize("name", ["head.pt", "head.safetensors", "nested.pt"])
def test_every_tensor_is_read_from_every_kind_of_file(tmp_path, state, name):
    """A dict, a dict with `head`, or safetensors; the file determines the width."""
    content = {"head": state, "step": 7} if name == "nested.pt" else state
    head = load(saved(tmp_path / name, content))
    assert head.image_pe.shape[1] == 64
    assert head.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in head.state_dict().items())
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_tensors_take_the_models_dtype(tmp_path, state):
    """Whatever dtype they are stored in."""
    head = load(saved(tmp_path / "head.pt", state), LIKE.bfloat16())
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}


def test_what_is_missing_unknown_or_misshapen_is_named(tmp_path, state):
    """Each has its own line, an unknown one with the nearest expected name."""
    del state["final_norm.bias"]
    state["final_nrom.bias"] = torch.zeros(64)
    state["iou_head.0.weight"] = torch.zeros(64, 63)
    said = problem(saved(tmp_path / "head.pt", state))
    assert "final_norm.bias" in said
    assert "final_nrom.bias: unknown, the nearest expected name is final_norm.bias" in said
    assert "iou_head.0.weight: shape [64, 63], expected [64, 64]" in said
    assert "3 tensors" in said


def test_a_head_for_another_vision_encoder_is_refused(tmp_path):
    """Its shapes do not fit this vision encoder."""
    vision = msgspec.structs.replace(CONFIG.vision, dim=96)
    state = random_head(msgspec.structs.replace(CONFIG, vision=vision)).state_dict()
    said = problem(saved(tmp_path / "head.pt", dict(state)))
    assert "image_proj.weight: shape [32, 96, 1, 1], expected [32, 48, 1, 1]" in said


@pytest.mark.parametrize("dim", [0, 48])
def test_a_width_that_no_head_has_is_refused(tmp_path, state, dim):
    """Its norms have 32 groups."""
    state["mask_tokens"] = torch.zeros(4, dim)
    assert f"has a width of {dim}" in problem(saved(tmp_path / "head.pt", state))


@pytest.mark.parametrize("content", [[1, 2], {"head": {"a": 1}}, {"a": {"b": torch.zeros(1)}}])
def test_what_is_no_dict_of_tensors_is_refused(tmp_path, content):
    """Nothing else in a file is read."""
    assert "no dict of tensors" in problem(saved(tmp_path / "head.pt", content))


@pytest.mark.parametrize("name", ["head.pt", "head.safetensors"])
def test_what_cannot_be_read_is_said(tmp_path, name):
    """A missing file and a file of noise are errors."""
    path = tmp_path / name
    assert "cannot be read" in problem(path)
    path.write_bytes(b"noise" * 100)
    assert "cannot be read" in problem(path)
