"""GGUF files: models compute what transformers does, as do tokenizers; others are refused."""

from __future__ import annotations

import json
import random
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import structlog
import torch
from legato_engine.config import LoadOptions
from legato_engine.errors import InvalidField
from legato_engine.kernels.map_codes import WeightKind
from legato_engine.layers.linear import Linear
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint import fill_from_gguf
from legato_engine.models.decoder.frontend import TextFrontend
from legato_engine.models.decoder.gguf import gguf_settings, gguf_tokenizer
from legato_engine.models.decoder.model import DecoderNetwork, load_weights
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.gguf import (
    SPLIT,
    TYPES,
    GgufFile,
    StoredTensor,
    dequantise,
    read_gguf,
)
from legato_engine.models.registry import resolve
from legato_engine.sequence import SampledToken
from legato_engine.types import FinishReason, PromptToken, QuerySpec, Request, RequestKey
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder
from tests.engine.models.gguf import gguf_files
from tests.engine.models.paged_session import PagedSession

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama, biased": {"attention_bias": True},
    "llama, wide heads": {"head_dim": 40},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
}


@pytest.fixture(autouse=True)
def forgotten():
    """No header is kept for a file of another test."""
    yield
    read_gguf.cache_clear()


def model(kind="llama", **fields):
    """Two layers, four heads of queries and two of keys."""
    sizes: dict[str, Any] = {
        "vocab_size": hub_folder.VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    from transformers import AutoConfig  # takes seconds, not needed by most

    config = AutoConfig.for_model(kind, **(sizes | fields))
    return hub_folder.random_model(config)


@pytest.fixture
def path(tmp_path):
    """A file that is not there yet."""
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(path, kind):
    """The architecture, the order of queries and keys, biases and norms are those of the file."""
    theirs = model(kind.partition(",")[0], **KINDS[kind])
    gguf_files.write(path, theirs)
    same.check_prefill_and_decode(same.load("legato-tiny", path), theirs, length=45)


def test_factors_of_the_rotation_are_those_of_the_file(path):
    """Files of Llama 3.1 have a factor for each pair instead of the four numbers."""
    theirs = model(rope_parameters=same.LLAMA3)
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 16, 2) / 16)
    gguf_files.write(path, theirs, factors=plain / theirs.model.rotary_emb.inv_freq)
    same.check_prefill_and_decode(same.load("llama", path), theirs, length=150)


def test_linear_scaling_is_that_of_the_file(path):
    """Its type is a text and its factor a number."""
    linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    theirs = model(rope_parameters=linear)
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    gguf_files.write(path, theirs, fields=fields)
    same.check_prefill_and_decode(same.load("llama", path), theirs, length=45)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_quantised_weights_are_those_that_transformers_reads(path, kind):
    """The dequantised file, read by transformers on its own, gives the same logits."""
    gguf_files.write(path, model(), kind=kind)
    from transformers import AutoModelForCausalLM  # takes seconds, not needed by most

    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    ours = resolve("llama", weights=str(path))
    loaded = ours.load(same.CPU, torch.float32, LoadOptions(weight_dtype="model"))
    same.check_prefill_and_decode(loaded, theirs, length=20, steps=3)


class Mix(NamedTuple):
    """Types of a file's maps: `kind`, others by part; the panels of a layer's maps, by layer.

    `most`: the relative error of its maps of 8 bits.
    """

    kind: str
    panels: tuple[tuple[str, ...], ...]
    kinds: Mapping[str, str] = types.MappingProxyType({})
    most: float = 0.0
    table: str = "int8"
    fates: Mapping[str, str] = types.MappingProxyType({})


_Q4_K = ("int4_single",) * 4
_SIX = {"embed": "Q6_K", "lm_head": "Q6_K"}
_MORE = {"layers.0.self_attn.v_proj": "Q6_K", "layers.0.mlp.down_proj": "Q6_K", **_SIX}
_ROUNDED = 8e-3
BLOCKS = {
    "Q8_0": Mix("Q8_0", (("int8",) * 4,) * 2),
    "Q4_0": Mix("Q4_0", (("int4",) * 4,) * 2, table="int4"),
    "Q4_1": Mix("Q4_1", (("int4",) * 4,) * 2, table="int4"),
    "Q4_K": Mix("Q4_K", (_Q4_K,) * 2, table="int4_single"),
    "Q8_0, head of 6 bits": Mix("Q8_0", (("int8",) * 4,) * 2, _SIX, _ROUNDED),
    "Q4_K_M": Mix(
        "Q4_K",
        (("int8", "int4_single", "int4_single", "int8"), _Q4_K),
        _MORE,
        _ROUNDED,
        fates={"kept": "10 Q4_K", "rounded_to_q8_0": "2 Q4_K, 4 Q6_K"},
    ),
    "Q5_K_M": Mix("Q5_K", (("int8",) * 4,) * 2, _MORE, _ROUNDED),
    "Q5_0, as where 256 divides no input": Mix(
        "Q5_0",
        (("int8", "float32", "int8", "int4_single"),) * 2,
        {"v_proj": "Q8_0", "o_proj": "F16", "down_proj": "Q4_K"},
        fates={"kept": "2 Q4_K, 2 Q8_0", "rounded_to_q8_0": "10 Q5_0", "widened": "2 F16"},
    ),
    "parts of blocks and of numbers": Mix(
        "Q4_K", (("float32", *_Q4_K[1:]),) * 2, {"k_proj": "BF16"}, table="int4_single"
    ),
}


def write_mix(path, name, *, tied):
    """A file of `BLOCKS`."""
    theirs = model(hidden_size=256, intermediate_size=512, tie_word_embeddings=tied)
    gguf_files.write(path, theirs, kind=BLOCKS[name].kind, kinds=BLOCKS[name].kinds)


def error_of(found_OI, exact_OI):
    return (found_OI - exact_OI).norm() / exact_OI.norm()


@pytest.mark.parametrize("weight_dtype", ["stored", "auto"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_stay_as_they_are(path, name, tied, weight_dtype):
    """Panels hold the numbers that the library dequantises, in a checkpoint's order.

    Blocks without a kernel, and parts of one map of several types, have those of Q8_0 within
    their error; a map with a part of numbers has the model's dtype.
    """
    mix = BLOCKS[name]
    write_mix(path, name, tied=tied)
    bundle = resolve("llama", weights=str(path))
    plain = bundle.load(same.CPU, torch.float32, LoadOptions(weight_dtype="model"))
    with structlog.testing.capture_logs() as logs:
        ours = bundle.load(same.CPU, torch.float32, LoadOptions(weight_dtype=weight_dtype))
    if not ours.own_threads:
        pytest.skip("this machine has no library of kernels: no C++ compiler, or no AVX2")
    if mix.fates and not tied:
        (fates,) = (log for log in logs if log["event"] == "gguf_maps")
        assert {key: fates[key] for key in fates.keys() - {"event", "log_level"}} == mix.fates
    assert ours.num_parameters == plain.num_parameters
    networks: list[Any] = [getattr(each, "_network") for each in (ours, plain)]  # noqa: B009
    for layer, exact, panels in zip(*(each.layers for each in networks), mix.panels, strict=True):
        maps = [
            (each.self_attn.qkv, each.self_attn.o_proj, each.mlp.gate_up, each.mlp.down_proj)
            for each in (layer, exact)
        ]
        assert tuple(each.panels.kind for each in maps[0]) == panels
        for mine, other in zip(*maps, strict=True):
            rows = torch.arange(mine.out_features)
            error = error_of(mine.panels.rows(rows), other.panels.rows(rows))
            assert error <= (mix.most if mine.panels.kind == "int8" else 0.0)
    assert networks[0]._table.kind == mix.table
    ids_T = torch.randint(hub_folder.VOCABULARY, (20,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        x_TD, exact_TD = (each.embed(ids_T, torch.zeros(20, 2)) for each in (ours, plain))
        assert error_of(x_TD, exact_TD) <= mix.most
        assert torch.equal(ours.logits(x_TD)[3:4], ours.logits(x_TD[3:4]))
        prompts = [list(map(PromptToken, ids_T.tolist()))] * 2
        logits = [
            each.logits(PagedSession(each).prefill(2, None, prompt))
            for each, prompt in zip((ours, plain), prompts, strict=True)
        ]
    assert same.relative_error(*logits) < (0.1 if mix.most else 1e-3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_gpu_computes_with_the_blocks(path, name, tied):
    """Its packed maps have the file's values, those of Q4_K rounded to fp16 scales and minima."""
    mix = BLOCKS[name]
    write_mix(path, name, tied=tied)
    bundle: Any = resolve("llama", weights=str(path))
    with torch.device("meta"):
        network, exact = (DecoderNetwork(bundle.config) for _ in range(2))
    formats = {base: each.of_gpu for base, each in checkpoint.code_formats(path).items()}
    found = network.to(torch.bfloat16).expect_codes(formats)
    load_weights(network, path, same.CPU, as_codes=found)
    network.quantise(WeightKind.BF16)
    load_weights(exact, path, same.CPU)
    kinds = {"int4_single": WeightKind.Q4_1, "int8": WeightKind.Q8_0, "float32": WeightKind.BF16}
    most = {WeightKind.BF16: 2e-3, WeightKind.Q8_0: mix.most}
    if "int4_single" in (mix.table, *mix.panels[0]):
        most[WeightKind.Q4_1] = 1e-3
    maps: list[Any] = [each for each in network.layers.modules() if isinstance(each, Linear)]
    expected = [
        kinds[each] if each in kinds else WeightKind[mix.kind] for each in sum(mix.panels, ())
    ]
    assert [each.packed._packed.kind for each in maps] == expected
    for mine, other in zip(network.modules(), exact.modules(), strict=True):
        if isinstance(mine, Linear):
            packed: Any = mine.packed
            error = error_of(packed.exact(), other.weight)
            assert error <= most.get(packed._packed.kind, 0.0)
    ids_T = torch.arange(7)
    assert error_of(network.embed(ids_T).float(), exact.embed(ids_T)) < max(mix.most, 4e-3)
    x_TD = torch.randn(4, 256).bfloat16()
    assert same.relative_error(network.logits(x_TD), exact.logits(x_TD.float())) < 1e-2


def test_stored_blocks_are_refused_where_no_kernel_reads_them(path):
    """Without the CPU's own kernels, with the alternative."""
    gguf_files.write(path, model(), kind="Q8_0")
    options = LoadOptions(weight_dtype="stored", cpu_kernels="torch")
    with pytest.raises(InvalidField, match="use weight_dtype auto") as caught:
        resolve("llama", weights=str(path)).load(same.CPU, torch.float32, options)
    assert caught.value.metadata["field"] == "weight_dtype"


def test_stored_blocks_need_less_memory(path):
    """What the blocks take must fit, not what they would become."""
    gguf_files.write(path, model(hidden_size=256, intermediate_size=512), kind="Q4_0")
    bundle, enough = resolve("llama", weights=str(path)), path.stat().st_size * 5 // 4
    options = LoadOptions(weight_dtype="stored", memory=enough)
    assert bundle.load(same.CPU, torch.float32, options).num_parameters > 0
    for weight_dtype, memory in (("auto", enough // 2), ("model", enough)):
        with pytest.raises(InvalidField, match="the weights need"):
            bundle.load(
                same.CPU, torch.float32, LoadOptions(weight_dtype=weight_dtype, memory=memory)
            )


def read(path, stored):
    numbers = np.empty(stored.shape, np.float32)
    GgufFile(path, {}, {"x": stored}).read("x", numbers)
    return numbers


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_five_bits_are_close_to_what_was_written(tmp_path, kind):
    """Within half a step of a block's range; transformers does not read these types."""
    of = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).uniform(-1, 1, (3, 64)).astype(np.float32)
    data = gguf.quantize(values, of)
    (tmp_path / "data").write_bytes(data.tobytes())
    stored = StoredTensor(of, values.shape, 0, data.nbytes)
    ours = read(tmp_path / "data", stored)
    assert np.abs(ours - values).max() < 2 / 31


@pytest.mark.parametrize("kind", [kind for kind in TYPES if not kind.startswith("Q5_")] + ["Q5_K"])
def test_every_type_is_dequantised_as_by_transformers(tmp_path, kind):
    """Random bytes become the numbers that another implementation makes of them."""
    theirs = pytest.importorskip(
        "transformers.integrations.gguf.dequant", reason="of newer releases of transformers"
    )
    of = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[of]
    rows, blocks = 3, 256 // block
    data = np.random.default_rng(0).integers(0, 60, (rows, blocks * size), np.uint8)  # finite
    (tmp_path / "data").write_bytes(b"head" + data.tobytes())
    stored = StoredTensor(of, (rows, blocks * block), 4, data.nbytes)
    ours = read(tmp_path / "data", stored)
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    whole = torch.from_numpy(data)
    expected = (
        whole.view(plain[kind]).float()
        if kind in plain
        else theirs.dequantize(whole, of.value).reshape(stored.shape)
    )
    assert torch.equal(torch.from_numpy(ours), expected)


@pytest.mark.parametrize("kind", SPLIT)
def test_any_number_of_blocks_is_dequantised_as_by_the_library(kind):
    """Bit for bit, also in the last of several chunks, and what is not finite stays so."""
    of = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[of]
    shape = (2**17 // num_bytes * 2 + 3, num_bytes)
    blocks = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    with np.errstate(invalid="ignore"):
        expected = gguf.dequantize(blocks, of)
        ours = np.empty_like(expected)
        dequantise(kind, blocks, ours.reshape(-1, size))
    assert np.array_equal(ours, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj"])
def test_a_tensor_goes_into_any_tensor_of_its_shape(path, name):
    """Into rows of a larger one, turned ones and other types, in a checkpoint's order."""
    theirs = model()
    gguf_files.write(path, theirs)
    name = f"model.layers.0.{name}.weight"
    expected = theirs.state_dict()[name]
    rows, columns = expected.shape
    larger = torch.zeros(rows + 2, columns)
    targets = [larger[1:-1], torch.empty(columns, rows).t(), torch.empty_like(expected).bfloat16()]
    (header,) = (each for each in checkpoint.headers(path) if each.name == name)
    for target in targets:
        fill_from_gguf(header, target)
        assert torch.equal(target, expected.to(target.dtype))
    assert not larger[0].any()
    assert not larger[-1].any()


def test_a_header_is_what_the_library_reads(path):
    """Every field of every type, arrays included."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("of.texts", ["one", "", "zwei €"])
    writer.add_array("of.numbers", [1, -2, 3])
    writer.add_array("of.halves", [0.5, 1.5])
    writer.add_array("of.flags", [True, False])
    writer.add_uint64("a.number", 2**40)
    writer.add_bool("a.flag", True)
    writer.add_tensor("x", np.zeros((2, 3), np.float32))
    gguf_files.finish(writer)
    theirs = gguf.GGUFReader(path)
    ours = read_gguf(path)
    assert ours.metadata == {name: field.contents() for name, field in theirs.fields.items()}
    assert ours.metadata["of.texts"] == ["one", "", "zwei €"]
    assert ours.tensors["x"].offset == theirs.tensors[0].data_offset


def test_a_conversation_ends_where_the_file_says(path):
    """The chat template, its special tokens and the ends of answers come from the metadata."""
    theirs = model()
    tokenizer = hub_folder.byte_level_tokenizer()
    gguf_files.write(path, theirs, chat=hub_folder.CHAT, ends=[hub_folder.TURN])
    ends = [tokenizer.token_to_id(name) for name in (hub_folder.EOS, hub_folder.TURN)]
    rendered = f"{hub_folder.BOS}<|turn|>user\nwhy?<|end|>\n<|turn|>assistant\n"
    frontend = resolve("llama", weights=str(path)).frontend
    request = Request(request_id=RequestKey("p"), task=QuerySpec(question="why?"))
    task = frontend.make_task(request)
    prompt = [token.token_id for token in task.prompt]
    assert prompt == tokenizer.encode(rendered, add_special_tokens=False).ids
    for end in ends:
        task = frontend.make_task(request)
        task.consume(SampledToken(end, (0.0, 0.0)))
        assert task.finish_reason is FinishReason.STOP


ENDED = (
    "{% for m in messages %}<|turn|>{{ m['role'] }} {{ m['content'] }}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("chat", "eos", "ends", "warnings"),
    [
        (hub_folder.CHAT, hub_folder.EOS, [hub_folder.EOS], []),
        (
            hub_folder.CHAT,
            hub_folder.BOS,
            [hub_folder.BOS, hub_folder.EOS],
            ["end_of_turn_is_no_eos"],
        ),
        (hub_folder.CHAT, None, [hub_folder.EOS], ["end_of_turn_is_no_eos"]),
        (ENDED, hub_folder.EOS, [hub_folder.EOS], []),
        (ENDED, None, [hub_folder.TURN], ["end_of_turn_is_no_eos"]),
        ("{{ messages[0]['content'] }}", None, [], ["no_end_of_answer"]),
        ("{{ messages[0]['content'] }}", hub_folder.EOS, [hub_folder.EOS], []),
        (None, None, [], ["no_end_of_answer"]),
    ],
    ids=[
        "the same",
        "another",
        "none in the file",
        "by its name",
        "the next turn",
        "nowhere",
        "no conversation",
        "no template",
    ],
)
def test_an_answer_ends_where_the_template_ends_turns(path, chat, eos, ends, warnings):
    """A file may name another end of answers, or none: the operator is told, and both end them."""
    gguf_files.write(path, model(), chat=chat, eos=eos)
    frontend = resolve("llama", weights=str(path)).frontend
    assert isinstance(frontend, TextFrontend)
    with structlog.testing.capture_logs() as lines:
        frontend.check()
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == warnings
    tokenizer = hub_folder.byte_level_tokenizer()
    found = []
    for name in (hub_folder.BOS, hub_folder.EOS, hub_folder.TURN):
        request = Request(request_id=RequestKey("p"), task=QuerySpec(question="why?"))
        task = frontend.make_task(request)
        task.consume(SampledToken(tokenizer.token_to_id(name), (0.0, 0.0)))
        if task.finish_reason is FinishReason.STOP:
            found.append(name)
    assert found == ends


def refused(path, **settings):
    """The reason that resolving or loading the file is refused for."""
    with pytest.raises(InvalidField) as info:
        resolve(settings.pop("name", "llama"), weights=str(path), **settings).load(
            torch.device("cpu"), torch.float32
        )
    return info.value.message


def test_another_architecture_is_refused(path):
    """By name, with those that are implemented."""
    writer = gguf.GGUFWriter(path, "mamba")
    gguf_files.finish(writer)
    assert "'mamba', not of llama, qwen2, qwen3" in refused(path, name="legato-tiny")


def test_a_model_of_another_family_is_refused(path):
    """A Qwen is not served as a Llama."""
    gguf_files.write(path, model("qwen2"))
    assert "'qwen2', not of llama" in refused(path)


def test_a_type_that_is_not_read_is_refused(path):
    """By name, with those that are read."""
    gguf_files.write(path, model(hidden_size=256, intermediate_size=256), kind="TQ2_0")
    found = refused(path)
    assert "types TQ2_0" in found
    assert "Q4_1" in found


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.05, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(path, share):
    """Wherever it ends: in the magic, the metadata, the vocabulary, the tensors."""
    gguf_files.write(path, model())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "model.gguf" in refused(path)


def test_a_huge_count_is_refused_at_once(path):
    """A damaged length refers beyond the end of the file."""
    gguf_files.write(path, model())
    data = bytearray(path.read_bytes())
    data[16:24] = (2**60).to_bytes(8, "little")  # fields of metadata
    path.write_bytes(data)
    assert "cannot be read: ValueError: it ends at byte" in refused(path)


@pytest.mark.parametrize(
    ("field", "after"),
    [
        (b"tokenizer.ggml.tokens", 8),
        (b"tokenizer.ggml.tokens", 16),
        (b"tokenizer.ggml.token_type", 8),
    ],
    ids=["texts", "a text", "numbers"],
)
def test_a_huge_array_is_refused_at_once(path, field, after):
    """It refers beyond the end of the file, by its count or by the length of a text."""
    gguf_files.write(path, model())
    data = bytearray(path.read_bytes())
    at = data.index(field) + len(field) + after  # the types of the field and its values, the count
    data[at : at + 8] = (2**60).to_bytes(8, "little")
    path.write_bytes(data)
    assert "cannot be read: ValueError: it ends at byte" in refused(path)


def test_big_endian_numbers_are_refused(path):
    """They would be read as other numbers."""
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    gguf_files.finish(writer)
    assert "big-endian" in refused(path)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rope.scaling.type": "yarn"}, "'yarn'; only none and linear"),
        ({"expert_count": 8.0}, "experts"),
        ({"rope.dimension_count": 8.0}, "rope.dimension_count is 8"),
        ({"attention.value_length": 8.0}, "attention.value_length is 8"),
    ],
)
def test_what_is_not_implemented_is_refused(path, fields, problem):
    """Rather than answered wrong."""
    gguf_files.write(path, model(), fields=fields)
    assert problem in refused(path)


def test_a_missing_file_is_refused(path):
    """With the system's reason."""
    assert "No such file" in refused(path)


def test_a_tensor_that_no_network_has_is_refused(path):
    """Its name is the file's own."""
    theirs = model()
    writer = gguf.GGUFWriter(path, "llama")
    gguf_files._add_sizes(writer, theirs.config)
    gguf_files.add_tokenizer(writer, hub_folder.byte_level_tokenizer())
    for name, tensor in theirs.state_dict().items():
        writer.add_tensor(gguf_files.gguf_name(name), tensor.numpy())
    writer.add_tensor("blk.0.surprise.weight", np.zeros(4, np.float32))
    gguf_files.finish(writer)
    assert "blk.0.surprise.weight" in refused(path)


# As in the published tokenizer.json of Llama 3, Qwen 2 and 3, SmolLM2.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
PRE = {
    "gpt-2": pre.ByteLevel(add_prefix_space=False),
    "smollm": pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(False)]),
    "llama-bpe": pre.Sequence(
        [pre.Split(Regex(_LLAMA3), "isolated"), pre.ByteLevel(False, use_regex=False)]
    ),
    "qwen2": pre.Sequence(
        [pre.Split(Regex(_QWEN2), "isolated"), pre.ByteLevel(False, use_regex=False)]
    ),
}
THINK = "<think>"
_WORDS = [
    "the",
    "Cat's",
    "12345",
    "  ",
    "\n\n",
    "\t",
    "é",
    "e\u0301",
    "😀",
    "x=y[3];",
    "naïve",
    "don't",
]
_WORDS += [THINK, hub_folder.TURN, hub_folder.EOS, "1.5e3", "ÄÖ", "日本語", "!!!\n", " a", "co-op"]


def texts():
    """Three hundred texts, with special tokens, digits, spaces and characters of several bytes."""
    generator = random.Random(0)
    joined = (generator.choice(["", " "]) for _ in range(300))
    return [by.join(generator.choices(_WORDS, k=generator.randrange(1, 12))) for by in joined]


def byte_level(split):
    """A vocabulary learnt with that split."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE[split]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[hub_folder.EOS, hub_folder.BOS, hub_folder.TURN],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    return tokenizer


def file_of(tokenizer, *, merges=True, **fields):
    """The metadata that a GGUF file of this tokenizer has."""
    data = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    added = {token["content"]: 3 if token["special"] else 4 for token in data["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    said = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [added.get(token, 1) for token in tokens],
        "bos_token_id": ids[hub_folder.BOS],
        "eos_token_id": ids[hub_folder.EOS],
        "add_bos_token": False,
    }
    if merges:
        said["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    said |= fields
    return GgufFile(Path("x.gguf"), {f"tokenizer.ggml.{k}": v for k, v in said.items()}, {})


def check_same(file, theirs):
    """Encode, with special tokens and without, and decode token by token."""
    whole = gguf_tokenizer(file)
    ours = TextTokenizer(whole)
    for text in texts():
        assert whole.encode(text).ids == theirs.encode(text).ids, text
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert list(ours.encode_marked(text)) == expected, text
        decoded = b"".join(map(ours.piece, expected)).decode(errors="replace")
        assert decoded.strip() == theirs.decode(expected, skip_special_tokens=True).strip(), text


@pytest.mark.parametrize("split", PRE)
def test_tokens_are_those_of_the_tokenizer_json(split):
    """For every split that is implemented."""
    theirs = byte_level(split)
    check_same(file_of(theirs, pre=split), theirs)


@pytest.mark.parametrize("split", PRE)
def test_splits_differ(split):
    """A test of one split would fail with another, so they are told apart."""
    theirs = byte_level(split)
    for other in set(PRE) - {split}:
        whole = gguf_tokenizer(file_of(theirs, pre=other))
        assert any(whole.encode(text).ids != theirs.encode(text).ids for text in texts()), other


def sentencepiece():
    """A vocabulary with byte fallback, and its scores: merges in their order."""
    theirs = hub_folder.byte_fallback_tokenizer()
    data = json.loads(theirs.to_str())
    made = {left + right: -at for at, (left, right) in enumerate(data["model"]["merges"])}
    ids = theirs.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = {f"<0x{byte:02X}>": 6 for byte in range(256)} | {"<unk>": 2}
    added = {token["content"]: 3 for token in data["added_tokens"] if token["content"] != "<unk>"}
    fields = {
        "model": "llama",
        "scores": [float(made.get(token, -1e6)) for token in tokens],
        "token_type": [(kinds | added).get(token, 1) for token in tokens],
        "unknown_token_id": ids["<unk>"],
        "add_bos_token": True,
    }
    return theirs, file_of(theirs, merges=False, **fields)


def test_tokens_of_sentencepiece_are_those_of_the_tokenizer_json():
    """Merges come from the scores; spaces, bytes and BOS are as in the first Llamas."""
    theirs, file = sentencepiece()
    check_same(file, theirs)


def test_bos_is_added_where_the_file_says():
    """Else by the kind: Llamas have one."""
    theirs = byte_level("llama-bpe")
    ids = [
        gguf_tokenizer(file_of(theirs, **fields)).encode("a").ids
        for fields in (
            {"pre": "llama-bpe", "add_bos_token": True},
            {"pre": "llama-bpe", "add_bos_token": None},
            {"pre": "llama-bpe"},
            {"pre": "qwen2", "add_bos_token": None},
        )
    ]
    bos = theirs.token_to_id(hub_folder.BOS)
    assert [found[0] == bos for found in ids] == [True, True, False, False]


def test_text_makes_no_special_token():
    """Neither by merges nor as a whole word; only the template's own text does."""
    for file in (file_of(byte_level("llama-bpe"), pre="llama-bpe"), sentencepiece()[1]):
        tokenizer = TextTokenizer(gguf_tokenizer(file))
        for special in (hub_folder.EOS, hub_folder.TURN):
            assert tokenizer.token_id(special) not in tokenizer.encode(f"a {special}{special} b")
            assert tokenizer.token_id(special) in tokenizer.encode_marked(f"a {special} b")


def test_fillers_of_the_vocabulary_are_no_tokens():
    """Their ids are above the tokenizer's, and no text has them."""
    theirs = byte_level("qwen2")
    file = file_of(theirs, pre="qwen2")
    metadata = dict(file.metadata)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "[PAD401]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 5]
    filled = file._replace(metadata=metadata)
    assert gguf_tokenizer(filled).to_str() == gguf_tokenizer(file).to_str()


def test_special_tokens_and_ends():
    """By the names of templates; eos, eot and eom end an answer."""
    file = file_of(byte_level("qwen2"), pre="qwen2", eot_token_id=2, padding_token_id=0)
    assert gguf_settings(file).specials == {
        "bos_token": hub_folder.BOS,
        "eos_token": hub_folder.EOS,
        "pad_token": hub_folder.EOS,
    }
    assert gguf_settings(file).eos == {0, 2}


def test_a_file_without_an_end_has_the_control_token_of_a_usual_name():
    """Text of that name is no end."""
    file = file_of(byte_level("qwen2"), pre="qwen2", eos_token_id=None)
    assert gguf_settings(file).eos == set()
    metadata = dict(file.metadata)
    tokens = [*metadata["tokenizer.ggml.tokens"], "</s>", "<|endoftext|>"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 3]
    file = file._replace(metadata=metadata)
    assert gguf_settings(file).eos == {tokens.index("<|endoftext|>")}
    assert gguf_settings(file).specials["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"pre": "gpt-4o"}, "'gpt-4o' does; implemented are gpt-2, smollm, llama-bpe, qwen2"),
        ({"model": "t5"}, "kind 't5'; implemented are gpt2"),
        ({"pre": "qwen2", "merges": None}, "no tokenizer.ggml.merges"),
        ({"pre": "qwen2", "tokens": []}, "no tokenizer.ggml.tokens"),
    ],
)
def test_other_tokenizers_are_refused(fields, problem):
    """With what is implemented, and the way out."""
    file = file_of(byte_level("qwen2"), **fields)
    with pytest.raises(InvalidField, match=r"give the model's tokenizer\.json") as info:
        gguf_tokenizer(file)
    assert problem in info.value.message
    assert info.value.metadata["field"] == "tokenizer"
