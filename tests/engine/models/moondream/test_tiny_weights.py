"""The shipped weights: the engine computes them exactly, and they detect the samples."""

from __future__ import annotations

import dataclasses
import functools
import json
import resource
import shutil
from pathlib import Path
from typing import NamedTuple

import legato_tiny
import pytest
import torch
from legato_engine.config import LoadOptions
from legato_engine.errors import InvalidField
from legato_engine.kernels import map_codes
from legato_engine.kernels.cpu.library import library
from legato_engine.kernels.step import HEAD_DIM, MapPart
from legato_engine.layers.linear import Linear
from legato_engine.models import quantise
from legato_engine.models.moondream import vision_fp8
from legato_engine.models.moondream.frontend import Prompts
from legato_engine.models.moondream.model import MoondreamModel
from legato_engine.models.moondream.tasks import Allow
from legato_engine.models.moondream.tokenizer import BytePairTokenizer
from legato_engine.models.moondream.weights import load_weights
from legato_engine.models.paged_attention import KVCache
from legato_engine.models.registry import resolve
from legato_engine.types import CaptionLength, ImageProperties
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.engine.models.moondream.test_model import payload_of
from tests.engine.models.paged_session import PAGE_SIZE, PagedSession
from tests.engine.models.reference_moondream import ReferenceMoondream

CPU = torch.device("cpu")
FOLDER = Path(legato_tiny.path())
SAMPLES = FOLDER / "samples"
TRUTH = json.loads((SAMPLES / "truth.json").read_text())
ABSENT = ("elephant", "piano")
EOS = 0
LIMIT = 60
POINT_CYCLE = (Allow.POINT_X, Allow.POINT_Y)
DETECT_CYCLE = (Allow.DETECT_X, Allow.DETECT_Y, Allow.DETECT_SIZE)
TEXT_CYCLE = (Allow.TEXT,)
TOLERANCE = 1e-3
KINDS = ("fp8", "int8", "int4")


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
    info = ImageProperties(image_id=file, width=width, height=height, cache_hit=False)
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


def asked_by_cycle(prompts, file):
    """Prompts about a sample's objects and absent ones, by what their answers consist of."""
    nouns = (*TRUTH[file], *ABSENT)
    questions = [prompts.query(f"Is there a {noun}?", (), reasoning=False) for noun in nouns]
    return {
        DETECT_CYCLE: [prompts.detect(noun) for noun in nouns],
        POINT_CYCLE: [prompts.point(noun, ()) for noun in nouns],
        TEXT_CYCLE: [*questions, prompts.caption(CaptionLength.SHORT)],
    }


@pytest.fixture(scope="module")
def exact_answers(bundle, model, prompts):
    """Answers of the model in float32 to those prompts, each computed once."""
    return functools.cache(
        lambda file, cycle: greedy(
            model, prepared(bundle, file), asked_by_cycle(prompts, file)[cycle], cycle
        )
    )


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
def test_samples_are_seen_rightly(exact_answers, file):
    """Every object of a sample has one box, left to right; absent nouns have none."""
    expected = TRUTH[file] | dict.fromkeys(ABSENT, ())
    answers = exact_answers(file, DETECT_CYCLE)
    for (noun, truth), answer in zip(expected.items(), answers, strict=True):
        found = boxes_of(answer)
        assert len(found) == len(truth), noun
        assert all(iou(a, b) >= 0.5 for a, b in zip(found, truth, strict=True)), noun


def quantised_at_load(bundle, kind):
    """The network as a GPU packs it."""
    network = load_weights(bundle.config, FOLDER, CPU, torch.bfloat16)
    network.quantise(kind)
    return network


def exact_model(bundle, network):
    """A model of the dequantised weights in float32."""
    network.float()
    for layer in network.modules():
        if isinstance(layer, Linear) and isinstance(part := layer.packed, MapPart):
            layer.weight, layer.packed = torch.nn.Parameter(part.exact()), None
    model = MoondreamModel(bundle.config, network)
    network.pack("model", library("auto"))
    return model


def packed_tensors(network):
    """All tensors that decode steps read, by place."""
    found = {}
    for index, block in enumerate(network.text.text_blocks()):
        weights, own = block.quantised.weights, block.quantised
        for field in dataclasses.fields(weights):
            found[f"{index}.{field.name}"] = getattr(weights, field.name)
        found |= {f"{index}.qkv_bias": own.qkv_bias, f"{index}.fc1_bias": own.fc1_bias}
        norm = block.norm
        found |= {f"{index}.gain": norm.weight, f"{index}.shift": norm.bias}
    head = network.text.quantised_head
    found |= {"head.bias": head.bias}
    for field in dataclasses.fields(head.weights):
        found[f"head.{field.name}"] = getattr(head.weights, field.name)
    return found | dict(network.state_dict())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files that the command wrote, by kind."""
    folder = tmp_path_factory.mktemp("quantised")
    options = ("--model", "legato-tiny", "--weight-dtype")
    for kind in KINDS:
        output = str(folder / f"{kind}.safetensors")
        assert quantise.main([*options, kind, "--output", output]) == 0
    return {kind: folder / f"{kind}.safetensors" for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_file_is_what_a_load_quantises(bundle, files, kind):
    """A GPU packs the same bits; all other tensors, and a model's size, are the checkpoint's."""
    expected = quantised_at_load(bundle, kind)
    codes = map_codes.format_of(map_codes.KINDS[kind])
    network = load_weights(bundle.config, files[kind], CPU, torch.bfloat16, codes=codes)
    network.quantise(kind)
    ours, theirs = packed_tensors(network), packed_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor is ours[name] or torch.equal(tensor, ours[name]), name
    assert network.num_parameters == expected.num_parameters
    stored, source = load_file(files[kind]), load_file(FOLDER / "model.safetensors")
    kept = stored.keys() & source.keys()
    assert {"text.wte", "text.post_ln.bias"} <= {name.removeprefix("model.") for name in kept}
    assert all(stored[name].dtype is source[name].dtype for name in kept)
    assert all(torch.equal(stored[name], source[name]) for name in kept)
    assert files[kind].stat().st_size < 0.85 * (FOLDER / "model.safetensors").stat().st_size


@pytest.mark.parametrize("kind", ["packed", *KINDS])
def test_a_draft_reads_a_packed_head_as_it_reads_others(bundle, kind):
    """Weights and bias are bf16, and most tokens are those of the head that was packed."""
    plain = load_weights(bundle.config, FOLDER, CPU, torch.bfloat16).text
    packed = quantised_at_load(bundle, kind).text
    hidden_TD = 3.0 * torch.randn(200, packed.wte.shape[1]).bfloat16()
    ours, theirs = (
        torch.nn.functional.linear(text.post_ln(hidden_TD), *text.dense_head())
        for text in (packed, plain)
    )
    assert {each.dtype for each in packed.dense_head()} == {torch.bfloat16}
    assert (ours.argmax(1) == theirs.argmax(1)).float().mean() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_reads_a_quantised_file(bundle, prompts, files, kind):
    """Greedy answers are those of weights that were quantised at load, dequantised."""
    expected = exact_model(bundle, quantised_at_load(bundle, kind))
    ours = resolve("legato-tiny", str(files[kind])).load(CPU, torch.float32)
    asked = [prompts.detect(noun) for noun in ("apple", *ABSENT)]
    image = prepared(bundle, "scene.jpg")
    answers = greedy(ours, image, asked, DETECT_CYCLE)
    expected_answers = greedy(expected, image, asked, DETECT_CYCLE)
    for answer, exact in zip(answers, expected_answers, strict=True):
        assert [step.token for step in answer] == [step.token for step in exact]
        assert boxes_of(answer) == boxes_of(exact)
        assert relative_error(answer[0].logits_V, exact[0].logits_V) < 0.02


def rewritten(file, folder, recipe=None, drop=""):
    """The file with another recipe, or without a tensor."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    if recipe is not None:
        known = json.loads(metadata["legato_recipe"])
        metadata["legato_recipe"] = (
            recipe if isinstance(recipe, str) else json.dumps(known | recipe)
        )
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != drop}
    save_file(tensors, folder / "other.safetensors", metadata)
    return folder / "other.safetensors"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"version": 2}, "version 2, not 1"),
        ({"kind": "int3"}, "kind 'int3'"),
        ({"kind": "packed"}, "kind 'packed'"),
        ({"group_size": 32}, "not the maps and groups of int8"),
        ({"folds_norms": False}, "not the maps and groups of int8"),
        ({"maps": {}}, "not the maps and groups of int8"),
        ({"zeros": True}, "unknown field"),
        ({"version": "1"}, "Expected `int`"),
        ("[" * 100_000, ""),
        ("no json", "malformed"),
        ("{}", "version"),
    ],
)
def test_an_unknown_recipe_is_refused(files, tmp_path, recipe, said):
    """The sentence names the recipe's fault and both alternatives."""
    path = rewritten(files["int8"], tmp_path, recipe)
    with pytest.raises(InvalidField, match="unknown recipe") as caught:
        resolve("legato-tiny", str(path)).load(CPU, torch.float32)
    assert said in caught.value.message
    assert "legato quantize" in caught.value.message
    assert "checkpoint that they were made from" in caught.value.message
    assert "\n" not in caught.value.message


def test_another_weight_dtype_than_the_recipe_s_is_refused(files):
    """Neither another format nor the model's own: codes are not quantised again."""
    bundle = resolve("legato-tiny", str(files["int8"]))
    for other in ("model", "packed", "fp8", "int4"):
        with pytest.raises(InvalidField, match="use weight_dtype auto or int8") as caught:
            bundle.load(CPU, torch.float32, LoadOptions(weight_dtype=other))
        assert caught.value.metadata["field"] == "weight_dtype"
    assert bundle.load(CPU, torch.float32, LoadOptions(weight_dtype="int8")).num_parameters > 0


@pytest.mark.parametrize("name", ["text.head.scales", "text.blocks.0.fc2_proj.codes"])
def test_a_quantised_file_lacks_nothing(files, tmp_path, name):
    """Codes, scales and biases are matched as strictly as other tensors."""
    path = rewritten(files["int4"], tmp_path, drop=name)
    with pytest.raises(InvalidField, match=f"{name}: missing"):
        resolve("legato-tiny", str(path)).load(CPU, torch.float32)


def test_codes_without_their_recipe_are_unknown(files, tmp_path):
    """A file whose metadata are gone is no checkpoint."""
    save_file(load_file(files["int8"]), tmp_path / "bare.safetensors")
    with pytest.raises(InvalidField, match="does not fit the model"):
        resolve("legato-tiny", str(tmp_path / "bare.safetensors")).load(CPU, torch.float32)


def test_a_quantised_file_that_is_cut_off_is_refused(files, tmp_path):
    """Wherever it ends, and with a header that lies about its size."""
    whole = files["int4"].read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    ends = (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) - 1)
    hostile = [whole[:end] for end in ends]
    hostile += [b"\xff" * 8 + whole[8:], (1 << 40).to_bytes(8, "little") + whole[8:], whole + b"0"]
    path = tmp_path / "cut.safetensors"
    for data in hostile:
        path.write_bytes(data)
        with pytest.raises(InvalidField, match=r"cut\.safetensors") as caught:
            resolve("legato-tiny", str(path)).load(CPU, torch.float32)
        assert caught.value.metadata["field"] == "weights"


def test_quantize_overwrites_and_leaves_nothing(files, tmp_path, monkeypatch, capsys):
    """A file that exists stays unless forced, and a failure leaves no part."""
    output = tmp_path / "out.safetensors"
    output.write_bytes(b"mine")
    command = ["--model", "legato-tiny", "--weight-dtype", "fp8", "--output", str(output)]
    assert quantise.main(command) == 2
    assert "--force" in capsys.readouterr().err
    again = [*command, "--force", "--weights", str(files["int8"])]
    assert quantise.main(again) == 2
    assert "--weights: " in (said := capsys.readouterr().err)
    assert "is quantised already" in said
    with monkeypatch.context() as patched:
        usage = type(shutil.disk_usage(tmp_path))(1, 1, 1000)
        patched.setattr(shutil, "disk_usage", lambda _: usage)
        assert quantise.main([*command, "--force"]) == 1
    assert "0.00 GB left" in capsys.readouterr().err
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
        assert quantise.main([*command, "--force"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert output.read_bytes() == b"mine"
    assert quantise.main([*command, "--force"]) == 0
    assert output.read_bytes() == files["fp8"].read_bytes()
    assert quantise.main([*command[:-1], str(tmp_path / "no" / "out.safetensors")]) == 2


@pytest.mark.parametrize(("weights", "most_error"), [("fp8", 0.08), ("int8", 0.03), ("int4", 0.25)])
def test_quantised_weights_see_the_samples_rightly(
    bundle, model, prompts, exact_answers, monkeypatch, weights, most_error
):
    """Weights as a GPU packs them find every box of every sample.

    So their F1 there is that of the weights in float32; logits stay within a share of the largest.
    """
    rounded = exact_model(bundle, quantised_at_load(bundle, weights))
    monkeypatch.setattr(rounded, "prefix_embeddings", model.prefix_embeddings)
    found = expected_boxes = matched = 0
    for file, truth in TRUTH.items():
        expected = truth | dict.fromkeys(ABSENT, ())
        asked = asked_by_cycle(prompts, file)[DETECT_CYCLE]
        answers = greedy(rounded, prepared(bundle, file), asked, DETECT_CYCLE)
        plain = exact_answers(file, DETECT_CYCLE)
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


# ---------------------------------------------------------------- vision tower in fp8


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The shipped model's folder, and a calibration by three samples that the command wrote."""
    folder, images = (tmp_path_factory.mktemp(name) for name in ("calibrated", "images"))
    for name in list(TRUTH)[:3]:
        (images / name).symlink_to(SAMPLES / name)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to(FOLDER / name)
    command = ["--model", "legato-tiny", "--images", str(images), "--vision-error", "0.018"]
    assert quantise.main([*command, "--output", str(folder / vision_fp8.FILE_NAME)]) == 0
    return folder


def recipe_of(folder):
    """The recipe in a calibration's metadata."""
    with safe_open(folder / vision_fp8.FILE_NAME, "pt") as opened:
        return json.loads(opened.metadata()["legato_vision_fp8"])


def test_a_calibration_keeps_few_blocks_for_its_error(calibrated):
    """The recipe names what was measured, on images that the means are not of."""
    recipe = recipe_of(calibrated)
    assert 0 < recipe["plain_blocks"] < 8
    assert 0 < recipe["error"] <= 0.018
    assert recipe["images"] == 3


@pytest.mark.parametrize(
    ("has_calibration", "files"), [(True, list(TRUTH)[:3]), (False, list(TRUTH)[3:])]
)
def test_images_in_fp8_are_answered_as_in_float32(
    bundle, model, prompts, exact_answers, monkeypatch, calibrated, has_calibration, files
):
    """On the samples: the same boxes and points, and nearly all tokens of texts.

    The tower is in e4m3, and so is the decoder's pass over an image.
    """
    folder = calibrated if has_calibration else FOLDER
    options = LoadOptions(vision_fp8=True)
    ours_model = resolve("legato-tiny", str(folder)).load(CPU, torch.float32, options)
    same = tokens = 0
    for file in files:
        image = prepared(bundle, file)
        exact_PX, ours_PX = (each.prefix_embeddings(image) for each in (model, ours_model))
        error = (ours_PX - exact_PX)[1:].norm() / exact_PX[1:].norm()
        assert 0.005 < float(error) < 0.04
        for cycle, asked in asked_by_cycle(prompts, file).items():
            with monkeypatch.context() as patched:  # embeds once
                patched.setattr(ours_model, "prefix_embeddings", lambda _, x=ours_PX: x.clone())
                answers = greedy(ours_model, image, asked, cycle)
            for ours, exact in zip(answers, exact_answers(file, cycle), strict=True):
                if cycle == TEXT_CYCLE:
                    tokens += len(exact)
                    pairs = zip(ours, exact, strict=False)
                    same += sum(one.token == other.token for one, other in pairs)
                elif cycle == POINT_CYCLE:
                    points = ([step.payload[0] for step in each] for each in (ours, exact))
                    assert next(points) == pytest.approx(next(points), abs=0.02)
                else:
                    pairs = zip(boxes_of(ours), boxes_of(exact), strict=True)
                    assert all(iou(a, b) >= 0.85 for a, b in pairs)
    assert same >= 0.95 * tokens


def image_cache(text, x_PD):
    """Keys and values of an image's positions, layer by layer."""
    text.fill(CPU)
    num_pages = -(-len(x_PD) // PAGE_SIZE)
    layers, heads = len(text.blocks), x_PD.shape[1] // HEAD_DIM
    shape = (2, layers, num_pages + 1, heads, PAGE_SIZE, HEAD_DIM)
    kv = KVCache(*torch.zeros(shape, dtype=x_PD.dtype))
    text.cache_stacked(x_PD[None], torch.arange(1, num_pages + 1)[None], kv)
    return torch.stack([kv.k_LNHSE, kv.v_LNHSE], 1).float()


@pytest.mark.parametrize("kind", KINDS)
def test_images_in_fp8_are_of_the_weights_before_they_are_packed(bundle, files, kind):
    """Packing changes the last block only; of a quantised file its values are rounded once more."""
    generator = torch.Generator().manual_seed(2)
    x_PD = torch.randn(100, bundle.config.text.dim, generator=generator).bfloat16()
    plain, packed = (load_weights(bundle.config, FOLDER, CPU, torch.bfloat16) for _ in range(2))
    truth_L = image_cache(plain.text, x_PD)
    for network in (plain, packed):
        network.text.use_fp8()
    packed.quantise(kind)
    packed.text.use_fp8()  # another time changes nothing
    of_plain_L, of_packed_L = (image_cache(each.text, x_PD) for each in (plain, packed))
    assert torch.equal(of_plain_L[:-1], of_packed_L[:-1])
    assert not torch.equal(of_plain_L[-1], of_packed_L[-1])
    codes = map_codes.format_of(map_codes.KINDS[kind])
    stored = load_weights(bundle.config, files[kind], CPU, torch.bfloat16, codes=codes)
    stored.quantise(kind)
    rounded_L = image_cache(stored.text, x_PD)
    stored.text.use_fp8()
    twice_L = image_cache(stored.text, x_PD)
    assert all(block.ln.weight.eq(1).all() for block in stored.text.image_blocks)
    for ours_L, expected_L in ((of_plain_L, truth_L), (twice_L, rounded_L)):
        for ours, expected in zip(ours_L, expected_L, strict=True):
            assert 0.005 < float((ours - expected).norm() / expected.norm()) < 0.08


@pytest.fixture(scope="module")
def tower(bundle):
    """The shipped vision tower, plain."""
    return load_weights(bundle.config, FOLDER, CPU, torch.float32).vision


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2, not 1"),
        ({"tower": "0" * 64}, "made for other weights"),
        ({"plain_blocks": 9}, "keeps 9 blocks of 8"),
        ({"plain_blocks": -1}, "unknown recipe"),
        ({"zeros": True}, "unknown recipe"),
        ("proj", "has other tensors"),
        ("fc2", "not finite"),
        (None, "unknown recipe"),
        (b"none", "cannot be read"),
    ],
)
def test_a_calibration_of_something_else_is_refused(calibrated, tower, tmp_path, change, said):
    """The sentence names the file, its fault and what to do; the tower stays plain."""
    path = tmp_path / vision_fp8.FILE_NAME
    tensors = load_file(calibrated / path.name)
    recipe = recipe_of(calibrated) | (change if isinstance(change, dict) else {})
    if change == "proj":
        del tensors["proj"]
    elif change == "fc2":
        tensors["fc2"][1, 5] = torch.nan
    metadata = {} if change is None else {"legato_vision_fp8": json.dumps(recipe)}
    save_file(tensors, path, metadata)
    if isinstance(change, bytes):
        path.write_bytes(change)
    with pytest.raises(InvalidField, match=said) as caught:
        vision_fp8.use_fp8(tower, tmp_path)
    assert caught.value.metadata["field"] == "vision_dtype"
    assert path.name in caught.value.message
    assert "use vision_dtype auto, remove the file, or" in caught.value.message
    assert not any(tensor.dtype is torch.float8_e4m3fn for tensor in tower.parameters())


def test_a_calibration_is_looked_for_beside_the_weights(monkeypatch, calibrated):
    """Of a folder and of a file, and only with fp8."""
    seen = []
    monkeypatch.setattr(vision_fp8, "use_fp8", lambda _, folder: seen.append(folder))
    for weights in (calibrated, calibrated / "model.safetensors"):
        bundle = resolve("legato-tiny", str(weights))
        for fp8 in (True, False):
            bundle.load(CPU, torch.float32, LoadOptions(vision_fp8=fp8))
    assert seen == [calibrated] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--output", "other.safetensors"], "looks for vision_fp8.safetensors only"),
        (["--group-size", "64"], "--group-size is for int4"),
        (["--images", "."], "--images: calibration needs 2 images or more, not 0"),
        (["--images", ""], "give --weight-dtype to round weights, or --images"),
    ],
)
def test_a_calibration_needs_images_and_its_name(tmp_path, monkeypatch, capsys, options, said):
    """Nothing is written, and the sentence names the option."""
    monkeypatch.chdir(tmp_path)
    command = ["--model", "legato-tiny", "--images", str(SAMPLES), "--output"]
    assert quantise.main([*command, vision_fp8.FILE_NAME, *options]) == 2
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
