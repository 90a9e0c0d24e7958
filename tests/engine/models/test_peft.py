"""PEFT adapters of text models compute what merged weights do, and are read strictly."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from typing import Any

import pytest
import torch
from legato_engine.config import LoadOptions
from legato_engine.errors import AdapterUnusable
from legato_engine.models.registry import resolve
from safetensors.torch import save

from tests.adapters import ALL, PeftAdapter
from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder
from tests.engine.models.paged_session import AdaptedModel, AdaptedSession, PagedSession, walk
from tests.fake_device import InlineStream

MAX_RANK = 16
TEXT: dict[str, Any] = {
    "vocab_size": hub_folder.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}
PHI = ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")


def config(name):
    """A small model of each kind of layers."""
    import transformers  # takes seconds, not needed by most

    if name == "phi":
        return hub_folder.phi(num_key_value_heads=2)
    if name == "qwen":
        return transformers.Qwen3Config(**TEXT, head_dim=24)
    return transformers.LlamaConfig(**TEXT)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders and transformers' models by name."""
    made = {}
    for name in ("llama", "qwen", "phi"):
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, hub_folder.write(folder, config(name))
    return made


def load(name, folder, kernels="auto"):
    """Load ours in float32."""
    bundle = resolve(name, weights=str(folder))
    return bundle.load(same.CPU, torch.float32, LoadOptions(cpu_kernels=kernels))


def bank_of(model, *adapters):
    """A bank with these adapters from slot 1 on."""
    bank = model.adapter_bank(len(adapters), MAX_RANK)
    for slot, adapter in enumerate(adapters, start=1):
        bank.write(slot, read(model, *adapter.files()).weights, InlineStream())
    return bank


def read(model, data, settings):
    """Read an adapter's files."""
    return model.read_adapter(data, "key", MAX_RANK, settings)


SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"rank": 6},
    "two of attention": {"targets": ("q_proj", "v_proj"), "lora_alpha": 5.5, "use_rslora": True},
    "patterns": {
        "targets": ("q_proj", "o_proj", "up_proj"),
        "rank_pattern": {"layers.1.self_attn.q_proj": 7, "up_proj": 2},
        "alpha_pattern": {"o_proj": 9},
    },
    "one of an MLP": {"targets": ("mlp.down_proj",), "rank": 16},
}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(
    ("name", "kind"), [*itertools.product(("llama",), SETTINGS), ("qwen", "all"), ("phi", "all")]
)
def test_slots_compute_what_merged_weights_do(models, name, kind, kernels):
    """Prefill and decode have transformers' logits with the adapter in its weights."""
    folder, theirs = models[name]
    said = dict(SETTINGS[kind])
    targets = said.pop("targets", PHI if name == "phi" else ALL)
    adapter = PeftAdapter.of(theirs, [each.rpartition(".")[2] for each in targets], **said)
    adapter = dataclasses.replace(
        adapter, settings=adapter.settings | {"target_modules": [*targets]}
    )
    model = load(name, folder, kernels)
    assert model.own_threads == (kernels == "auto")
    merged = adapter.merged(theirs)
    adapted = AdaptedModel(model, bank_of(model, adapter), [1] * 4)
    same.check_prefill_and_decode(adapted, merged, length=45)
    with pytest.raises(AssertionError):
        same.check_prefill_and_decode(model, merged, length=45)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", ["llama", "phi"])
def test_a_row_decides_its_own_bits(models, name, kernels):
    """A row's bits do not depend on the adapters of other rows."""
    folder, theirs = models[name]
    model = load(name, folder, kernels)
    targets = PHI if name == "phi" else ALL
    adapters = [PeftAdapter.of(theirs, targets[: 2 + rank], rank, seed=rank) for rank in (2, 16, 6)]
    bank, slots = bank_of(model, *adapters), [1, 0, 2, 3, 2, 1, 0, 3, 1, 2]
    together = walk(AdaptedSession(model, bank, slots, seed=1), range(len(slots)), None)
    for row, slot in enumerate(slots):
        alone = walk(AdaptedSession(model, bank, [slot], seed=2), [0], None)[0]
        assert torch.equal(together[row], alone)
    plain = walk(PagedSession(model, num_rows=1), [0], None)[0]
    assert torch.equal(together[1], plain)
    assert not torch.equal(together[0], plain)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_greedy_answers_are_those_of_merged_weights(models, tmp_path, dtype):
    """Requests with different adapters and none share launches, with drafts and without.

    Nor does it matter that a slot is written again for each.
    """
    folder, theirs = models["llama"]
    asked, found = same.questions(12, seed=5), []
    adapters = [PeftAdapter.of(theirs, seed=1), PeftAdapter.of(theirs, ALL[:4], 9, seed=2)]
    for slots, fields in ((2, {}), (2, {"speculation": "fixed:3", "draft": "lookup"}), (1, {})):
        changes = {"adapters": str(tmp_path), "max_adapter_rank": MAX_RANK, "adapter_slots": slots}
        with same.Engine("llama", folder, dtype=dtype, **changes, **fields) as engine:
            assert engine.assembly.info.adapters
            model = engine.assembly.model
            known = [None, *(model.read_adapter(*adapter_args(each)) for each in adapters)]
            sampling = {"max_tokens": 10, "temperature": 0.0}
            found += [
                engine.ask(asked, together=together, adapters=itertools.cycle(known), **sampling)
                for together in (True, False)
            ]
            prompts = [engine.prompt(question) for question in asked]
    assert all(each.tokens == found[0].tokens for each in found)
    if dtype == "f32":
        truths = [theirs, *(each.merged(theirs) for each in adapters)]
        for index, prompt in enumerate(prompts):
            same.check_chosen(truths[index % 3], prompt, found[0].tokens[str(index)])


def test_adapters_beside_the_weights_are_found(models, tmp_path):
    """They are served without an option, as those of Moondream's folder."""
    folder = shutil.copytree(models["llama"][0], tmp_path / "llama")
    assert resolve("llama", weights=str(folder)).adapters is None
    (folder / "adapters").mkdir()
    assert resolve("llama", weights=str(folder)).adapters == folder / "adapters"
    assert resolve("llama", weights=str(folder), random_weights=True).adapters is None


def adapter_args(adapter):
    """The arguments that read an adapter."""
    data, settings = adapter.files()
    return data, str(hash(data)), MAX_RANK, settings


BY_PEFT: tuple[dict[str, Any], ...] = (
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj"], "use_rslora": True, "layers_to_transform": [1]},
    {"target_modules": r".*\.(k|up)_proj", "rank_pattern": {"k_proj": 3}},
)


@pytest.mark.parametrize("fields", BY_PEFT)
def test_peft_computes_the_same(models, tmp_path, fields):
    """PEFT's own files, and its own logits of them."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install --no-deps peft")
    folder, theirs = models["llama"]
    with torch.inference_mode(mode=False):
        copied = PeftAdapter({}, {}).merged(theirs)
        settings = peft.LoraConfig(r=5, lora_alpha=12, init_lora_weights=False, **fields)
        tuned = peft.get_peft_model(copied, settings).eval()
        tuned.save_pretrained(tmp_path)
    model = load("llama", folder)
    data, said = (
        (tmp_path / name).read_bytes()
        for name in ("adapter_model.safetensors", "adapter_config.json")
    )
    bank = model.adapter_bank(1, MAX_RANK)
    bank.write(1, read(model, data, said).weights, InlineStream())
    same.check_prefill_and_decode(AdaptedModel(model, bank, [1] * 4), tuned, length=45)


# ---------------------------------------------------------------- files


def settings_with(**changes):
    """A change of the settings."""
    return lambda adapter: dataclasses.replace(adapter, settings=adapter.settings | changes).files()


def tensors_with(change):
    """A change of the tensors."""

    def files(adapter):
        tensors = adapter.tensors()
        change(tensors)
        return save(tensors), adapter.files()[1]

    return files


Q, Q_B = (f"base_model.model.model.layers.1.self_attn.q_proj.lora_{side}.weight" for side in "AB")
LM = "base_model.model.lm_head.lora_A.weight"
SIGHT = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
DORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (settings_with(use_dora=True), "use_dora is true; it may be absent, null or empty"),
        (settings_with(bias="all"), "bias is all; it may be none"),
        (settings_with(modules_to_save=["lm_head"]), 'modules_to_save is ["lm_head"]'),
        (settings_with(peft_type="IA3"), "peft_type is IA3; it may be LORA"),
        (settings_with(init_lora_weights="pissa"), "init_lora_weights is pissa"),
        (settings_with(fan_in_fan_out=True), "fan_in_fan_out is true"),
        (settings_with(trainable_token_indices=[3]), "trainable_token_indices is [3]"),
        (settings_with(of_the_future=1), "of_the_future is 1"),
        (settings_with(r="four"), "Expected `int`, got `str` - at `$.r`"),
        (settings_with(r=17), "r is 17, this server takes 1 to 16"),
        (settings_with(r=2**31), "Expected `int` <= 2147483647 - at `$.r`"),
        (settings_with(**{"x" * 9000: 1}), "x is 1; it may be absent"),
        (settings_with(r=0), "r is 0, this server takes 1 to 16"),
        (settings_with(rank_pattern={"q_proj": 40}), "r is 40"),
        (settings_with(rank_pattern={"(a+)+": 4}), "is (a+)+; it may be names of modules"),
        (settings_with(lora_alpha=float("nan")), "lora_alpha is NaN; it may be a finite number"),
        (settings_with(lora_alpha=1e41), "q_proj.lora_b: not finite"),
        (settings_with(target_modules=["embed_tokens"]), "target_modules is embed_tokens; it may"),
        (settings_with(target_modules=["qkv"]), "target_modules is qkv; it may be q_proj, k_proj"),
        (settings_with(target_modules=["q_proj"]), "is not in target_modules"),
        (settings_with(target_modules=[*ALL, "x.q_proj"]), "no tensors of x.q_proj, which is in"),
        (settings_with(r=5), "down_proj.lora_A has the shape [4, 176], expected [5, 176]"),
        (tensors_with(lambda t: t.update({Q: t[Q][:, :9].clone()})), "the shape [4, 9], expected"),
        (tensors_with(lambda t: t.update({Q: t[Q].int()})), "q_proj.lora_A is torch.int32"),
        (tensors_with(lambda t: t.update({Q: t[Q] * torch.inf})), "q_proj.lora_a: not finite"),
        (tensors_with(lambda t: t.pop(Q_B)), "layers.1.self_attn.q_proj: lora_B missing"),
        (
            tensors_with(lambda t: t.update({Q.replace("1", "2"): t[Q].clone()})),
            "in layers 0 to 1 of this",
        ),
        (
            tensors_with(lambda t: t.update({LM: t[Q].clone()})),
            "lm_head.lora_A.weight is no",
        ),
        (tensors_with(lambda t: t.update({SIGHT: t[Q].clone()})), "is of the vision tower, which"),
        (tensors_with(lambda t: t.update({DORA: t[Q].clone()})), "is of DoRA, which is not"),
        (tensors_with(lambda t: t.clear()), "it holds no tensors"),
        (lambda adapter: (b"\x08\0\0\0\0\0\0\0{broken}", adapter.files()[1]), "no safetensors"),
        (lambda adapter: (adapter.files()[0], b"[1]"), "adapter_config.json: Expected `object`"),
        (lambda adapter: (adapter.files()[0], b"{"), "adapter_config.json: "),
        (lambda adapter: (adapter.files()[0], b" " * (1 << 20) + b"{}"), "at most 1048576 bytes"),
        (lambda adapter: (adapter.files()[0], b""), "this model takes PEFT adapters: a folder of"),
    ],
)
def test_what_is_not_computed_is_refused(models, files, says):
    """The message names file, field and value."""
    folder, theirs = models["llama"]
    model = load("llama", folder)
    with pytest.raises(AdapterUnusable) as caught:
        read(model, *files(PeftAdapter.of(theirs)))
    assert says in caught.value.message
    assert len(caught.value.message) < 300


def test_settings_without_effect_are_accepted(models):
    """What PEFT writes beside what is computed, and null, false or empty settings."""
    folder, theirs = models["llama"]
    model, adapter = load("llama", folder), PeftAdapter.of(theirs)
    more = {
        "task_type": "CAUSAL_LM", "lora_dropout": 0.1, "inference_mode": True, "use_dora": False,
        "modules_to_save": None, "loftq_config": {}, "peft_version": "0.21.2", "later": None,
        "layers_to_transform": [0, 1], "init_lora_weights": "gaussian", "lora_bias": False,
    }  # fmt: skip
    expected = read(model, *adapter.files()).weights
    found = read(model, *settings_with(**more)(adapter)).weights
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert torch.equal(one, other)
    assert json.loads(adapter.files()[1])["r"] == found.rank == 4
