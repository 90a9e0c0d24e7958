"""Models by name."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest
import torch
from legato_engine.errors import InvalidField, ModelNotFound, PromptTooLong
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.models.moondream.weights import random_weights
from legato_engine.models.registry import may_have_chat_template, resolve, tokenizer_path
from legato_engine.types import ImageInfo, QueryTask, Request, RequestKey
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
        "from legato_engine.types import ImageInfo\n"
        "from legato_engine.types import RequestKey\n"
        "from legato_engine.types import Request\n"
        "from legato_engine.types import QueryTask\n"
        "bundle = resolve('random-tiny')\n"
        "request = Request(request_id=RequestKey('r'), task=QueryTask(question='?'))\n"
        "assert bundle.frontend.make_task(request).prompt\n"
        "from PIL import Image\n"
        "info = ImageInfo(image_id='i', width=99, height=99, cache_hit=False)\n"
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

    info = ImageInfo(image_id="i", width=200, height=100, cache_hit=False)
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
    request = Request(request_id=RequestKey("r"), task=QueryTask(question="x" * 100))
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
