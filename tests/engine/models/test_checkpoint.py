"""Checkpoints load exactly or are refused, and those that crash their parsers cost a sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from legato_engine.config import LoadOptions
from legato_engine.errors import InternalError, InvalidField
from legato_engine.models import checkpoint, untrusted
from legato_engine.models.checkpoint import Destination, headers
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.moondream.tokenizer import BytePairTokenizer
from legato_engine.models.untrusted import check_tokenizer, encoding, refusing, start_check
from safetensors.torch import save_file
from torch import nn

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


class Small(nn.Module):
    """A network with parameters of each rank, a buffer, and a dtype that is not cast."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(7, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("steps", torch.empty(2, 3))
        self.experts = nn.Parameter(torch.empty(2, 3, 4, dtype=torch.float8_e4m3fn))


def empty(dtype=torch.float32):
    """The network on the meta device."""
    with torch.device("meta"):
        network = Small()
    for parameter in network.parameters():
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(dtype)
    return network


@pytest.fixture
def tensors():
    """A checkpoint's tensors by name."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(like.shape, generator=generator).to(like.dtype)
        for name, like in empty().state_dict().items()
    }


def write_single(tensors, folder):
    """Write one file and return its path."""
    save_file(tensors, folder / "some.safetensors")
    return folder / "some.safetensors"


def write_folder(tensors, folder):
    """Write one file and return its folder."""
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(tensors, folder, count=3):
    """Write shards and their index."""
    names = sorted(tensors)
    weight_map = {name: f"part-{i % count}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_pickled(tensors, folder):
    """Write a dict of tensors with torch."""
    torch.save(tensors, folder / "weights.pt")
    return folder / "weights.pt"


def load(path, rename=lambda name: name, dtype=torch.float32, **options):
    """Load and return the tensors by name."""
    network = empty(dtype)
    checkpoint.load(network, headers(path), rename, CPU, LoadOptions(**options))
    return network.state_dict()


def problems(path, rename=lambda name: name):
    """The problems that the error lists."""
    network = empty()
    with pytest.raises(InvalidField) as caught:
        checkpoint.load(network, headers(path), rename, CPU)
    assert caught.value.metadata["field"] == "weights"
    assert all(tensor.is_meta for tensor in network.state_dict().values())
    head, *lines = caught.value.message.splitlines()
    assert head == f"the checkpoint does not fit the model in {len(lines)} tensors:"
    return [line.strip() for line in lines]


def same(one, other):
    """Whether two checkpoints have the same bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name].float(), other[name].float())
        for name in one
    )


@pytest.mark.parametrize("write", [write_single, write_folder, write_shards, write_pickled])
@pytest.mark.parametrize("mapped", [1, 2**20])
def test_every_kind_of_file_round_trips(tensors, tmp_path, monkeypatch, write, mapped):
    """What was written is loaded, however often a file is mapped."""
    monkeypatch.setattr(checkpoint, "_MAPPED_BYTES", mapped)
    assert same(load(write(tensors, tmp_path)), tensors)


@pytest.mark.parametrize("write", [write_single, write_pickled])
def test_weights_take_the_dtype_of_their_parameter(tensors, tmp_path, write):
    """Floats are cast to their parameter's dtype."""
    loaded = load(write(tensors, tmp_path), dtype=torch.bfloat16)
    assert loaded["table"].dtype is torch.bfloat16
    assert torch.equal(loaded["table"], tensors["table"].bfloat16())
    assert loaded["experts"].dtype is torch.float8_e4m3fn
    assert torch.equal(loaded["experts"].float(), tensors["experts"].float())


def test_what_is_loaded_is_frozen_and_no_view_of_the_file(tensors, tmp_path):
    """Overwriting the file does not change loaded weights."""
    path = write_single(tensors, tmp_path)
    network = empty()
    checkpoint.load(network, headers(path), lambda name: name, CPU)
    path.write_bytes(bytes(path.stat().st_size))
    assert same(network.state_dict(), tensors)
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_names_rows_and_axes_follow_the_layout(tensors, tmp_path):
    """A layout renames, joins rows, transposes, and drops unused tensors."""
    first, second = tensors["table"].split([3, 4])
    renamed = {f"old.{name}": tensor for name, tensor in tensors.items() if name != "table"}
    renamed["old.layers.1.weight"] = tensors["layers.1.weight"].t().contiguous()
    renamed |= {"upper": first, "lower": second.clone(), "rope.inv_freq": torch.zeros(3)}

    def layout(name):
        known = {
            "upper": Destination("table", first_row=0),
            "lower": Destination("table", first_row=3),
            "old.layers.1.weight": Destination("layers.1.weight", transposed=True),
            "rope.inv_freq": None,
        }
        return known.get(name, name.removeprefix("old."))

    assert same(load(write_single(renamed, tmp_path), layout), tensors)


def test_each_defect_is_named(tensors, tmp_path):
    """One error lists missing, unknown, mis-shaped and not castable tensors."""
    bad = dict(tensors)
    del bad["scale"]
    bad["layers.1.wieght"] = bad.pop("layers.1.weight")
    bad["table"] = torch.zeros(4, 7)
    bad["experts"] = torch.zeros(2, 3, 4)
    bad["steps"] = torch.zeros(2, 3, dtype=torch.int64)
    assert problems(write_folder(bad, tmp_path)) == [
        "experts: stored as float32, which is not cast to float8_e4m3fn",
        "layers.1.weight: missing, expected [6, 4]",
        "scale: missing, expected []",
        "steps: stored as int64, which is not cast to float32",
        "table: shape [4, 7], expected [7, 4]",
        "layers.1.wieght: unknown, the nearest expected name is layers.1.weight",
    ]


def test_a_tensor_in_two_shards_is_named(tensors, tmp_path):
    """Two tensors of one name are an error."""
    write_shards(tensors, tmp_path)
    save_file({"table": tensors["table"]}, tmp_path / "more.safetensors")
    index = json.loads((tmp_path / INDEX).read_bytes())
    index["weight_map"]["table"] = "more.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    sources = "table in more.safetensors and table in part-0.safetensors"
    assert problems(tmp_path) == [f"table: given twice, as {sources}"]


def test_two_names_of_one_parameter_are_named(tensors, tmp_path):
    """Two stored names of one parameter are an error with both names."""
    more = tensors | {"other": tensors["table"].clone()}
    path = write_single(more, tmp_path)
    sources = "other in some.safetensors and table in some.safetensors"
    found = problems(path, lambda name: "table" if name == "other" else name)
    assert found == [f"table: given twice, as {sources}"]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            {"upper": 0, "lower": 2},
            "table: given twice, as upper in some.safetensors and lower in some.safetensors",
        ),
        ({"upper": 0, "lower": None}, "table: 4 of its 7 rows are missing"),
        (
            {"upper": 0, "lower": 4},
            "lower (table): shape [4, 4], expected rows from 4 on of [7, 4]",
        ),
    ],
)
def test_rows_that_do_not_make_a_parameter_are_named(tensors, tmp_path, rows, problem):
    """Parts must not overlap, leave rows out or exceed the parameter."""
    first, second = tensors.pop("table").split([3, 4])
    path = write_single(tensors | {"upper": first.clone(), "lower": second.clone()}, tmp_path)

    def layout(name):
        if name not in rows:
            return name
        return None if rows[name] is None else Destination("table", rows[name])

    assert problems(path, layout) == [problem]


def test_a_foreign_checkpoint_is_summed_up(tmp_path):
    """Of thousands of problems twenty are listed, and the others counted."""
    save_file({f"encoder.{i}": torch.zeros(2) for i in range(3000)}, tmp_path / "x.safetensors")
    with pytest.raises(InvalidField) as caught:
        load(tmp_path / "x.safetensors")
    lines = caught.value.message.splitlines()
    assert len(lines) == 22
    expected = len(empty().state_dict())
    assert caught.value.metadata["problems"] == str(3000 + expected)
    assert lines[-1] == f"  and {3000 + expected - 20} more"


@pytest.mark.parametrize("write", [write_shards, write_pickled])
def test_a_truncated_file_is_named(tensors, tmp_path, write):
    """A truncated file is found before anything is loaded."""
    write(tensors, tmp_path)
    path = next(file for file in sorted(tmp_path.iterdir()) if file.suffix != ".json")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidField, match=rf"{re.escape(path.name)} cannot be read"):
        load(tmp_path if write is write_shards else path)


def test_files_of_another_kind_are_named(tmp_path):
    """No weights, no safetensors, no dict of tensors, no index: each is an error with the path."""
    with pytest.raises(InvalidField, match=tmp_path.name):
        headers(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InvalidField, match=r"model\.safetensors cannot be read"):
        headers(tmp_path)
    (tmp_path / "text.pt").write_bytes(b"not a pickle")
    with pytest.raises(InvalidField, match=r"text\.pt cannot be read"):
        headers(tmp_path / "text.pt")
    torch.save({"step": 3}, tmp_path / "state.pt")
    with pytest.raises(InvalidField, match=r"state\.pt is no dict of tensors"):
        headers(tmp_path / "state.pt")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).write_text("[1]")
    with pytest.raises(InvalidField, match="is no index of shards"):
        headers(tmp_path)


def test_a_pickle_runs_no_code(tmp_path):
    """A .pt file that would call code is refused, and nothing is called."""
    torch.save({"x": Caller(tmp_path / "called")}, tmp_path / "weights.pt")
    with pytest.raises(InvalidField, match=r"weights\.pt cannot be read"):
        headers(tmp_path / "weights.pt")
    assert not (tmp_path / "called").exists()


class Caller:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_an_index_with_missing_files_is_named(tensors, tmp_path):
    """Missing shards are named and counted."""
    write_shards(tensors, tmp_path)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(InvalidField, match=r"names 1 of 3 files .* there: part-1\.safetensors"):
        headers(tmp_path)


def test_memory_is_asked_for_before_it_is_taken(tensors, tmp_path):
    """Too little memory is an error with the needed and the free bytes."""
    path = write_single(tensors, tmp_path)
    network = empty()
    needed = sum(tensor.nbytes for tensor in network.state_dict().values())
    with pytest.raises(
        InvalidField, match=r"as float32 and float8_e4m3fn, and 0\.00 GiB"
    ) as caught:
        checkpoint.load(
            network, headers(path), lambda name: name, CPU, LoadOptions(memory=needed - 1)
        )
    assert caught.value.metadata == {
        "field": "weights",
        "needed_bytes": str(needed),
        "free_bytes": str(needed - 1),
    }
    assert all(tensor.is_meta for tensor in network.state_dict().values())
    assert same(load(path, memory=needed), tensors)


def test_progress_grows_to_one(tensors, tmp_path):
    """Fractions rise by at least a percent, and end with 1."""
    many = {f"more.{i}": torch.zeros(100) for i in range(500)}
    path = write_single(tensors | many, tmp_path)
    network = empty()
    network.more = nn.ParameterList(torch.empty(100, device="meta") for _ in many)
    seen: list[float] = []
    checkpoint.load(
        network, headers(path), lambda name: name, CPU, LoadOptions(progress=seen.append)
    )
    assert seen == sorted(set(seen))
    assert seen[-1] == 1.0
    assert 50 < len(seen) <= 100


CHILD = """
import sys
from pathlib import Path
import torch
from torch import nn
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint import headers

def measured(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

dtype = getattr(torch, sys.argv[2])
def network(size):
    with torch.device("meta"):
        return nn.ModuleList(nn.Linear(size, size) for _ in range(40)).to(dtype)

def load(network, path):
    checkpoint.load(network, headers(Path(path)), lambda name: name, torch.device("cpu"))

load(network(8), sys.argv[3])  # what torch and safetensors load on their first use
before = measured("VmRSS")
big = network(1968)
load(big, sys.argv[1])
kept = sum(tensor.nbytes for tensor in big.state_dict().values())
print(measured("VmHWM") - before, kept)
"""


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_shards, write_pickled])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_what_is_kept(tmp_path, child_python_path, write, dtype):
    """A process that loads 310 MB of bfloat16 peaks below 1.2 times that."""
    paths = []
    for size in (1968, 8):
        (folder := tmp_path / str(size)).mkdir()
        weights = {}
        for i in range(40):
            weights[f"{i}.weight"] = torch.rand(size, size).bfloat16()
            weights[f"{i}.bias"] = torch.rand(size).bfloat16()
        paths.append(str(write(weights, folder)))
    command = [sys.executable, "-c", CHILD, paths[0], dtype, paths[1]]
    done = subprocess.run(command, check=True, timeout=200, capture_output=True, text=True)
    peak, kept = map(int, done.stdout.split())
    assert kept > 300e6 * (2 if dtype == "float32" else 1)
    assert kept <= peak < 1.2 * kept


# ---------------------------------------------------------------- untrusted
# Files that crash their parsers, or keep them busy, cost a sentence and no engine.


def tokenizer(pattern=None, **parts):
    """A tokenizer.json of two letters."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = False
    steps = [split, byte_level] if pattern else [byte_level]
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
        **parts,
    }


def replacing(text, times):
    """A normalizer that makes one letter many."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": text}
    return {"type": "Sequence", "normalizers": [step] * times}


PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
SLICED = {
    "type": "BPE",
    "vocab": {"é": 0, "a": 1},
    "merges": [["a", "é"]],
    "continuing_subword_prefix": "x",
}
HOSTILE = {
    "a panic of the parser": (tokenizer(normalizer=PRECOMPILED), "is not a tokenizer"),
    "an abort of the parser": (tokenizer(model=SLICED), "ends the process|is not a tokenizer"),
    "an empty pattern": (
        tokenizer(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}),
        "cannot be read: PanicException",
    ),
    "a search without end": (tokenizer(r"(a+)+$"), "cannot be read: PanicException"),
    "a text that grows": (tokenizer(normalizer=replacing("a" * 50, 2)), "makes over"),
    "a text without end": (tokenizer(normalizer=replacing("a" * 9999, 9)), "ends|MiB|takes more"),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("read", [TextTokenizer.read, BytePairTokenizer])
def test_a_hostile_tokenizer_is_refused(tmp_path, kind, read):
    """The engine's process is not the one that panics, aborts or runs out of memory."""
    content, says = HOSTILE[kind]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidField, match=says) as caught:
        read(path)
    assert caught.value.metadata["field"] == "tokenizer"
    assert "\n" not in caught.value.message
    path.write_text(json.dumps(tokenizer()))
    assert read(path).num_ids == 3


def test_a_check_may_begin_ahead(tmp_path, monkeypatch):
    """Its result is that of the check which began, once."""
    path = tmp_path / "tokenizer.json"
    path.write_text("no json")
    start_check(path)
    with pytest.raises(InvalidField, match="is not JSON"):
        check_tokenizer(path)
    path.write_text(json.dumps(tokenizer()))
    start_check(path)
    untrusted._started[path].result(60)
    monkeypatch.setattr(untrusted, "_confined", None)
    check_tokenizer(path)
    with pytest.raises(TypeError):
        check_tokenizer(path)


def test_time_is_bounded(tmp_path, monkeypatch):
    """A parser that computes without end is ended by the kernel."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer(normalizer=replacing("a" * 200, 3))))
    monkeypatch.setitem(untrusted._MEMORY_PER_BYTE, "tokenizer", 1 << 24)
    monkeypatch.setattr(untrusted, "_CPU_SECONDS", 0.3)
    with pytest.raises(InvalidField, match=r"takes more than 0\.3 s"):
        check_tokenizer(path)


def test_a_panic_at_a_text_fails_one_request(tmp_path):
    """Past `except Exception` it would end the engine."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer(r"(?:a|b|aa)+$")))
    made = TextTokenizer.read(path)
    with pytest.raises(InternalError, match="the tokenizer fails on this text: PanicException"):
        made.encode("a" * 5000 + "c")
    assert made.encode("ab") == (2,)


@pytest.mark.parametrize(
    "error", [ValueError("two\nlines"), KeyError("vocab"), RecursionError(), SystemError("x")]
)
def test_any_error_of_a_parser_is_one_sentence(error):
    """It names the file, the field and the kind of error."""
    with pytest.raises(InvalidField) as caught, refusing("file", "weights"):
        raise error
    assert caught.value.message.startswith(f"file cannot be read: {type(error).__name__}")
    assert "\n" not in caught.value.message
    assert caught.value.metadata == {"field": "weights"}


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), InternalError("bug")])
def test_what_no_file_is_to_blame_for_passes(error):
    """Memory that ran out, an interrupt, and errors that have their type."""
    for guard in (refusing("file", "weights"), encoding()):
        with pytest.raises(type(error)), guard:
            raise error
