"""Moondream's checkpoints and configurations, in the published layouts too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
import torch
from legato_engine.config import LoadOptions
from legato_engine.errors import InvalidField
from legato_engine.kernels.map_codes import KINDS, WeightKind, format_of
from legato_engine.layers.mlp import MoE
from legato_engine.models import quantise
from legato_engine.models.checkpoint import TensorHeader, plan
from legato_engine.models.moondream import weights
from legato_engine.models.moondream.config import Gelu, MoEConfig, TauConfig, Template, parse_config
from legato_engine.models.moondream.family import MoondreamBundle
from legato_engine.models.moondream.model import MoondreamModel, Network
from legato_engine.models.moondream.presets import (
    legato_tiny_config,
    moondream2_config,
    moondream3_1_config,
    moondream3_config,
    tiny_random3_config,
)
from legato_engine.models.moondream.weights import load_weights, random_weights
from legato_engine.models.paged_attention import KVCache, PrefillSpan
from legato_engine.models.registry import resolve
from safetensors.torch import save_file

from tests.engine.models.moondream.published import layout_a, layout_b, quantised

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tensors(tiny_config):
    """A checkpoint's tensors by plain name."""
    state = random_weights(tiny_config, 3, CPU, torch.float32).state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def load(config, path, dtype=torch.float32):
    """The loaded tensors by name."""
    return load_weights(config, path, CPU, dtype).state_dict()


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: f"model.{name}",
        lambda name: "model." + name.replace("text.", "text._orig_mod.", 1),
    ],
)
def test_a_file_loads_under_each_naming(tiny_config, tensors, tmp_path, rename):
    """Prefix and compiler wrappers in names are ignored."""
    path = tmp_path / "weights.safetensors"
    save_file({rename(name): tensor for name, tensor in tensors.items()}, path)
    loaded = load(tiny_config, path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_weights_take_the_dtype_asked_for(tiny_config, tensors, tmp_path):
    """A float32 file loads completely as bfloat16."""
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load(tiny_config, tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}


def test_a_wrong_name_is_answered_with_the_right_one(tiny_config, tensors, tmp_path):
    """Problems are reported in the names of the published checkpoints."""
    bad = {f"model.{name}": tensor for name, tensor in tensors.items()}
    bad["model.text.blocks.0.attn.qvk.weight"] = bad.pop("model.text.blocks.0.attn.qkv.weight")
    save_file(bad, tmp_path / "model.safetensors")
    with pytest.raises(InvalidField) as caught:
        load(tiny_config, tmp_path)
    assert caught.value.message.splitlines()[1:] == [
        "  text.blocks.0.attn.qkv.weight: missing, expected [192, 64]",
        "  text.blocks.0.attn.qvk.weight: unknown, "
        "the nearest expected name is text.blocks.0.attn.qkv.weight",
    ]


def test_random_weights_follow_their_seed(tiny_config):
    """The same seed gives the same weights, another seed others."""
    first, again, other = (
        random_weights(tiny_config, seed, CPU, torch.float32).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["text.wte"], other["text.wte"])


# ---------------------------------------------------------------- config


def as_json(config):
    """A config.json as training writes it, without unset templates and sampling."""
    data = msgspec.to_builtins(config)
    data["templates"] = {k: v for k, v in data["templates"].items() if v is not None}
    data.pop("sampling")
    return data


def test_a_config_reads_back():
    """What is written is read, and text is greedy by default."""
    config = legato_tiny_config()
    parsed = parse_config(json.dumps(as_json(config)).encode())
    assert parsed == config
    assert parsed.sampling.temperature == 0.0


def test_sampling_may_be_given():
    """The optional key `sampling` sets the defaults of text."""
    data = as_json(legato_tiny_config()) | {"sampling": {"temperature": 0.5}}
    assert parse_config(json.dumps(data).encode()).sampling.temperature == 0.5


def test_sizes_of_moondream2():
    """An image has 729 embeddings after BOS, heads are 64 wide, tiles are 266 pixels apart."""
    config = moondream2_config()
    assert config.prefix_length == 730
    assert config.text.head_dim == 64
    assert config.vision.window == 266


def test_a_config_of_moondream3_reads_back():
    """Tau, experts, heads without an inner layer and all switches survive config.json."""
    config = tiny_random3_config()
    text = msgspec.structs.replace(config.text, tau=TauConfig(gelu=Gelu.EXACT))
    region = msgspec.structs.replace(config.region, coord_reaches_one=True)
    config = msgspec.structs.replace(config, text=text, region=region)
    assert parse_config(msgspec.json.encode(config)) == config


def test_moondream3_differs_as_published():
    """Shared sizes are Moondream 2's; the preview and 3.1 differ only in weights."""
    two, three = moondream2_config(), moondream3_config()
    assert three.vision == two.vision
    assert three.tokens == two.tokens
    shared = ("dim", "ff_dim", "num_layers", "num_heads", "vocab_size", "rotary_dim")
    assert all(getattr(three.text, name) == getattr(two.text, name) for name in shared)
    assert (three.text.max_context, three.text.rope_theta) == (32768, 1_500_000.0)
    assert three.text.moe == MoEConfig(first_layer=4, num_experts=64, num_active=8, inner_dim=1024)
    assert three.text.tau == TauConfig(gelu=Gelu.TANH)
    assert three.region.inner_dim is None
    assert three.region.coord_divisor == 1024
    assert moondream3_1_config() == msgspec.structs.replace(three, name="moondream3.1")


def test_moondream3_opens_an_answer_once():
    """No template doubles the answer token, and there is one for outlines."""
    templates = moondream3_config().templates
    assert templates.query == Template(prefix=(1, 15381, 2), suffix=(3,))
    assert templates.query_reasoning == Template(prefix=(1, 15381, 2), suffix=(4,))
    assert templates.segment == Template(prefix=(1, 17374, 2), suffix=(3,))
    assert templates.detect == moondream2_config().templates.detect
    assert templates.caption == moondream2_config().templates.caption
    assert moondream2_config().templates.segment is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("first_layer", 3), ("first_layer", -1), ("num_active", 0), ("num_active", 7)],
)
def test_experts_that_do_not_fit_are_named(field, value):
    """Experts begin at an existing layer, and no more are active than there are."""
    data = msgspec.to_builtins(tiny_random3_config())
    data["text"]["moe"][field] = value
    with pytest.raises(InvalidField, match=field):
        parse_config(json.dumps(data).encode())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("architecture",), "moondream9", "architecture"),
        (("text", "dim"), "wide", "dim"),
        (("text", "extra"), 1, "extra"),
        (("text", "num_heads"), 7, "num_heads"),
        (("text", "rotary_dim"), 33, "rotary_dim"),
        (("text", "max_context"), 100, "max_context"),
        (("vision", "crop_size"), 337, "crop_size"),
        (("vision", "overlap_margin"), 12, "overlap_margin"),
    ],
)
def test_what_does_not_fit_is_named(path, value, message):
    """A wrong, unknown or contradicting field is an error that names it."""
    data = as_json(legato_tiny_config())
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(InvalidField, match=message):
        parse_config(json.dumps(data).encode())


def test_text_that_is_no_json_is_refused():
    """Broken files are errors, not tracebacks."""
    with pytest.raises(InvalidField, match=r"config\.json"):
        parse_config(b"{")


# ---------------------------------------------------------------- layouts
# Moondream's checkpoints in the published layouts.

LAYER = "text_model.transformer.h"


@pytest.fixture(scope="module")
def state(tiny3_config):
    """A small Moondream 3's tensors by the network's names."""
    return random_weights(tiny3_config, 3, CPU, torch.float32).state_dict()


def stored_as(layout, state, config, **options):
    """A checkpoint in layout A or B."""
    if layout == "a":
        return layout_a(state, config.text.num_heads)
    return layout_b(state, config, **options)


def write_single(tensors, folder):
    """Write one file."""
    save_file(tensors, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def write_shards(tensors, folder):
    """Write three files and their index, with related tensors apart."""
    names = sorted(tensors)
    for shard in range(3):
        part = {name: tensors[name] for name in names[shard::3]}
        save_file(part, folder / f"{shard}.safetensors")
    weight_map = {name: f"{index % 3}.safetensors" for index, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_pickled(tensors, folder):
    """Write a dict of tensors with torch."""
    torch.save(tensors, folder / "weights.pt")
    return folder / "weights.pt"


def same(loaded, expected):
    """Whether two networks are equal, dtypes included; e4m3 is compared as numbers."""
    return loaded.keys() == expected.keys() and all(
        tensor.dtype is expected[name].dtype and torch.equal(tensor.float(), expected[name].float())
        for name, tensor in loaded.items()
    )


@pytest.mark.parametrize("write", [write_single, write_shards, write_pickled])
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("layout", ["a", "b"])
def test_what_is_written_is_what_is_loaded(tiny3_config, state, tmp_path, layout, e4m3, write):
    """Either layout, plain or e4m3 experts, in one file or shards, loads exactly."""
    expected = quantised(state) if e4m3 else state
    path = write(stored_as(layout, expected, tiny3_config), tmp_path)
    assert same(load(tiny3_config, path), expected)


def test_tau_apart_in_layout_b(tiny3_config, state, tmp_path):
    """Tau's weights may be two tensors."""
    path = write_single(layout_b(state, tiny3_config, fused_tau=False), tmp_path)
    assert same(load(tiny3_config, path), state)


KV_SCALE = f"{LAYER}.{{}}.kv_quantizer.{{}}_scale"


def with_kv_scales(state, config):
    """A network's tensors with those that layout B has in `published`."""
    names = [f"text.blocks.{layer}.attn" for layer in range(config.text.num_layers)]
    scales = {f"{name}.k_scale": torch.tensor([0.5]) for name in names}
    return state | scales | {f"{name}.v_scale": torch.tensor([0.25]) for name in names}


@pytest.mark.parametrize("write", [write_single, write_shards, write_pickled])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "model"])
@pytest.mark.parametrize("e4m3", [False, True])
def test_scales_of_keys_and_values(tiny3_config, state, tmp_path, e4m3, kv_dtype, write):
    """Scales of either shape are loaded with experts of either kind, unless switched off."""
    expected = quantised(state) if e4m3 else state
    path = write(layout_b(expected, tiny3_config, kv_scales=True), tmp_path)
    network = load_weights(tiny3_config, path, CPU, torch.bfloat16, LoadOptions(kv_dtype=kv_dtype))
    model = MoondreamModel(tiny3_config, network)
    if kv_dtype == "model":
        assert network.state_dict().keys() == expected.keys()
        assert model.kv_scale_L2 is None
    else:
        assert network.state_dict().keys() == with_kv_scales(expected, tiny3_config).keys()
        assert model.kv_scale_L2 is not None
        assert model.kv_scale_L2.dtype is torch.float32
        assert model.kv_scale_L2.tolist() == [[0.5, 0.25]] * tiny3_config.text.num_layers


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("lacking", [[(1, "v")], [(2, "v"), (1, "k"), (2, "k")], [(0, "k")]])
def test_some_scales_of_keys_and_values_are_an_error(
    tiny3_config, state, tmp_path, lacking, kv_dtype
):
    """The error names the first missing scale and the setting that loads without."""
    tensors = layout_b(state, tiny3_config, kv_scales=True)
    for layer, kind in lacking:
        del tensors[KV_SCALE.format(layer, kind)]
    path = write_single(tensors, tmp_path)
    with pytest.raises(InvalidField) as caught:
        load_weights(tiny3_config, path, CPU, torch.float32, LoadOptions(kv_dtype=kv_dtype))
    assert caught.value.metadata["field"] == "kv_dtype"
    assert f"{KV_SCALE.format(*min(lacking))} is missing" in caught.value.message
    assert "kv_dtype model" in caught.value.message
    plain = load_weights(tiny3_config, path, CPU, torch.float32, LoadOptions(kv_dtype="model"))
    assert same(plain.state_dict(), state)


@pytest.mark.parametrize("layout", ["a", "b"])
def test_scales_that_a_checkpoint_lacks_are_calibrated(tiny3_config, state, tmp_path, layout):
    """With fp8 they are above zero, and other tokens' keys and values stay below the last code."""
    path = write_single(stored_as(layout, state, tiny3_config), tmp_path)
    network = load_weights(tiny3_config, path, CPU, torch.float32, LoadOptions(kv_dtype="fp8"))
    assert network.text.kv_scales() is None
    assert same(load(tiny3_config, path), state)
    network.text.calibrate_kv()
    scale_L2 = network.text.kv_scales()
    network.text.calibrate_kv(seed=1)
    other_L2 = network.text.kv_scales()
    assert scale_L2 is not None
    assert other_L2 is not None
    assert (scale_L2 > 0).all()
    assert (other_L2 / 8 < scale_L2).all()


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_a_scale_is_a_positive_number(tiny3_config, state, tmp_path, scale):
    """A scale must be finite and positive."""
    tensors = layout_b(state, tiny3_config, kv_scales=True)
    tensors[KV_SCALE.format(1, "v")] = torch.tensor([scale])
    with pytest.raises(InvalidField, match="v_scale"):
        load(tiny3_config, write_single(tensors, tmp_path))


def test_a_scale_is_one_number(tiny3_config, state, tmp_path):
    """A scale for each head is refused."""
    tensors = layout_b(state, tiny3_config, kv_scales=True)
    tensors[KV_SCALE.format(1, "k")] = torch.full((3,), 0.5)
    (problem,) = problems(tiny3_config, tensors, tmp_path)
    assert KV_SCALE.format(1, "k") in problem
    assert "shape [3], expected [1]" in problem


@pytest.mark.parametrize("layout", ["a", "b"])
def test_moondream2_in_either_layout(tiny_config, tmp_path, layout):
    """Moondream 2 loads from both layouts, with its own names of heads."""
    state = random_weights(tiny_config, 3, CPU, torch.float32).state_dict()
    path = write_single(stored_as(layout, state, tiny_config), tmp_path)
    assert same(load(tiny_config, path), state)


def test_bfloat16_leaves_experts_and_scales(tiny3_config, state, tmp_path):
    """e4m3 experts are not cast, and their scales stay float32."""
    path = write_single(layout_b(quantised(state), tiny3_config), tmp_path)
    for name, tensor in load(tiny3_config, path, torch.bfloat16).items():
        is_expert = ".mlp.fc" in name and tensor.dim() == 3
        expected = torch.float8_e4m3fn if is_expert else torch.bfloat16
        assert tensor.dtype is (torch.float32 if name.endswith("scale") else expected), name


@pytest.fixture(scope="module")
def wide3_config(tiny3_config):
    """Moondream 3's kind, of heads that kernels take; with all experts active no route changes."""
    moe = MoEConfig(first_layer=1, num_experts=16, num_active=16, inner_dim=128)
    sizes = {"dim": 128, "num_heads": 2, "ff_dim": 256, "vocab_size": 320, "moe": moe}
    text = msgspec.structs.replace(tiny3_config.text, **sizes)
    return msgspec.structs.replace(tiny3_config, text=text)


@pytest.fixture(scope="module")
def wide3_state(wide3_config):
    """A checkpoint's tensors in bf16, by plain name."""
    return random_weights(wide3_config, 5, CPU, torch.bfloat16).state_dict()


def wide3(config, path):
    """The bundle of a file."""
    bundle = resolve("random-tiny3")
    assert isinstance(bundle, MoondreamBundle)
    return dataclasses.replace(bundle, config=config, weights=path)


def packed_tensors(network):
    """What decode steps read, by place."""
    text, found = network.text, dict(network.state_dict())
    owners = {"head": text.quantised_head.weights}
    for index, block in enumerate(text.text_blocks()):
        owners[f"{index}"] = block.quantised.weights
        if isinstance(block.mlp, MoE):
            found |= {f"{index}.norm": block.norm.weight, f"{index}.shift": block.norm.bias}
            for name, layer in zip(("up", "down"), block.mlp.layers, strict=True):
                if (packed := layer.weights().packed) is not None:
                    found[f"{index}.{name}"] = packed.data
    for place, owner in owners.items():
        for field in dataclasses.fields(owner):
            found[f"{place}.{field.name}"] = getattr(owner, field.name)
    return found


def logits_of(network):
    """Of a few tokens on the CPU, in the network's own dtype."""
    text = network.text
    width, on = text.wte.shape[1], {"dtype": text.wte.dtype}
    keys, values = (torch.zeros(3, 2, 2, 16, width // 2, **on) for _ in range(2))
    x_TD = torch.randn(9, width, generator=torch.Generator().manual_seed(0)).to(**on)
    text.fill(CPU)
    with torch.inference_mode():
        span = PrefillSpan(0, torch.ones(1, dtype=torch.int64), bidirectional=False)
        return text.logits(text.prefill(x_TD, span, KVCache(keys, values))).double()


@pytest.mark.parametrize(
    ("layout", "kind", "group", "most_error"),
    [
        ("a", "fp8", 64, 0.08),
        ("b", "int8", 64, 0.03),
        ("a", "int4", 64, 0.25),
        ("b", "int4", 128, 0.25),
    ],
)
def test_moondream3_is_quantised_as_a_gpu_would_at_load(
    wide3_config, wide3_state, tmp_path, kind, group, most_error, layout
):
    """All maps and experts, to the same bits; a CPU and a GPU compute with the same numbers."""
    source = write_single(stored_as(layout, wide3_state, wide3_config), tmp_path)
    output, code_format = tmp_path / "codes.safetensors", format_of(KINDS[kind], group)
    quantise.write(wide3(wide3_config, source), code_format, output, lambda done: None)
    network = load_weights(wide3_config, output, CPU, torch.bfloat16, codes=code_format)
    network.quantise(kind)
    exact = load_weights(wide3_config, source, CPU, torch.float32)
    if group == 64:
        expected = load_weights(wide3_config, source, CPU, torch.bfloat16)
        expected.quantise(kind)
        ours, theirs = packed_tensors(network), packed_tensors(expected)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert tensor is ours[name] or torch.equal(tensor.float(), ours[name].float()), name
    stored, before = load(wide3_config, source, torch.bfloat16), network.state_dict()
    for name in ("text.wte", "text.blocks.1.mlp.router.weight", "text.blocks.2.attn.tau.wqwv"):
        assert torch.equal(before[name], stored[name])
    loaded = wide3(wide3_config, output).load(CPU, torch.float32)
    on_cpu, packed, plain = map(logits_of, (loaded._network, network.float(), exact))
    assert (on_cpu - packed).norm() < 1e-5 * plain.norm()
    assert 0 < (packed - plain).norm() < most_error * plain.norm()


def test_experts_in_fp8_are_those_of_published_checkpoints(wide3_config, wide3_state, tmp_path):
    """To the bit, so `--weight-dtype fp8` takes a checkpoint with them, and no other does."""
    stored = layout_b(quantised(wide3_state), wide3_config)
    (folder := tmp_path / "published").mkdir()
    published = load_weights(wide3_config, write_single(stored, folder), CPU, torch.bfloat16)
    with pytest.raises(InvalidField, match="whose experts have that kind or are not quantised"):
        published.quantise("int8")
    source = write_single(stored_as("a", wide3_state, wide3_config), tmp_path)
    network = load_weights(wide3_config, source, CPU, torch.bfloat16)
    for each in (published, network):
        each.quantise("fp8")
    ours, theirs = packed_tensors(network), packed_tensors(published)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor is ours[name] or torch.equal(tensor.float(), ours[name].float()), name


def test_what_no_kernel_of_experts_reads_is_refused(wide3_config, wide3_state, tmp_path):
    """With a way out in the sentence; a recipe's codes are rounded once."""
    source = write_single(stored_as("a", wide3_state, wide3_config), tmp_path)
    bundle, output = wide3(wide3_config, source), tmp_path / "codes.safetensors"
    network = load_weights(wide3_config, source, CPU, torch.bfloat16)
    with pytest.raises(InvalidField, match="no second copy; use weight_dtype model"):
        network.quantise("packed")
    with pytest.raises(InvalidField, match="computes in bf16, not in float32"):
        load_weights(wide3_config, source, CPU, torch.float32).quantise("int4")
    quantise.write(bundle, format_of(KINDS["int4"]), output, lambda done: None)
    ours = wide3(wide3_config, output)
    with pytest.raises(InvalidField, match="use weight_dtype auto or int4"):
        ours.load(CPU, torch.float32, LoadOptions(weight_dtype="int8"))
    with pytest.raises(InvalidField, match="is quantised already"):
        ours.quantisation(format_of(KINDS["fp8"]))
    e4m3 = write_single(layout_b(quantised(wide3_state), wide3_config), tmp_path)
    with pytest.raises(InvalidField, match="has quantised experts already"):
        wide3(wide3_config, e4m3).quantisation(format_of(KINDS["fp8"]))


def test_e4m3_experts_answer_as_their_numbers(tiny3_config, state, tmp_path):
    """A network with e4m3 experts computes what plain weights of the same values do."""
    packed = quantised(state)
    plain = {name: tensor for name, tensor in packed.items() if not name.endswith("scale")}
    for name in packed.keys() - plain.keys():
        weight = name.removesuffix("scale") + "weight"
        plain[weight] = plain[weight].float() * packed[name][..., None]
    hidden = []
    for index, tensors in enumerate((packed, plain)):
        folder = tmp_path / str(index)
        folder.mkdir()
        network = load_weights(
            tiny3_config, write_single(layout_b(tensors, tiny3_config), folder), CPU, torch.float32
        )
        MoondreamModel(tiny3_config, network)
        x_TD = torch.randn(9, tiny3_config.text.dim, generator=torch.Generator().manual_seed(0))
        experts = network.text.get_submodule("blocks.1.mlp")
        hidden.append(experts(x_TD, capturable=False))
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-4, atol=1e-5)


DEFECTS = {
    "a": {
        "router": ("model.text.blocks.1.mlp.router.bias", "text.blocks.1.mlp.router.bias"),
        "norm": ("model.region.ln.weight", "region.ln.weight"),
    },
    "b": {
        "router": (f"{LAYER}.1.gate.bias", "text.blocks.1.mlp.router.bias"),
        "norm": ("region_model.ln.weight", "region.ln.weight"),
    },
}


def problems(config, tensors, folder):
    """The problems that the error lists."""
    with pytest.raises(InvalidField) as caught:
        load(config, write_single(tensors, folder))
    return [line.strip() for line in caught.value.message.splitlines()[1:]]


@pytest.mark.parametrize("layout", ["a", "b"])
@pytest.mark.parametrize("which", ["router", "norm"])
def test_a_missing_tensor_is_named(tiny3_config, state, tmp_path, layout, which):
    """The old preview without region.ln is refused."""
    tensors = stored_as(layout, state, tiny3_config)
    stored, name = DEFECTS[layout][which]
    shape = list(tensors.pop(stored).shape)
    assert problems(tiny3_config, tensors, tmp_path) == [f"{name}: missing, expected {shape}"]


@pytest.mark.parametrize(
    ("layout", "stored", "nearest"),
    [
        ("a", "model.text.blocks.1.mlp.rooter.bias", "text.blocks.1.mlp.router.bias"),
        ("b", f"{LAYER}.2.mixer.Wqkv.wieght", "text.blocks.2.attn.qkv.weight"),
        ("b", f"{LAYER}.2.tau_beta", "text.blocks.2.attn.tau.alpha"),
        ("b", "region_model.size_head.scale", "region.size_decoder.bias"),
    ],
)
def test_an_extra_tensor_is_named(tiny3_config, state, tmp_path, layout, stored, nearest):
    """The error of an unknown tensor gives the nearest of the network's names."""
    tensors = stored_as(layout, state, tiny3_config) | {stored: torch.zeros(3)}
    (problem,) = problems(tiny3_config, tensors, tmp_path)
    assert stored.removeprefix("model.") in problem
    assert problem.endswith(f"unknown, the nearest expected name is {nearest}")


@pytest.mark.parametrize(
    ("layout", "stored", "shape"),
    [
        ("a", "model.text.blocks.0.attn.tau.wv", (3, 192)),
        ("a", "model.text.blocks.1.mlp.fc1.weight", (5, 64, 64)),
        ("b", f"{LAYER}.1.mlp.output_experts.weight", (6, 32, 64)),
        ("b", f"{LAYER}.0.tau_wqwv", (2, 192)),
        ("b", "region_model.size_features.weight", (2, 32)),
        ("b", "region_model.coordinate_head.weight", (2048, 64)),
    ],
)
def test_a_shape_that_is_wrong_is_named(tiny3_config, state, tmp_path, layout, stored, shape):
    """The error has both shapes and the stored name; layout A's table is not layout B's."""
    tensors = stored_as(layout, state, tiny3_config) | {stored: torch.zeros(shape)}
    (problem,) = problems(tiny3_config, tensors, tmp_path)
    assert stored.removeprefix("model.") in problem
    assert f"shape {list(shape)}, expected" in problem


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (f"{LAYER}.1.gate.weight", torch.float8_e4m3fn),
        (f"{LAYER}.2.mlp.experts.weight", torch.bfloat16),
        (f"{LAYER}.1.moe_quant.up_scale", torch.int32),
    ],
)
def test_a_dtype_that_is_wrong_is_named(tiny3_config, state, tmp_path, stored, dtype):
    """In an e4m3 file all experts are e4m3, and nothing else is."""
    tensors = layout_b(quantised(state), tiny3_config)
    tensors[stored] = tensors[stored].float().to(dtype)
    (problem,) = problems(tiny3_config, tensors, tmp_path)
    assert problem.startswith(stored)
    assert "which is not cast to" in problem


def test_e4m3_experts_need_their_scales(tiny3_config, state, tmp_path):
    """A missing scale, and scales of plain experts, are refused."""
    tensors = layout_b(quantised(state), tiny3_config)
    del tensors[f"{LAYER}.2.moe_quant.down_scale"]
    expected = ["text.blocks.2.mlp.fc2.scale: missing, expected [6, 64]"]
    assert problems(tiny3_config, tensors, tmp_path) == expected
    tensors = layout_b(state, tiny3_config) | {f"{LAYER}.2.moe_quant.down_scale": torch.ones(6, 64)}
    (problem,) = problems(tiny3_config, tensors, tmp_path)
    assert "moe_quant.down_scale" in problem
    assert "unknown" in problem


def headers_of(tensors):
    """A file's headers, without the file."""
    file = Path("model.safetensors")
    return [TensorHeader(name, file, tuple(t.shape), t.dtype) for name, t in tensors.items()]


def meta_state(config, *, e4m3=False):
    """A network without data, and its tensors."""
    with torch.device("meta"):
        network = Network(config).to(torch.bfloat16)
        if e4m3:
            network.text.use_expert_codes(format_of(WeightKind.E4M3))
    return network, network.state_dict()


def test_moondream3_has_the_published_tensors():
    """The preview has 662 tensors and 9.27 billion parameters, with the published names, shapes."""
    config = moondream3_config()
    network, state = meta_state(config)
    stored = layout_a(state, config.text.num_heads)
    assert len(stored) == 662
    assert sum(name.startswith("model.region") for name in stored) == 12
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(9.27e9, rel=0.001)
    shapes = {
        "text.blocks.0.attn.tau.wq": (32, 6144),
        "text.blocks.23.attn.tau.wv": (32, 6144),
        "text.blocks.23.attn.tau.alpha": (32,),
        "text.blocks.3.mlp.fc1.bias": (8192,),
        "text.blocks.4.mlp.router.weight": (64, 2048),
        "text.blocks.4.mlp.router.bias": (64,),
        "text.blocks.4.mlp.fc1.weight": (64, 2048, 2048),
        "text.blocks.23.mlp.fc2.weight": (64, 2048, 1024),
        "region.coord_decoder.weight": (1024, 2048),
        "region.size_decoder.bias": (2048,),
        "region.ln.weight": (2048,),
    }
    assert {name: tuple(stored[f"model.{name}"].shape) for name in shapes} == shapes
    assert plan(network, headers_of(stored), weights.rename(config.text.num_heads))


@pytest.mark.parametrize("e4m3", [False, True])
def test_moondream3_in_layout_b_by_its_published_shapes(e4m3):
    """At full size, layout B covers the network with 10.5 GB of tensors in e4m3."""
    config = moondream3_config()
    network, state = meta_state(config, e4m3=e4m3)
    stored = headers_of(layout_b(state, config, kv_scales=True))
    assert weights.stored_experts(stored) is (WeightKind.E4M3 if e4m3 else None)
    shapes = {header.name: header.shape for header in stored}
    assert shapes["region_model.coordinate_features.weight"] == (128, 1)
    assert shapes["region_model.size_features.weight"] == (256, 2)
    assert shapes[f"{LAYER}.23.tau_wqwv"] == (64, 6144)
    if e4m3:
        assert shapes[f"{LAYER}.4.moe_quant.up_scale"] == (64, 2048)
        assert sum(header.num_bytes for header in stored) == pytest.approx(10.5e9, rel=0.01)
    assert plan(network, stored, weights.rename(config.text.num_heads))
    network.text.use_fp8_kv()
    assert weights.missing_kv_scales(stored, config.text.num_layers) == []
    assert plan(network, stored, weights.rename(config.text.num_heads, kv_scales=True))


def test_moondream2_in_layout_b_by_its_published_shapes():
    """Moondream 2's 592 tensors have a name each in layout B too."""
    config = moondream2_config()
    network, state = meta_state(config)
    stored = headers_of(layout_b(state, config))
    assert len(stored) == 592
    assert plan(network, stored, weights.rename(config.text.num_heads))
