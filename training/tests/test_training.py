"""The training of legato-tiny and the reach of its answers."""

import json

import numpy as np
import pytest
import torch
from legato_client import Box
from legato_client.calibration.scored import LabelledImage
from legato_engine.kernels.reference import concentration
from legato_training import labelled
from legato_training.art_sets import ART_SETS
from legato_training.config import ModelConfig, engine_config
from legato_training.decode import Decoder
from legato_training.language import Narrator
from legato_training.model import LegatoTiny, slot_mask
from legato_training.reach import OCTAVES, PLACES, PRESENT, Question, keep, kept, masses, study
from legato_training.render import Renderer
from legato_training.scenes import CROP, ShapeSampler
from legato_training.slots import DETECT_A, LENGTH, SLOTS, STARTS, scene_loader
from legato_training.sprites import load_sprites, shape_sprites
from legato_training.train import size_to_bin, soft_bins
from legato_training.vocabulary import ROOT, Words

SMALL = ModelConfig(
    vision_dim=64,
    vision_ff=96,
    vision_layers=2,
    vision_heads=1,
    text_dim=64,
    text_ff=96,
    text_layers=2,
    text_heads=1,
    projector_inner=96,
    region_inner=64,
)
SHIPPED = ROOT.parent / "engine" / "tiny" / "legato_tiny"
PACK = ROOT / ".data/sprites.npz"
needs_art = pytest.mark.skipif(
    not PACK.exists(), reason="python -m legato_training.art has not been run"
)
TRAINED = tuple(i for i, art in enumerate(ART_SETS) if not art.held_out)


@pytest.fixture(scope="module")
def book():
    return load_sprites(PACK)


@pytest.fixture(scope="module")
def batch(book):
    """Load a few scenes with their slots."""
    return next(iter(scene_loader(book, TRAINED, 4, 3, 0)))


def forward(
    model: LegatoTiny, tokens: torch.Tensor, values: torch.Tensor, slots: tuple[int, ...]
) -> torch.Tensor:
    """Hidden states of a packed suffix for fixed images."""
    pixels = torch.randn(tokens.shape[0], 3, 336, 336, generator=torch.Generator().manual_seed(1))
    positions, bias = slot_mask(slots, model.config.prefix)
    with torch.no_grad():
        return model(pixels, tokens, values, positions, bias)[1]


def random_suffix(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with coords and sizes among them."""
    torch.manual_seed(5)
    tokens = torch.randint(0, 60, (1, length))
    return tokens, torch.rand(1, length, 2)


def test_a_slot_does_not_see_another_slot():
    """Changing one slot's tokens changes no other slot's hidden states."""
    model = LegatoTiny(SMALL)
    tokens, values = random_suffix(24)
    changed = tokens.clone()
    changed[:, 8:16] = 61
    before, after = (
        forward(model, tokens, values, (8, 8, 8)),
        forward(model, changed, values, (8, 8, 8)),
    )
    assert torch.equal(before[:, :8], after[:, :8])
    assert torch.equal(before[:, 16:], after[:, 16:])
    assert not torch.allclose(before[:, 8:16], after[:, 8:16])


def test_packed_equals_alone():
    """A slot's hidden states equal those of the same prompt alone after the image."""
    model = LegatoTiny(SMALL)
    tokens, values = random_suffix(24)
    packed = forward(model, tokens, values, (8, 6, 10))
    alone = forward(model, tokens[:, 8:14], values[:, 8:14], (6,))
    torch.testing.assert_close(packed[:, 8:14], alone, atol=1e-5, rtol=1e-5)


def test_a_slot_is_causal():
    """A later token does not change an earlier hidden state."""
    model = LegatoTiny(SMALL)
    tokens, values = random_suffix(10)
    changed = tokens.clone()
    changed[:, 6] = 61
    before, after = forward(model, tokens, values, (10,)), forward(model, changed, values, (10,))
    assert torch.equal(before[:, :6], after[:, :6])


def test_the_decoder_reads_like_the_model():
    """The cached prefix and the suffix give the packed forward's hidden states."""
    model = LegatoTiny(SMALL).eval()
    tokens, values = random_suffix(9)
    pixels = torch.randn(1, 3, 336, 336, generator=torch.Generator().manual_seed(1))
    decoder = Decoder(model)
    with torch.no_grad():
        hidden = decoder.suffix(decoder.read(pixels), tokens, values)
    torch.testing.assert_close(hidden, forward(model, tokens, values, (9,)), atol=1e-5, rtol=1e-5)


def test_bins_follow_the_contract():
    """Coordinate bin b is b/1024 and size bin b is 2^(b/1023*10-10)."""
    assert int(soft_bins(torch.tensor(0.25 * 1024), 2.0, 1024).argmax()) == 256
    size = torch.tensor(2.0 ** (700 / 1023 * 10 - 10))
    assert float(size_to_bin(size, 1024)) == pytest.approx(700, abs=1e-3)


def test_the_tokenizer_adds_nothing():
    """Plain text gives no special ids; every path number is one token that decodes to itself."""
    words = Words()
    assert min(words.encode("hi")) > 20
    assert all(
        words.decode([identity]).strip() == str(number) for number, identity in words.number.items()
    )
    assert words.tokenizer.get_vocab_size() == ModelConfig().vocab


@needs_art
def test_boxes_are_the_drawn_alpha(book, batch):
    """Every box is within two and a half pixels of the pixels that its sprite changes."""
    renderer = Renderer(book, torch.device("cpu"))
    tensors = {k: torch.from_numpy(v) for k, v in batch.items()}
    white = tensors | {
        "background": torch.zeros_like(tensors["background"]),
        "background_colours": torch.full_like(tensors["background_colours"], 0.5),
    }
    for row in range(len(batch["sprite"])):
        lone = {k: v[row : row + 1].clone() for k, v in white.items()}
        lone["sprite"][:, 1:] = -1
        drawn = renderer.draw(lone, restyle=False, faults=False)
        lone["sprite"][:] = -1
        changed = (drawn - renderer.draw(lone, restyle=False, faults=False)).abs().amax(
            (0, 1)
        ).numpy() > 0.05
        rows, columns = np.nonzero(changed.any(1))[0], np.nonzero(changed.any(0))[0]
        hull = book.hull[batch["sprite"][row, 0]]
        forward_matrix = np.linalg.inv(batch["inverse"][row, 0, :, :2].astype(float))
        points = (hull - batch["inverse"][row, 0, :, 2]) @ forward_matrix.T
        box = np.clip(np.concatenate([points.min(0), points.max(0)]), 0, 1) * CROP
        seen = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        assert np.abs(np.array(seen) - box).max() < 2.5, (row, seen, box)


@needs_art
def test_answers_run_left_to_right(batch):
    """The x of successive boxes never falls."""
    start, end = STARTS[DETECT_A], STARTS[DETECT_A] + SLOTS[DETECT_A]
    for tokens, values in zip(
        batch["tokens"][:, start:end], batch["values"][:, start:end], strict=True
    ):
        xs = [values[i - 2, 0] for i in np.flatnonzero(tokens == 6)]
        assert xs == sorted(xs)


def test_the_packed_length_is_aligned():
    """Keys come in multiples of eight, which the masked attention kernels want."""
    assert (ModelConfig().prefix + LENGTH) % 8 == 0


def test_scenes_of_shapes_need_no_pack(tmp_path):
    """A labelled folder of them has boxes within its pictures."""
    document = labelled.write(tmp_path, None, count=3, seed=5, device="cpu")
    names = {each["file_name"] for each in document["images"]}
    assert names == {path.name for path in tmp_path.glob("*.png")}
    assert document["annotations"]
    for each in document["annotations"]:
        left, top, wide, high = each["bbox"]
        assert left >= 0 <= top
        assert max(left + wide, top + high) <= CROP


def test_the_shipped_configuration_is_the_trainings() -> None:
    """What may be said in words, and how a question without an image is asked, is written here."""
    words = Words()
    config = engine_config(ModelConfig(), words.templates(), words.untaught())
    assert json.loads((SHIPPED / "config.json").read_text()) == config


def test_untaught_tokens_are_in_no_answer() -> None:
    """Captions and answers about many scenes hold none of the tokens that are suppressed there."""
    words, rng = Words(), np.random.default_rng(3)
    untaught = set(words.untaught())
    assert {words.identity(text) for text in ("L", "768", "<query>")} <= untaught
    sampler = ShapeSampler(shape_sprites(), 11)
    for _ in range(200):
        narrator = Narrator(sampler.sample(), rng, sampler.lexicon)
        said = [narrator.short(), narrator.normal(), narrator.long()]
        said += [narrator.question(sampler.random_kind())[1] for _ in range(4)]
        assert not untaught & {token for text in said for token in words.encode(text)}, said


# ---------------------------------------------------------------- reach
# The study of how close bins must be to count.


def test_masses_are_the_engine_s_concentrations():
    """Of one head; of two their product."""
    logits = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(1)) * 3
    best = logits.argmax(-1)
    whole = concentration(logits, best, 4).prod(-1)
    assert masses(logits, [4.2, 1000.0])[:, 0].tolist() == pytest.approx(whole.tolist(), rel=1e-5)
    assert masses(logits, [1000.0])[:, 0].tolist() == pytest.approx([1.0] * 5)


def questions(count):
    """Boxes whose concentration with the present reach alone says whether they are right."""
    rng, right, wrong = np.random.default_rng(2), Box(0.1, 0.1, 0.5, 0.5), Box(0.6, 0.6, 0.9, 0.9)
    for number in range(count):
        near = rng.uniform(0.3, 0.9, (3, len(PLACES)))
        near[2] = near[2, PRESENT[1]]
        chance = float(near[:2, PRESENT[0]].prod() * near[2, PRESENT[1]])
        picture = LabelledImage(None, number, {"cup": (right,)})
        is_right = rng.uniform() < chance
        yield Question(picture, "cup", [right if is_right else wrong], np.ones(3), near)


def test_the_best_reach_is_found_on_the_fit_s_half(tmp_path, monkeypatch):
    """And what was kept in a file is what was asked."""
    monkeypatch.setattr("legato_training.reach.RESAMPLES", 5)
    some = {("fit", "detect"): list(questions(400)), ("test", "detect"): list(questions(200))}
    keep(tmp_path / "answers.gz", some)
    folders = {
        name: tuple(each.picture for each in some[name, "detect"]) for name in ("fit", "test")
    }
    read = kept(tmp_path / "answers.gz", folders)
    found = study(read["fit", "detect"], read["test", "detect"], "detect")
    assert found["best"]["place"] == PLACES[PRESENT[0]]
    assert len(found["fit"]) == len(PLACES) * len(OCTAVES)
    assert found["held_out"]["best"]["log_loss"] < found["held_out"]["existence_alone"]["log_loss"]
