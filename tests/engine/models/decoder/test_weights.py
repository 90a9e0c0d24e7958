"""Hugging Face checkpoints load completely or are refused, with every defect named.

So do those that `legato quantize` wrote.
"""

from __future__ import annotations

import copy
import json
import shutil
from typing import Any

import pytest
import torch
from legato_engine.config import LoadOptions
from legato_engine.errors import InvalidField
from legato_engine.kernels.map_codes import KINDS, WeightKind, format_of, map_codes
from legato_engine.layers.linear import Linear
from legato_engine.models import quantise
from legato_engine.models.checkpoint import metadata
from legato_engine.models.decoder.model import load_weights
from legato_engine.models.registry import resolve
from legato_engine.types import PromptToken
from safetensors.torch import load_file, save_file

from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder
from tests.engine.models.paged_session import PagedSession

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


# ---------------------------------------------------------------- quantised

FORMATS = {
    "fp8": ("--weight-dtype", "fp8"),
    "int8": ("--weight-dtype", "int8"),
    "int4": ("--weight-dtype", "int4"),
    "int4, 128": ("--weight-dtype", "int4", "--group-size", "128"),
}
SIZES = {
    "vocab_size": hub_folder.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    "phi": {"eos_token_id": 0, "bos_token_id": 1},
}
MODELS = {"qwen3": "qwen"}


def quantised_formats(name):
    kind, *group = (FORMATS[name][1], *map(int, FORMATS[name][3:]))
    return format_of(KINDS[kind], *group)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A family's folder, transformers' model, and the folders that were quantised from it."""
    from transformers import AutoConfig  # takes seconds, not needed by most

    root = tmp_path_factory.mktemp(request.param)
    config = AutoConfig.for_model(request.param, **SIZES, **FAMILIES[request.param])
    theirs = hub_folder.write(root, config)
    model = MODELS.get(request.param, request.param)
    for name, options in FORMATS.items():
        command = ["--model", model, "--weights", str(root), "--output", str(root / name)]
        assert quantise.main([*command, *options]) == 0
    return model, root, theirs


def bundle_of(family, name=""):
    return resolve(family[0], weights=str(family[1] / name))


def network_of(bundle):
    with torch.device("meta"):
        return bundle.family.network(bundle.config).to(torch.bfloat16)


def rounded(family, name):
    """Transformers' model with the weights that the codes stand for."""
    theirs, code_format = copy.deepcopy(family[2]), quantised_formats(name)
    maps = network_of(bundle_of(family)).map_formats(code_format)
    with torch.no_grad():
        for stored, own in maps.items():
            module = theirs.get_submodule(stored)
            module.weight = torch.nn.Parameter(
                map_codes(module.weight.bfloat16(), own).dequantised()
            )
        if theirs.config.tie_word_embeddings and code_format.kind is not WeightKind.E4M3:
            head = map_codes(theirs.lm_head.weight.bfloat16(), code_format.of_head)
            theirs.lm_head.weight = torch.nn.Parameter(head.dequantised())
    return theirs


def logits_of(model, ids):
    session = PagedSession(model)
    with torch.inference_mode():
        return model.logits(session.prefill(2, None, list(map(PromptToken, ids))))[0]


@pytest.fixture(scope="module")
def num_parameters(family):
    """Those of the family's model before it was quantised."""
    return bundle_of(family).load(same.CPU, torch.float32).num_parameters


@pytest.mark.parametrize(
    ("name", "cpu_kernels"),
    [*((name, "auto") for name in FORMATS), *((name, "torch") for name in list(FORMATS)[:3])],
)
def test_a_cpu_computes_with_the_values_of_the_codes(family, num_parameters, name, cpu_kernels):
    """Logits are those of the dequantised weights, within the rounding of inputs to 16 bits.

    A tied head has 8 bits where the kernels have integers, as on a GPU.
    """
    options = LoadOptions(cpu_kernels=cpu_kernels)
    model = bundle_of(family, name).load(same.CPU, torch.float32, options)
    assert model.num_parameters == num_parameters
    ids = [7, 1, 300, 41, 5]
    theirs = rounded(family, name)
    if not model.own_threads and theirs.config.tie_word_embeddings:  # torch's head is not rounded
        theirs.lm_head.weight = family[2].lm_head.weight
    with torch.inference_mode():
        expected_V = theirs(torch.tensor([ids])).logits[0, -1]
    assert same.relative_error(logits_of(model, ids), expected_V) < 1e-3


@pytest.mark.parametrize("family", ["llama"], indirect=True)
@pytest.mark.parametrize("name", ["int8", "int4, 128"])
def test_codes_stay_packed_on_a_cpu(family, name):
    """Panels have as many bits as the file, and a row has the same bits in a batch."""
    model = bundle_of(family, name).load(same.CPU, torch.float32)
    if not model.own_threads:
        pytest.skip("this machine has no library of kernels: no C++ compiler, or no AVX2")
    layers = [m for m in model._network.layers.modules() if isinstance(m, Linear)]
    assert {layer.panels.kind for layer in layers} == {f"{name[:4]}_single"}
    ids_T = torch.arange(40)
    with torch.inference_mode():
        x_TD = model.embed(ids_T, torch.zeros(40, 2))
        whole_TV = model.logits(x_TD)
        assert torch.equal(model.logits(x_TD[7:8]), whole_TV[7:8])


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_packs_the_bits_that_a_load_quantises(family, name):
    """Maps and head of a file are those of `--weight-dtype`, or have its scales of 128 inputs."""
    bundle, code_format = bundle_of(family, name), quantised_formats(name)
    ours, theirs = (network_of(bundle) for _ in range(2))
    maps = ours.map_formats(code_format)
    ours.expect_codes(maps, code_format)
    load_weights(ours, family[1] / name, same.CPU)
    load_weights(theirs, family[1], same.CPU)
    for network in (ours, theirs):
        network.quantise(code_format.kind)
    heads: list[Any] = [each._tied_head or each.lm_head.packed for each in (ours, theirs)]
    assert torch.equal(*(each.exact() for each in heads))
    source = load_file(family[1] / "model.safetensors")
    pairs: Any = zip(ours._coded(), theirs._coded(), strict=True)
    for (mine, parts), (other, _) in pairs:
        if isinstance(mine, Linear):
            codes = [map_codes(source[f"{each}.weight"].bfloat16(), maps[each]) for each in parts]
            exact_OI = torch.cat([each.dequantised() for each in codes])
            packed: Any = mine.packed
            assert torch.equal(packed.exact(), exact_OI)
            assert name.endswith("128") or torch.equal(other.packed.exact(), exact_OI)


def test_all_else_stays_and_is_smaller(family):
    """Other tensors are the source's, settings are copied, and the recipe names the source."""
    _, root, _ = family
    source = load_file(root / "model.safetensors")
    sizes = []
    for name in FORMATS:
        stored = load_file(root / name / "model.safetensors")
        kept = stored.keys() & source.keys()
        assert "model.embed_tokens.weight" in kept
        assert all(torch.equal(stored[each], source[each]) for each in kept)
        assert all(source[each].dim() == 2 for each in source.keys() - kept)
        sizes.append((root / name / "model.safetensors").stat().st_size)
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (root / name / file).read_bytes() == (root / file).read_bytes()
        recipe = json.loads(metadata(root / name)["legato_recipe"])
        assert recipe["kind"] == name[:4].rstrip(",")
        assert recipe["group_size"] == quantised_formats(name).group
        assert set(recipe["source"]) == {"model.safetensors"}
    assert sizes[0] > sizes[2] > sizes[3]


def changed(root, folder, recipe=None, change=lambda tensors: None):
    """An int8 folder with another recipe or other tensors."""
    shutil.copytree(root / "int8", folder)
    known = json.loads(metadata(folder)["legato_recipe"])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    text = json.dumps(known | (recipe or {}))
    save_file(tensors, folder / "model.safetensors", {"legato_recipe": text})
    return folder


@pytest.mark.parametrize("family", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"version": 2}, "version 2, not 1"),
        ({"kind": "int3"}, "kind 'int3'"),
        ({"group_size": 64}, "not the maps and groups of int8"),
        ({"kind": "int4", "group_size": 32}, "not the maps and groups of int4"),
        ({"folds_norms": True}, "not the maps and groups of int8"),
        ({"maps": {"text.head": "int8"}}, "not the maps and groups of int8"),
    ],
)
def test_an_unknown_recipe_of_a_text_model_is_refused(family, tmp_path, recipe, said):
    """In one sentence with both alternatives."""
    folder = changed(family[1], tmp_path / "other", recipe)
    with pytest.raises(InvalidField, match="unknown recipe") as caught:
        same.load(family[0], folder)
    assert said in caught.value.message
    assert "legato quantize" in caught.value.message
    assert "checkpoint that they were made from" in caught.value.message


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_quantised_folders_are_matched_strictly(family, tmp_path):
    """Codes that are missing, of another shape or type, and plain weights beside them."""
    base = "model.layers.0.mlp." + ("fc1" if family[0] == "phi" else "down_proj")
    faults = {
        "missing": lambda tensors: tensors.pop(f"{base}.codes"),
        "expected [": lambda tensors: tensors.update({f"{base}.scales": torch.ones(3)}),
        "not cast to int8": lambda tensors: tensors.update(
            {f"{base}.codes": tensors[f"{base}.codes"].float()}
        ),
        "unknown": lambda tensors: tensors.update({f"{base}.weight": torch.ones(2, 2)}),
        "not finite": lambda tensors: tensors[f"{base}.scales"].fill_(torch.nan),
    }
    for number, (said, change) in enumerate(faults.items()):
        folder = changed(family[1], tmp_path / str(number), change=change)
        assert said in refusal(folder, family[0])
    bare = changed(family[1], tmp_path / "bare")
    save_file(load_file(bare / "model.safetensors"), bare / "model.safetensors")
    assert "does not fit the model" in refusal(bare, family[0])


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_another_format_or_too_little_memory_is_refused(family):
    """Codes are not rounded again; what they take, or what they become, must fit."""
    bundle = bundle_of(family, "int8")
    for other in ("model", "packed", "fp8", "int4", "stored"):
        with pytest.raises(InvalidField, match="weight_dtype auto") as caught:
            bundle.load(same.CPU, torch.float32, LoadOptions(weight_dtype=other))
        assert caught.value.metadata["field"] == "weight_dtype"
    sizes = [
        (root := family[1] / name / "model.safetensors").stat().st_size for name in ("", "int8")
    ]
    for cpu_kernels, memory in (("auto", sizes[1] // 2), ("torch", sizes[0] - 100_000)):
        options = LoadOptions(cpu_kernels=cpu_kernels, memory=memory)
        with pytest.raises(InvalidField, match="the weights need"):
            bundle.load(same.CPU, torch.float32, options)
    assert root.is_file()


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_what_cannot_be_quantised_is_refused(family, tmp_path, capsys):
    """By the option, with the alternative; nothing is left behind, and what exists stays."""
    model, root, _ = family
    start = ["--model", model, "--weights"]
    small = tmp_path / "small"
    small.mkdir()
    hub_folder.write(small, hub_folder.phi(intermediate_size=192))
    capsys.readouterr()
    (file := tmp_path / "model.gguf").write_bytes(b"GGUF")
    new, kind = ["--output", str(tmp_path / "new")], ["--weight-dtype", "int8"]
    groups = ["--weight-dtype", "int4", "--group-size", "128"]
    cases = [
        ([*start, str(root / "int8"), *kind, *new], "is quantised already"),
        ([*start, str(root), *kind, "--output", str(root)], "exists: use --force"),
        ([*start, str(root), *kind, "--output", str(root), "--force"], "use another"),
        ([*start, str(root), *kind, "--output", str(root / "a.safetensors")], "name of a folder"),
        ([*start, str(root), *kind, "--group-size", "64", *new], "--group-size is for int4"),
        (["--model", "phi", "--weights", str(small), *groups, *new], "use group_size 64"),
        ([*start, str(file), *kind, *new], "--weights: "),
    ]
    for command, said in cases:
        assert quantise.main(command) == 2, command
        assert said in (told := capsys.readouterr().err)
        assert "\n" not in told.strip()
    assert {each.name for each in tmp_path.iterdir()} == {"small", "model.gguf"}
    before = (root / "int8" / "model.safetensors").read_bytes()
    again = [*start, str(root), *kind, "--output", str(root / "int8"), "--force"]
    assert quantise.main(again) == 0
    assert (root / "int8" / "model.safetensors").read_bytes() == before
