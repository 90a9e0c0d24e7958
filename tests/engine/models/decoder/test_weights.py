"""Hugging Face checkpoints load completely or are refused, with every defect named."""

from __future__ import annotations

import json

import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.models.registry import LoadOptions, resolve
from safetensors.torch import load_file, save_file

from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder

ATTENTION = "model.layers.0.self_attn"


@pytest.fixture
def folder(tmp_path):
    """A Phi to break."""
    hub_folder.write(tmp_path, hub_folder.phi())
    return tmp_path


def rewrite(folder, change):
    """Change the checkpoint's tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder, name="phi"):
    """The error of loading."""
    with pytest.raises(InvalidField) as caught:
        same.load(name, folder)
    assert caught.value.metadata["field"] == "weights"
    return caught.value.message


def test_shards_load_as_one_file_does(tmp_path):
    """How a checkpoint is sharded changes nothing."""
    logits = []
    for name, shards in (("one", 1), ("many", 4)):
        (tmp_path / name).mkdir()
        hub_folder.write(tmp_path / name, hub_folder.phi(), shards=shards)
        model = same.load("phi", tmp_path / name)
        with torch.inference_mode():
            x_TD = model.embed(torch.arange(9), torch.zeros(9, 2))
            logits.append(model.logits(x_TD))
    assert torch.equal(*logits)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1


def test_a_missing_tensor_is_named(folder):
    """A missing part of a packed layer is named too."""
    rewrite(folder, lambda tensors: [tensors.pop(f"{ATTENTION}.k_proj.weight")])
    assert "layers.0.self_attn.qkv.weight: 64 of its 192 rows are missing" in refusal(folder)


def test_an_unknown_tensor_is_named_with_the_nearest(folder):
    """No tensor of a file is ignored."""
    rewrite(folder, lambda tensors: tensors.update({f"{ATTENTION}.dense.scale": torch.ones(1)}))
    message = refusal(folder)
    assert f"{ATTENTION}.dense.scale: unknown, the nearest expected name is " in message


def test_old_rope_tables_are_passed_over(folder):
    """Tables of old checkpoints are ignored, because they are computed."""
    name = f"{ATTENTION}.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    same.load("phi", folder)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (f"{ATTENTION}.q_proj.weight", (65, 64), "shape [65, 64], expected 64 rows"),
        (f"{ATTENTION}.dense.weight", (64, 32), "shape [64, 32], expected [64, 64]"),
        ("lm_head.bias", (3,), "shape [3], expected [384]"),
    ],
)
def test_a_wrong_shape_is_named(folder, name, shape, message):
    """The error of a part of a packed layer gives its expected rows."""
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
    found = refusal(folder)
    assert message in found
    assert name.removeprefix("model.").rpartition(".dense")[0] in found


def test_integers_are_no_weights(folder):
    """A quantised tensor is not read as a plain one."""
    name = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    assert "stored as int8" in refusal(folder)


def test_files_that_are_missing_are_named(folder, tmp_path):
    """Missing weights, configuration, tokenizer and folder are named."""
    (folder / "model.safetensors").unlink()
    assert f"no safetensors weights at {folder}" in refusal(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)
    with pytest.raises(InvalidField, match="needs a Hugging Face folder"):
        resolve("phi")
    hub_folder.write(folder, hub_folder.phi())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidField, match=r"no tokenizer at .*tokenizer.json"):
        resolve("phi", weights=str(folder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', not 'phi'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is "),
        ({"num_key_value_heads": 3}, "num_key_value_heads does not divide num_attention_heads"),
        (
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "rope_type is 'dynamic'; only default, linear, llama3 are implemented",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.45}},
            "7 rotary dimensions of a head; the number must be even",
        ),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_configurations_that_are_not_implemented_are_refused(folder, fields, message):
    """The error names the field."""
    hub_folder.change(folder / "config.json", **fields)
    with pytest.raises(InvalidField) as caught:
        resolve("phi", weights=str(folder))
    assert caught.value.message.startswith("config.json: ")
    assert message in caught.value.message


def test_a_configuration_must_be_json(folder):
    """Other content is an error."""
    (folder / "config.json").write_text("{")
    assert "config.json: it is not JSON" in refusal(folder)


def test_random_weights_need_no_checkpoint(folder):
    """Configuration and tokenizer suffice for random weights with finite logits."""
    (folder / "model.safetensors").unlink()
    first, again = (same.load("phi", folder, random_weights=True) for _ in range(2))
    x_TD = first.embed(torch.arange(5), torch.zeros(5, 2))
    logits_TV = first.logits(x_TD)
    assert torch.isfinite(logits_TV).all()
    assert torch.equal(logits_TV, again.logits(again.embed(torch.arange(5), torch.zeros(5, 2))))


def test_there_is_no_vision_encoder(folder):
    """A dtype for a vision encoder is refused."""
    with pytest.raises(InvalidField, match="phi has no vision encoder"):
        resolve("phi", weights=str(folder)).load(
            same.CPU, torch.float32, LoadOptions(vision_fp8=True)
        )


def test_the_context_is_bounded(tmp_path):
    """By the setting, or by the default context of a model with a longer one."""
    hub_folder.write(tmp_path, hub_folder.phi(max_position_embeddings=20_000))
    assert resolve("phi", weights=str(tmp_path)).max_context == 8192
    assert resolve("phi", weights=str(tmp_path), max_context=12_000).max_context == 12_000
    assert same.load("phi", tmp_path, max_context=100).max_context == 100
    with pytest.raises(InvalidField, match="2 to 20000 positions, not 20001") as caught:
        resolve("phi", weights=str(tmp_path), max_context=20_001)
    assert caught.value.metadata["field"] == "max_context"


def test_an_index_must_name_its_files(tmp_path):
    """A folder with a missing shard is refused before anything is read."""
    hub_folder.write(tmp_path, hub_folder.phi(), shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / sorted(set(index["weight_map"].values()))[1]).unlink()
    assert "names 1 of" in refusal(tmp_path)
