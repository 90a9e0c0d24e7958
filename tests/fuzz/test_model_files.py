"""Damaged model files and answers of a hub: each is loaded or refused in one sentence.

A target takes the bytes of a file. `make fuzz` runs the same targets guided by coverage.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import random
import shutil
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import legato_tiny
import pytest
import safetensors.torch
import torch
from huggingface_hub import constants, file_download
from legato_engine.config import LoadOptions
from legato_engine.errors import AdapterUnusable, InvalidField
from legato_engine.hub import download, store
from legato_engine.hub.store import INDEX, Published, RepositoryFiles
from legato_engine.layers.lora import BankSizes
from legato_engine.models import untrusted
from legato_engine.models.adapters import PeftTargets, parse_peft
from legato_engine.models.checkpoint import headers, opened
from legato_engine.models.gguf import read_gguf
from legato_engine.models.moondream.adapters import parse_adapter
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.models.registry import resolve

from tests.adapters import random_adapter, safetensors_file, torch_file
from tests.engine.hub.fake_hub import COMMIT, FakeHub
from tests.engine.models import hub_folder
from tests.engine.models.gguf import gguf_files
from tests.fuzz.messages import mutate

SEED = 41
CPU = torch.device("cpu")
ODD: tuple[Any, ...] = (
    *(None, True, "", "x", "../../x", "legato.json", "\u0000", "\U0001f600" * 50),
    *(0, -1, 1, 2**31, 2**63, 2**64, 1e308, 0.5),
    *([], {}, [[]], [None], {"x": None}),
)
MAX_SECONDS = 60  # of one file, where the honest one takes milliseconds

Target = Callable[[bytes], None]


@contextlib.contextmanager
def written(data: bytes, name: str) -> Iterator[Path]:
    """A file in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


# ------------------------------------------------------------ targets


def gguf_file(data: bytes) -> None:
    """Find the model of a GGUF file, and load it."""
    with written(data, "model.gguf") as path:
        try:
            bundle = resolve("gguf", weights=str(path))
            bundle.load(CPU, torch.float32, LoadOptions(cpu_kernels="torch", memory=1 << 30))
        finally:
            read_gguf.cache_clear()


def weights(data: bytes) -> None:
    """Read every tensor of a safetensors file."""
    with written(data, "model.safetensors") as path:
        for header in headers(path):
            assert header.num_bytes <= len(data)
            target = torch.empty(header.shape, dtype=header.dtype)
            with opened(header.file) as fill:
                fill(header, target)


def adapter(data: bytes) -> None:
    """Read an adapter of either format."""
    parse_adapter(data, tiny_random_config(), 16, torch.float32)


def peft_adapter(data: bytes) -> None:
    """Read settings, and tensors after the first zero byte."""
    settings, _, tensors = data.partition(b"\0")
    parse_peft(tensors, settings, PEFT_TARGETS, 16, torch.float32)


def tokenizer(data: bytes) -> None:
    """Find a text model with a tokenizer.json, and one that sees."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_text_folder(), folder, dirs_exist_ok=True)
        (Path(folder) / "tokenizer.json").write_bytes(data)
        resolve("llama", weights=folder, random_weights=True)


def text_settings(data: bytes) -> None:
    """Find a text model whose settings are this object's entries, by file."""
    try:
        files = json.loads(data).items()
    except (ValueError, AttributeError):
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_text_folder(), folder, dirs_exist_ok=True)
        for name, content in files:
            (Path(folder) / (Path(name).name or "x")[:99].replace("\0", "x")).write_text(
                json.dumps(content)
            )
        bundle = resolve("llama", weights=folder, random_weights=True)
        bundle.load(CPU, torch.float32, LoadOptions(cpu_kernels="torch", memory=1 << 28))


def moondream_config(data: bytes) -> None:
    """Find a Moondream of this config.json, and match it with weights."""
    with tempfile.TemporaryDirectory() as folder:
        for path in legato_tiny.path().iterdir():
            if path.is_file() and path.name != "config.json":
                (Path(folder) / path.name).symlink_to(path)
        (Path(folder) / "config.json").write_bytes(data)
        resolve("legato-tiny", weights=folder).load(
            CPU, torch.float32, LoadOptions(cpu_kernels="torch")
        )


def shard_index(data: bytes) -> None:
    """Read an index of shards, as one that was pulled and as one beside weights."""
    with written(data, INDEX) as path:
        with contextlib.suppress(download.PullFailed):
            for name in download._list_shards(path):
                assert Path(name).name == name
        headers(path.parent)


def hub_answer(data: bytes) -> None:
    """Pull from a hub that answers this."""
    with tempfile.TemporaryDirectory() as folder, FakeHub() as hub, _endpoint(hub):
        hub.files["maker/tiny"] = {"config.json": b"{}", "model.safetensors": b"12345678"}
        hub.answer = data or b" "
        source = RepositoryFiles(
            "maker/tiny", COMMIT, ("config.json", "model.safetensors", "LICENSE*")
        )
        model = Published("tiny", "llama", (source,), "", bf16_bytes=8)
        inner = Path(folder) / "models" / "tiny"
        with contextlib.suppress(download.PullFailed):
            download.pull(model, inner, lambda _: None)
        assert {path.name for path in Path(folder).rglob("*")} <= {
            *("models", "tiny", "config.json", "model.safetensors", "legato.json"),
            *(path.name for path in inner.glob("config.json.*.part")),
            *(path.name for path in inner.glob("model.safetensors.*.part")),
        }
        store.read_manifest(inner)


def manifest(data: bytes) -> None:
    """Find a pulled model by its manifest."""
    with written(data, "legato.json") as path:
        store.find(str(path.parent.parent), path.parent.name)


# ------------------------------------------------------------ seeds


@functools.cache
def _text_folder() -> Path:
    """A folder of a text model without weights, for as long as this process runs."""
    made = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = Path(made)
    config = {
        "model_type": "llama",
        "vocab_size": hub_folder.VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rope_theta": 1e4,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    hub_folder.byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def gguf_seeds() -> tuple[bytes, ...]:
    """A Llama of one layer with either kind of tokenizer."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab", "\u2581"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        gguf_files.write_small(path)
        byte_level = path.read_bytes()
        gguf_files.write_small(path, add=lambda writer: _sentencepiece(writer, words))
        return byte_level, path.read_bytes()


def _sentencepiece(writer: gguf.GGUFWriter, words: list[str]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(at) for at in range(len(words))])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_eos_token_id(3)
    writer.add_unk_token_id(2)


def weights_seeds() -> tuple[bytes, ...]:
    tensors = {"a": torch.zeros(3, 4), "b": torch.ones(8, dtype=torch.bfloat16)}
    return (safetensors.torch.save(tensors, {"format": "pt"}),)


def adapter_seeds() -> tuple[bytes, ...]:
    config = tiny_random_config()
    whole = safetensors_file(random_adapter(config.text, 2))
    return (whole, torch_file({"lora_state_dict": {"dense.0.up_a": torch.zeros(2, 64)}}))


PEFT_TARGETS = PeftTargets(
    BankSizes(2, {"q_proj": (6, 4)}),
    {f"layers.{layer}.q_proj": (layer, "q_proj") for layer in range(2)},
)


def peft_seeds() -> tuple[bytes, ...]:
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    said |= {"rank_pattern": {"layers.1.q_proj": 1}, "use_rslora": True, "bias": "none"}
    pairs = {0: (torch.ones(2, 6), torch.ones(4, 2)), 1: (torch.ones(1, 6), torch.ones(4, 1))}
    named = {
        f"base_model.model.layers.{layer}.q_proj.lora_{side}.weight": tensor
        for layer, pair in pairs.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    return (json.dumps(said).encode() + b"\0" + safetensors.torch.save(named),)


def tokenizer_seeds() -> tuple[bytes, ...]:
    made = (hub_folder.byte_level_tokenizer(adds_bos=True), hub_folder.byte_fallback_tokenizer())
    return tuple(each.to_str().encode() for each in made)


def settings_seeds() -> tuple[bytes, ...]:
    config = json.loads((_text_folder() / "config.json").read_text())
    files = {
        "config.json": config | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "tokenizer_config.json": {"eos_token": {"content": "<|end|>"}, "chat_template": None},
        "generation_config.json": {"eos_token_id": [0, 1], "do_sample": True, "top_p": 0.9},
    }
    return (json.dumps(files).encode(),)


def config_seeds() -> tuple[bytes, ...]:
    return ((legato_tiny.path() / "config.json").read_bytes(),)


def index_seeds() -> tuple[bytes, ...]:
    names = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    return (json.dumps({"metadata": {"total_size": 8}, "weight_map": names}).encode(),)


def answer_seeds() -> tuple[bytes, ...]:
    hub = FakeHub()
    hub.files["maker/tiny"] = {"config.json": b"{}", "model.safetensors": b"12345678"}
    return (json.dumps(hub.info("maker/tiny")).encode(),)


def manifest_seeds() -> tuple[bytes, ...]:
    stored = store.StoredFile("config.json", 2, "0" * 64, "maker/tiny", COMMIT)
    made = {"model": "tiny", "licence": "", "pulled": "", "files": [stored.name]}
    file = {name: getattr(stored, name) for name in stored.__struct_fields__}
    return (json.dumps(made | {"files": [file]}).encode(),)


TARGETS: dict[str, tuple[Target, Callable[[], tuple[bytes, ...]]]] = {
    "gguf": (gguf_file, gguf_seeds),
    "weights": (weights, weights_seeds),
    "adapter": (adapter, adapter_seeds),
    "peft": (peft_adapter, peft_seeds),
    "tokenizer": (tokenizer, tokenizer_seeds),
    "settings": (text_settings, settings_seeds),
    "config": (moondream_config, config_seeds),
    "index": (shard_index, index_seeds),
    "hub": (hub_answer, answer_seeds),
    "manifest": (manifest, manifest_seeds),
}
MUTANTS = {
    "gguf": 200, "weights": 200, "adapter": 20, "tokenizer": 12, "settings": 16, "config": 12,
    "index": 100, "hub": 30, "manifest": 100, "peft": 100,
}  # fmt: skip
"""Files of a run of a few seconds; `make fuzz` tries them without end."""

REFUSALS = (InvalidField, AdapterUnusable)


@contextlib.contextmanager
def _endpoint(hub: FakeHub) -> Iterator[None]:
    """Have the library speak to this hub, and not wait between attempts."""
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_download, "time", types.SimpleNamespace(sleep=lambda _: None))
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield


def odd_json(value: Any, chance: random.Random) -> Any:
    """Return a document with one value replaced, dropped or doubled somewhere."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.05:
            return {name: each for name, each in value.items() if name != key}
        return value | {key: odd_json(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        if chance.random() < 0.05:
            return [*value, value[at]]
        return [*value[:at], odd_json(value[at], chance), *value[at + 1 :]]
    return chance.choice(ODD)


def mutant(data: bytes, chance: random.Random) -> bytes:
    """Damage bytes; of a JSON document more often its values."""
    try:
        document = json.loads(data)
    except ValueError:
        return mutate(data, chance)
    for _ in range(chance.choice((1, 1, 1, 2))):
        document = odd_json(document, chance)
    damaged = json.dumps(document).encode()
    return mutate(damaged, chance) if chance.random() < 0.2 else damaged


def refusal(target: Target, data: bytes) -> InvalidField | AdapterUnusable | None:
    """The refusal of a file, or None if it is loaded."""
    try:
        target(data)
    except REFUSALS as error:
        return error
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_loaded_or_refused(name: str) -> None:
    """No error but a refusal, which has a message and a field; nothing takes long."""
    target, make_seeds = TARGETS[name]
    chance = random.Random(SEED)
    seeds = make_seeds()
    refused = 0
    for number in range(MUTANTS[name]):
        data = mutant(seeds[number % len(seeds)], chance)
        began = time.monotonic()
        error = refusal(target, data)
        assert time.monotonic() - began < MAX_SECONDS, data
        if error is not None:
            refused += 1
            assert error.message
            assert isinstance(error, AdapterUnusable) or error.metadata["field"]
    assert refused or name == "hub"


@pytest.mark.parametrize("name", TARGETS)
def test_undamaged_files_are_loaded(name: str) -> None:
    """The control: seeds are refused only for what they lack beside them."""
    target, make_seeds = TARGETS[name]
    for data in make_seeds():
        assert refusal(target, data) is None or name in ("adapter", "index", "manifest")


def test_the_reader_of_tokenizers_is_used() -> None:
    """The control of that target: its files are tried in a confined process."""
    with written(b"[]", "tokenizer.json") as path, pytest.raises(InvalidField, match="tokenizer"):
        untrusted.check_tokenizer(path)
