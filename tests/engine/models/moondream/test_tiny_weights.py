"""The shipped weights: the engine computes them exactly, and they detect the samples."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import legato_tiny
import pytest
import torch
from legato_engine.kernels.cpu.library import library
from legato_engine.kernels.cuda.packed_layers import MapPart
from legato_engine.layers.linear import Linear
from legato_engine.models.moondream.frontend import Prompts
from legato_engine.models.moondream.model import MoondreamModel
from legato_engine.models.moondream.tasks import Allow
from legato_engine.models.moondream.tokenizer import BytePairTokenizer
from legato_engine.models.moondream.weights import load_weights
from legato_engine.models.registry import resolve
from legato_engine.types import CaptionLength, ImageInfo
from PIL import Image
from safetensors.torch import load_file

from tests.engine.models.moondream.test_model import payload_of
from tests.engine.models.paged_session import PagedSession
from tests.engine.models.reference_moondream import ReferenceMoondream

CPU = torch.device("cpu")
FOLDER = Path(legato_tiny.path())
SAMPLES = FOLDER / "samples"
TRUTH = json.loads((SAMPLES / "truth.json").read_text())
ABSENT = ("elephant", "piano")
EOS = 0
LIMIT = 60
DETECT_CYCLE = (Allow.DETECT_X, Allow.DETECT_Y, Allow.DETECT_SIZE)
TOLERANCE = 1e-3


class Step(NamedTuple):
    """A token, its value, and the logits it was chosen from."""

    token: int
    payload: tuple[float, ...]
    logits_V: torch.Tensor


class TurningReference(ReferenceMoondream):
    """The reference with a rotation without loops, because these sequences are long."""

    def turn(self, x):
        """Pairs (i, i + half) as complex numbers, turned by position."""
        text = self.config.text
        half = text.rotary_dim // 2
        speed = text.rope_theta ** (-torch.arange(half).double() / half)
        angle = torch.arange(len(x)).double()[:, None] * speed
        pairs = torch.complex(x[:, :half], x[:, half : 2 * half])
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag, x[:, 2 * half :]], -1)


@pytest.fixture(scope="module")
def bundle():
    """The registry's bundle of the name."""
    return resolve("legato-tiny")


@pytest.fixture(scope="module")
def model(bundle):
    """The shipped weights in float32; an image is encoded once."""
    loaded = bundle.load(CPU, torch.float32)
    encode = loaded.prefix_embeddings
    seen = {}

    def prefix_embeddings(image):
        if image.key not in seen:
            seen[image.key] = encode(image)
        return seen[image.key].clone()

    loaded.prefix_embeddings = prefix_embeddings
    return loaded


@pytest.fixture(scope="module")
def prompts(bundle):
    """Prompts in the shipped tokenizer's ids."""
    tokenizer = BytePairTokenizer(FOLDER / "tokenizer.json")
    return Prompts(bundle.config, tokenizer)


@pytest.fixture(scope="module")
def reference(bundle):
    """The file's weights in float64, dense."""
    return TurningReference(bundle.config, load_file(FOLDER / "model.safetensors"))


@functools.cache
def sample_image(file):
    """A decoded sample."""
    return Image.open(SAMPLES / file).convert("RGB")


def prepared(bundle, file):
    """A sample, prepared by the frontend."""
    width, height = sample_image(file).size
    info = ImageInfo(image_id=file, width=width, height=height, cache_hit=False)
    return bundle.frontend.prepare_image(sample_image(file), file, info)


def best(model, logits_V, allow):
    """The likeliest token that a constraint allows."""
    constraint = model.constraints[allow]
    scores_V = logits_V.clone()
    if constraint.allowed is not None:
        forbidden = torch.ones_like(scores_V, dtype=torch.bool)
        forbidden[list(constraint.allowed)] = False
        scores_V[forbidden] = -torch.inf
    scores_V[list(constraint.suppressed)] = -torch.inf
    return scores_V.argmax().item()


def greedy(model, image, prompts, cycle):
    """Each prompt's answer up to EOS, all rows together, as `Step`s."""
    session = PagedSession(model, len(prompts))
    hidden_RD = torch.cat([session.prefill(r, image, p) for r, p in enumerate(prompts)])
    answers: list[list[Step]] = [[] for _ in prompts]
    for index in range(LIMIT):
        logits_RV = model.logits(hidden_RD)
        for row, answer in enumerate(answers):
            if answer and answer[-1].token == EOS:
                continue
            token = best(model, logits_RV[row], cycle[index % len(cycle)])
            payload_12 = payload_of(model, hidden_RD[row : row + 1], torch.tensor([token]))
            answer.append(Step(token, tuple(payload_12[0].tolist()), logits_RV[row]))
            session.feed(row, token, answer[-1].payload)
        if all(answer[-1].token == EOS for answer in answers):
            return answers
        hidden_RD = session.step()
    raise AssertionError("an answer does not end")


def boxes_of(answer):
    """(left, top, right, bottom) of each coord, coord, size."""
    found = []
    for i in range(0, len(answer) - 2, 3):
        (x, _), (y, _), (w, h) = (step.payload for step in answer[i : i + 3])
        found.append((x - w / 2, y - h / 2, x + w / 2, y + h / 2))
    return found


def iou(a, b):
    """Intersection over union."""
    wide = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    high = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = sum((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b))
    return wide * high / (areas - wide * high)


def relative_error(actual, expected):
    """Largest difference over the largest expected magnitude."""
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def test_the_engine_computes_what_the_weights_mean(bundle, model, prompts, reference):
    """Image, logits and greedy answers equal the dense float64 reference."""
    image = prepared(bundle, "scene.jpg")
    embeddings_TD = reference.image_embeddings(sample_image("scene.jpg"), image.pixels.tiling)
    assert relative_error(model.prefix_embeddings(image)[1:], embeddings_TD) < TOLERANCE
    asked = (
        (prompts.detect("apple"), DETECT_CYCLE, 7),
        (prompts.caption(CaptionLength.NORMAL), (Allow.TEXT,), 20),
    )
    for prompt, cycle, at_least in asked:
        (answer,) = greedy(model, image, [prompt], cycle)
        assert len(answer) >= at_least
        tokens = [(token.token_id, token.payload) for token in prompt]
        tokens += [(step.token, step.payload) for step in answer[:-1]]
        hidden_ND = reference.hidden(embeddings_TD, tokens)[-len(answer) :]
        expected_NV = reference.logits(hidden_ND)
        assert relative_error(torch.stack([s.logits_V for s in answer]), expected_NV) < TOLERANCE
        for index, step in enumerate(answer):
            assert step.token == best(model, expected_NV[index], cycle[index % len(cycle)])
            expected = reference.value(hidden_ND[index], step.token)
            assert step.payload == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("file", TRUTH)
def test_samples_are_seen_rightly(bundle, model, prompts, file):
    """Every object of a sample has one box, left to right; absent nouns have none."""
    expected = TRUTH[file] | dict.fromkeys(ABSENT, ())
    asked = [prompts.detect(noun) for noun in expected]
    answers = greedy(model, prepared(bundle, file), asked, DETECT_CYCLE)
    for (noun, truth), answer in zip(expected.items(), answers, strict=True):
        found = boxes_of(answer)
        assert len(found) == len(truth), noun
        assert all(iou(a, b) >= 0.5 for a, b in zip(found, truth, strict=True)), noun


@pytest.mark.parametrize(("weights", "most_error"), [("fp8", 0.08), ("int8", 0.03), ("int4", 0.25)])
def test_quantised_weights_see_the_samples_rightly(
    bundle, model, prompts, monkeypatch, weights, most_error
):
    """Weights as a GPU packs them find every box of every sample.

    So their F1 there is that of the weights in float32; logits stay within a share of the largest.
    """
    network = load_weights(bundle.config, FOLDER, CPU, torch.bfloat16)
    network.quantise(weights)
    network.float()
    for layer in network.modules():
        if isinstance(layer, Linear) and isinstance(part := layer.packed, MapPart):
            layer.weight, layer.packed = torch.nn.Parameter(part.exact()), None
    quantised = MoondreamModel(bundle.config, network)
    network.pack("model", library("auto"))
    monkeypatch.setattr(quantised, "prefix_embeddings", model.prefix_embeddings)
    found = expected_boxes = matched = 0
    for file, truth in TRUTH.items():
        expected = truth | dict.fromkeys(ABSENT, ())
        asked = [prompts.detect(noun) for noun in expected]
        image = prepared(bundle, file)
        answers = greedy(quantised, image, asked, DETECT_CYCLE)
        plain = greedy(model, image, asked, DETECT_CYCLE)
        for boxes, answer, exact in zip(expected.values(), answers, plain, strict=True):
            first, expected_V = answer[0].logits_V, exact[0].logits_V
            assert relative_error(first, expected_V) < most_error
            seen = boxes_of(answer)
            found, expected_boxes = found + len(seen), expected_boxes + len(boxes)
            pairs = zip(seen, boxes, strict=False)
            matched += sum(iou(a, b) >= 0.5 for a, b in pairs)
    f1 = 2 * matched / (found + expected_boxes)
    assert f1 >= (0.98 if weights == "int4" else 0.995)


def test_samples_are_small_and_explained():
    """Images stay small, each has its truth, and the demo's script has every part."""
    images = {p.name for p in SAMPLES.iterdir() if p.suffix in (".jpg", ".png", ".webp")}
    assert images == set(TRUTH)
    assert all((SAMPLES / name).stat().st_size <= 150_000 for name in images)
    script = json.loads((SAMPLES / "scene.json").read_text())
    assert script.keys() == {"caption_length", "detect", "point", "segment", "query"}
    assert "Fluent" in (SAMPLES / "README.md").read_text()
