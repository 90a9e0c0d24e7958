"""Models by name, texts as they are decoded, and calibrated confidences."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.errors import InvalidField, ModelNotFound, PromptTooLong
from legato_engine.models.confidence import Calibration, confidence_info, read_calibrations, score
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.models.moondream.tokenizer import NUM_SPECIAL, StandInTokenizer
from legato_engine.models.moondream.weights import random_weights
from legato_engine.models.registry import may_have_chat_template, resolve, tokenizer_path
from legato_engine.models.text import Detokenizer
from legato_engine.types import ImageProperties, QuerySpec, Request, RequestKey
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A model's folder: config.json, tokenizer.json, model.safetensors."""
    (tmp_path / "config.json").write_text(json.dumps(msgspec.to_builtins(tiny_random_config())))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[f"<|{index}|>" for index in range(21)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a cup"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    state = random_weights(tiny_random_config(), 4, CPU, torch.float32).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


def test_resolving_loads_no_torch(child_python_path):
    """Everything up to loading Moondream's weights runs in a process without torch."""
    program = (
        "import sys\n"
        "from legato_engine.models.registry import resolve\n"
        "from legato_engine.types import ImageProperties\n"
        "from legato_engine.types import RequestKey\n"
        "from legato_engine.types import Request\n"
        "from legato_engine.types import QuerySpec\n"
        "bundle = resolve('random-tiny')\n"
        "request = Request(request_id=RequestKey('r'), task=QuerySpec(question='?'))\n"
        "assert bundle.frontend.make_task(request).prompt\n"
        "from PIL import Image\n"
        "info = ImageProperties(image_id='i', width=99, height=99, cache_hit=False)\n"
        "bundle.frontend.prepare_image(Image.new('RGB', (99, 99)), 'k', info)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


@pytest.mark.parametrize(
    ("name", "weights", "may"),
    [
        ("legato-tiny", "", False),
        ("legato-tiny", "a.gguf", True),
        ("moondream3", "a-folder", False),
        ("qwen", "a-folder", True),
        ("smollm2-135m", "", True),
        ("no-model", "", False),
    ],
)
def test_text_models_may_have_a_chat_template(name, weights, may):
    """That is known before anything is read, so that the template's process can start first."""
    assert may_have_chat_template(name, weights) is may


def test_unknown_names_are_refused():
    """The error lists the known names."""
    with pytest.raises(ModelNotFound, match="legato-tiny"):
        resolve("gpt")


def test_a_folder_loads(folder):
    """Configuration, tokenizer and weights of a folder make a model."""
    bundle = resolve("legato-tiny", weights=str(folder))
    model = bundle.load(CPU, torch.float32)
    assert bundle.frontend.name == "random-tiny"
    assert bundle.max_context == model.max_context == 256
    assert model.constraints == bundle.frontend.constraints
    state = random_weights(tiny_random_config(), 4, CPU, torch.float32).state_dict()
    assert model.num_parameters == sum(tensor.numel() for tensor in state.values())
    with torch.inference_mode():
        embedded = model.embed(torch.tensor([30]), torch.zeros(1, 2))
    assert torch.equal(embedded[0], state["text.wte"][30])


def test_an_empty_folder_is_refused(tmp_path):
    """A folder without config.json is named."""
    with pytest.raises(InvalidField, match=tmp_path.name):
        resolve("legato-tiny", weights=str(tmp_path))


@pytest.mark.parametrize("name", ["random-tiny", "random-tiny3", "legato-tiny"])
def test_random_weights_need_no_files(name):
    """A model with random weights takes an image and gives finite logits."""
    bundle = resolve(name, random_weights=True)
    model = bundle.load(CPU, torch.float32)
    from PIL import Image

    info = ImageProperties(image_id="i", width=200, height=100, cache_hit=False)
    image = bundle.frontend.prepare_image(Image.new("RGB", (200, 100)), "k", info)
    with torch.inference_mode():
        x_PD = model.prefix_embeddings(image)
        assert x_PD.shape == (bundle.frontend.prefix_length(True), model.width)
        assert torch.isfinite(model.logits(x_PD[-1:])).all()


@pytest.mark.parametrize(
    ("name", "context"), [("moondream2", 2048), ("moondream3", 32768), ("moondream3.1", 32768)]
)
def test_published_models_say_what_they_need(tmp_path, name, context):
    """Weights and tokenizer are required, unless weights are random."""
    with pytest.raises(InvalidField, match=f"{name} is not at .*legato pull {name}"):
        resolve(name, models=str(tmp_path))
    with pytest.raises(InvalidField, match=f"{name} needs a tokenizer"):
        resolve(name, weights=str(tmp_path))
    bundle = resolve(name, random_weights=True)
    assert (bundle.frontend.name, bundle.max_context) == (name, context)
    assert ("segment" in bundle.frontend.tasks) == (name != "moondream2")


def test_a_shorter_context_is_kept_to():
    """A bound on the context reaches the model and the prompts; an impossible one is refused."""
    bundle = resolve("random-tiny", max_context=64)
    assert bundle.max_context == bundle.load(CPU, torch.float32).max_context == 64
    request = Request(request_id=RequestKey("r"), task=QuerySpec(question="x" * 100))
    with pytest.raises(PromptTooLong) as caught:
        bundle.frontend.make_task(request)
    assert caught.value.metadata["limit"] == "64"
    for wrong in (17, 257):
        with pytest.raises(InvalidField, match="18 to 256"):
            resolve("random-tiny", max_context=wrong)


def test_moondream2_has_the_published_tensors():
    """Moondream 2 has 592 tensors and 1.93 billion parameters, with the published names."""
    from legato_engine.models.moondream.family import MoondreamBundle
    from legato_engine.models.moondream.model import Network

    bundle = resolve("moondream2", random_weights=True)
    assert isinstance(bundle, MoondreamBundle)
    with torch.device("meta"):
        state = Network(bundle.config).state_dict()
    assert len(state) == 592
    assert sum(tensor.numel() for tensor in state.values()) == pytest.approx(1.93e9, rel=0.01)
    shapes = {
        "vision.patch_emb.weight": (1152, 588),
        "vision.pos_emb": (1, 729, 1152),
        "vision.blocks.26.mlp.fc1.weight": (4304, 1152),
        "vision.proj_mlp.fc1.weight": (8192, 2304),
        "text.wte": (51200, 2048),
        "text.blocks.23.attn.qkv.weight": (6144, 2048),
        "text.lm_head.bias": (51200,),
        "region.coord_features": (1, 128),
        "region.size_features": (2, 256),
        "region.size_encoder.weight": (2048, 512),
        "region.coord_decoder.fc2.weight": (1024, 8192),
        "region.size_decoder.fc2.weight": (2048, 8192),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_the_tokenizer_that_will_be_read_is_known_ahead(tmp_path):
    """Whatever names it; the shipped one and that in a GGUF need no check of a file."""
    given, here = tmp_path / "given.json", tmp_path / "tokenizer.json"
    assert tokenizer_path("llama", str(tmp_path), str(given)) == given
    assert tokenizer_path("llama", str(tmp_path), "") == here
    assert tokenizer_path("smollm2-135m", "", "", str(tmp_path)) == (
        tmp_path / "smollm2-135m" / "tokenizer.json"
    )
    assert tokenizer_path("legato-tiny", "", "") is None
    assert tokenizer_path("llama", str(tmp_path / "model.gguf"), "") is None


# ---------------------------------------------------------------- detokenizer
# Whole characters, nothing lost, nothing after a stop string.

TOKENIZER = StandInTokenizer()
TEXTS = st.text(alphabet=st.sampled_from("ab \n€é😀x"), max_size=40)
STOPS = st.lists(st.text(alphabet="ab €", min_size=1, max_size=4), max_size=3)


def stream_all(ids, stop=()):
    """The detokenizer after all ids, and the texts it returned."""
    stream = Detokenizer(TOKENIZER, stop)
    shown = [stream.push(token_id) for token_id in ids]
    return stream, [*shown, stream.close()]


@given(TEXTS)
def test_text_comes_back(text):
    """Returned texts add up to the text without leading whitespace."""
    stream, shown = stream_all(TOKENIZER.encode(text))
    assert "".join(shown) == stream.text == text.lstrip()


@given(st.lists(st.integers(0, 255), max_size=40))
def test_broken_bytes_never_show(values):
    """Of any bytes, only complete characters are returned, and no replacement character."""
    data = bytes(values)
    stream, shown = stream_all([NUM_SPECIAL + byte for byte in data])
    assert "".join(shown) == stream.text == data.decode("utf-8", "ignore").lstrip()


def test_an_unfinished_character_waits():
    """A character is returned with its last byte, and dropped if that is missing."""
    euro = TOKENIZER.encode("€")
    _, shown = stream_all([*euro, *euro[:2]])
    assert shown == ["", "", "€", "", "", ""]


@given(TEXTS, STOPS)
def test_text_ends_before_the_first_stop_string(text, stop):
    """The text ends before the stop string that is complete first."""
    stream = Detokenizer(TOKENIZER, stop)
    shown, read = "", b""
    for token_id in TOKENIZER.encode(text):
        read += TOKENIZER.piece(token_id)
        shown += stream.push(token_id)
        if stream.stopped:
            break
    seen = read.decode("utf-8", "ignore").lstrip()
    cuts = [seen.find(s) for s in stop if s in seen]
    assert stream.stopped == bool(cuts)
    shown += stream.close()
    assert shown == stream.text == (seen[: min(cuts)] if cuts else seen)


@given(TEXTS, STOPS)
def test_little_is_held_back(text, stop):
    """The text held back is shorter than the longest stop string."""
    stream = Detokenizer(TOKENIZER, stop)
    read = ""
    for letter in text:
        for token_id in TOKENIZER.encode(letter):
            stream.push(token_id)
        if stream.stopped:
            break
        read = (read + letter).lstrip()
        assert len(read) - len(stream.text) <= max((len(s) - 1 for s in stop), default=0)


def test_nothing_comes_after_a_stop():
    """Tokens after a stop string return nothing."""
    stream, shown = stream_all(TOKENIZER.encode("xabx"), ["ab"])
    assert stream.stopped
    assert "".join(shown) == "x"


# ---------------------------------------------------------------- confidence
# Confidences of objects, and the file that calibrates them.

ROOT = Path(__file__).parents[3]
FILE = {
    "fitted_on": "scenes",
    "fitted_at": "2026-11-25",
    "skills": {"detect": {"temperature": 2.0, "offset": -1.0}},
}


def test_a_score_is_a_product():
    """Of both numbers of each token; it is not known where one of them is not."""
    assert score([(0.5, 0.5), (1.0, 0.8), (1.0, 0.5)]) == pytest.approx(0.1)
    assert score([(0.5, 0.5), None]) is None


def test_a_calibration_is_a_line_in_logits():
    """The identity by default; it keeps the order, and 0 and 1 stay inside."""
    assert Calibration()(0.3) == pytest.approx(0.3)
    fitted = Calibration(2.0, -1.0)
    assert fitted(0.9) == pytest.approx(1 / (1 + math.exp(1 - math.log(9) / 2)))
    scores = [0.0, 1e-6, 0.2, 0.7, 1.0]
    assert sorted(map(fitted, scores)) == [fitted(each) for each in scores]
    assert all(0 < fitted(each) < 1 for each in scores)


def test_the_file_beside_the_weights(tmp_path):
    """It says which skills are calibrated, on what and when; without it none is."""
    assert read_calibrations(tmp_path) is None
    (tmp_path / "confidence.json").write_text(json.dumps(FILE))
    content = read_calibrations(tmp_path)
    assert content is not None
    assert content.skills == {"detect": Calibration(2.0, -1.0)}
    info = confidence_info(("query", "detect", "segment"), content)
    assert info is not None
    assert (info.skills, info.calibrated) == (("detect", "segment"), ("detect",))
    assert (info.fitted_on, info.fitted_at) == ("scenes", 1795564800)
    uncalibrated = confidence_info(("detect",), None)
    assert uncalibrated is not None
    assert uncalibrated.calibrated == ()
    assert confidence_info(("query",), content) is None


@pytest.mark.parametrize(
    "change",
    [
        {"skills": {"detect": {"temperature": 0}}},
        {"skills": {"caption": {}}},
        {"fitted_at": "soon"},
        {"scale": 1},
    ],
)
def test_a_malformed_file_is_refused(tmp_path, change):
    """Weights with a file that says something else do not load."""
    (tmp_path / "confidence.json").write_text(json.dumps(FILE | change))
    with pytest.raises(InvalidField, match=r"confidence\.json"):
        read_calibrations(tmp_path)


def test_legato_tiny_ships_the_fits_that_helped():
    """None did: what helps all objects of the held-out scenes spoils those that they show."""
    record = json.loads((ROOT / "training/results/confidence.json").read_text())["skills"]
    assert read_calibrations(ROOT / "engine/tiny/legato_tiny") is None
    for each in record.values():
        worse = each["shown_ece_after"] > each["shown_ece_before"] + each["gain_error"]
        assert not each["ships"]
        assert worse or each["share_better"] < 0.95
