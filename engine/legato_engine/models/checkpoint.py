"""Loading of checkpoints: files, strict matching of tensors, assignment."""

from __future__ import annotations

import collections
import contextlib
import difflib
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from legato_engine.config import LOAD_DEFAULTS, LoadOptions, Progress
from legato_engine.errors import InvalidField
from legato_engine.kernels.map_codes import (
    BLOCKS_OF_8_BITS,
    CodeFormat,
    WeightKind,
    map_codes,
)
from legato_engine.models.gguf import (
    NUMBERS,
    ROPE_FACTORS,
    GgufFile,
    StoredTensor,
    is_gguf,
    read_gguf,
)
from legato_engine.models.untrusted import refusing

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLED = (".pt", ".pth")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorHeader(NamedTuple):
    """A stored tensor without its data."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    code_format: CodeFormat | None = None
    """Of a part of a GGUF map's codes."""

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def headers(path: Path, as_codes: Mapping[str, CodeFormat] = {}) -> tuple[TensorHeader, ...]:
    """List the tensors of a .safetensors, .pt or .gguf file, or of a folder with one or shards.

    Of a .pt file only a dict of tensors is unpickled. Tensors of a .gguf file have the names and
    the order that they have in a Hugging Face checkpoint. They are dequantised, but for the maps
    `as_codes`, which have the tensors of a quantised checkpoint.

    Raises:
        InvalidField: a file is missing, truncated or of another kind.
    """
    found: list[TensorHeader] = []
    for file in _files(path):
        with refusing(file.name, "weights"):
            found += _headers(file, as_codes)
    return tuple(found)


def code_formats(path: Path) -> dict[str, CodeFormat]:
    """Return the formats in which a .gguf file's maps keep their blocks or are rounded, by name."""
    return {
        name: code_format
        for name, stored in _gguf_maps(path).items()
        for code_format in (GGUF_FORMATS.get(stored.kind.name, BLOCKS_OF_8_BITS),)
        if stored.kind.name not in NUMBERS and code_format.divides(stored.shape[1])
    }


def gguf_fates(path: Path, as_codes: Mapping[str, CodeFormat]) -> dict[str, str]:
    """Count a .gguf file's maps by type, for a log, by what becomes of them."""
    counted: dict[str, collections.Counter[str]] = {}
    for name, stored in _gguf_maps(path).items():
        fate = "widened"
        if name in as_codes:
            fate = "kept" if _keeps_blocks(stored, as_codes[name]) else "rounded_to_q8_0"
        counted.setdefault(fate, collections.Counter())[stored.kind.name] += 1
    return {
        fate: ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        for fate, kinds in counted.items()
    }


def _gguf_maps(path: Path) -> dict[str, StoredTensor]:
    """Return the matrices of a .gguf file, by the names of their modules in a checkpoint."""
    tensors = ((_name_of_gguf(name), each) for name, each in read_gguf(path).tensors.items())
    return {
        name.removesuffix(".weight"): each
        for name, each in tensors
        if name.endswith(".weight") and len(each.shape) == 2
    }


def _keeps_blocks(stored: StoredTensor, code_format: CodeFormat) -> bool:
    own = GGUF_FORMATS.get(stored.kind.name)
    return own is not None and own.kind is code_format.kind


def metadata(path: Path) -> dict[str, str]:
    """Return what .safetensors files say of themselves, of a file or folder as `headers`."""
    found: dict[str, str] = {}
    for file in _files(path):
        if file.suffix not in _PICKLED and not is_gguf(file):
            with _open(file) as handle:
                found |= handle.metadata() or {}
    return found


def require_layers(num_layers: int, path: Path) -> None:
    """Compare the layers of a configuration with the tensors of its weights.

    Each has several. Objects for layers take time and memory before any tensor is read.

    Raises:
        InvalidField: there are more layers than tensors, or as `headers`.
    """
    stored = len(headers(path))
    if num_layers > stored:
        problem = f"{path.name} has {stored} tensors, too few for {num_layers} layers"
        raise InvalidField(problem, field="weights")


Fill = Callable[[TensorHeader, torch.Tensor], None]
"""Writes a stored tensor into one of its shape, and casts it where that one is."""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Fill]:
    """Read tensors by name, directly into their destination where possible."""
    if file.suffix in _PICKLED:
        yield functools.partial(_copy, _unpickled(file).__getitem__)
    elif is_gguf(file):
        try:
            yield fill_from_gguf
        finally:
            _gguf_codes.cache_clear()
    else:
        with _open(file) as handle:
            yield functools.partial(_copy, handle.get_tensor)


def read(header: TensorHeader) -> torch.Tensor:
    tensor = torch.empty(header.shape, dtype=header.dtype)
    with opened(header.file) as fill:
        fill(header, tensor)
    return tensor


def _copy(
    mapped: Callable[[str], torch.Tensor], header: TensorHeader, target: torch.Tensor
) -> None:
    with refusing(header.name, "weights"):
        tensor = mapped(header.name)
    target.copy_(tensor.to(target.device))


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if (path / _SINGLE_FILE).is_file():
        return (path / _SINGLE_FILE,)
    if (path / _INDEX_FILE).is_file():
        return _shards(path / _INDEX_FILE)
    raise InvalidField(f"no safetensors weights at {path}", field="weights")


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = tuple(index.parent / Path(name).name for name in names)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidField(f"{index.name} is no index of shards", field="weights") from None
    if missing := [file.name for file in files if not file.is_file()]:
        problem = f"{index.name} names {len(missing)} of {len(files)} files that are not there"
        raise InvalidField(f"{problem}: {', '.join(missing[:3])}", field="weights")
    return files


def _headers(file: Path, as_codes: Mapping[str, CodeFormat]) -> Iterator[TensorHeader]:
    if file.suffix in _PICKLED:
        for name, tensor in _unpickled(file).items():
            yield TensorHeader(name, file, tuple(tensor.shape), tensor.dtype)
        return
    if is_gguf(file):
        for own_name, stored in read_gguf(file).tensors.items():
            name = _name_of_gguf(own_name)
            base = name.rpartition(".")[0]
            if (own := as_codes.get(base)) is not None:
                codes = own.empty(stored.shape, torch.device("meta")).tensors()
                for part, like in codes.items():
                    yield TensorHeader(f"{base}.{part}", file, tuple(like.shape), like.dtype, own)
            elif own_name != ROPE_FACTORS:
                yield TensorHeader(name, file, stored.shape, torch.float32)
        return
    with _open(file) as handle:
        for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
            part = handle.get_slice(name)
            if (dtype := part.get_dtype()) not in _DTYPES:
                raise InvalidField(f"{file.name}: {name} is stored as {dtype}", field="weights")
            yield TensorHeader(name, file, tuple(part.get_shape()), _DTYPES[dtype])


def _open(file: Path) -> safe_open:
    with refusing(file.name, "weights"):
        return safe_open(file, framework="pt")


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    with refusing(file.name, "weights"):
        content: object = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    ):
        raise InvalidField(f"{file.name} is no dict of tensors by name", field="weights")
    return content


# ---------------------------------------------------------------- checkpoint plan

_MAX_NAMED = 20  # problems that an error spells out; more are counted
_CAST = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class Destination(NamedTuple):
    """The parameter that a stored tensor fills, whole or from `first_row`, then all or `num_rows`.

    `transposed`: the file swaps rows and columns. `flat`: the file may have any shape.
    """

    name: str
    first_row: int | None = None
    num_rows: int | None = None
    transposed: bool = False
    flat: bool = False


Rename = Callable[[str], str | Destination | None]
"""Maps a stored name to its destination; None: known and unused."""


class Move(NamedTuple):
    """A stored tensor and its destination."""

    header: TensorHeader
    destination: Destination

    @property
    def shape(self) -> tuple[int, ...]:
        if self.destination.flat:
            return (math.prod(self.header.shape),)
        return self.header.shape[::-1] if self.destination.transposed else self.header.shape

    @property
    def source(self) -> str:
        return f"{self.header.name} in {self.header.file.name}"

    @property
    def label(self) -> str:
        """The stored name, and the parameter's if that differs by more than a prefix."""
        stored, name = self.header.name, self.destination.name
        return name if stored.endswith(name) else f"{stored} ({name})"

    def rows(self, full: Sequence[int]) -> range:
        if self.destination.first_row is None:
            return range(*full[:1] or (1,))
        return range(self.destination.first_row, self.destination.first_row + (*self.shape, 1)[0])


def plan(network: nn.Module, headers: Iterable[TensorHeader], rename: Rename) -> tuple[Move, ...]:
    """Assign stored tensors their destinations, in the order of the headers.

    Raises:
        InvalidField: tensors are missing, unknown, given twice, or of a wrong shape or dtype.
    """
    expected: dict[str, torch.Tensor] = network.state_dict()
    moves = tuple(
        Move(header, Destination(to) if isinstance(to, str) else to)
        for header in headers
        if (to := rename(header.name)) is not None
    )
    if problems := _problems(moves, expected):
        lines = [f"the checkpoint does not fit the model in {len(problems)} tensors:"]
        lines += [f"  {problem}" for problem in problems[:_MAX_NAMED]]
        if len(problems) > _MAX_NAMED:
            lines.append(f"  and {len(problems) - _MAX_NAMED} more")
        raise InvalidField("\n".join(lines), field="weights", problems=len(problems))
    return moves


def _problems(moves: Iterable[Move], expected: Mapping[str, torch.Tensor]) -> list[str]:
    by_destination: dict[str, list[Move]] = {name: [] for name in expected}
    unknown: list[Move] = []
    for move in moves:
        by_destination.get(move.destination.name, unknown).append(move)
    found: list[str] = []
    for name, given in sorted(by_destination.items()):
        found += _of_parameter(name, given, expected[name])
    return found + list(_of_unknown(sorted(unknown), expected))


def _of_parameter(name: str, given: list[Move], wanted: torch.Tensor) -> list[str]:
    full = tuple(wanted.shape)
    if not given:
        return [f"{name}: missing, expected {list(full)}"]
    if problems := [problem for move in given if (problem := _misfit(move, wanted))]:
        return problems
    given = sorted(given, key=lambda move: (move.rows(full).start, move.source))
    if twice := [
        f"{name}: given twice, as {before.source} and {after.source}"
        for before, after in itertools.pairwise(given)
        if after.rows(full).start < before.rows(full).stop
    ]:
        return twice
    lacking = (*full, 1)[0] - sum(len(move.rows(full)) for move in given)
    return [f"{name}: {lacking} of its {full[0]} rows are missing"] if lacking else []


def _misfit(move: Move, wanted: torch.Tensor) -> str | None:
    full = tuple(wanted.shape)
    if move.destination.first_row is None:
        fits, shape = move.shape == full, list(full[::-1] if move.destination.transposed else full)
        expected = str(shape)
    else:
        rows, count = move.rows(full), move.destination.num_rows
        fits = move.shape[1:] == full[1:] and rows.stop <= full[0] and count in (None, len(rows))
        expected = f"rows from {rows.start} on" if count is None else f"{count} rows"
        expected += f" of {list(full)}"
    if not fits:
        return f"{move.label}: shape {list(move.header.shape)}, expected {expected}"
    if move.header.dtype != wanted.dtype and not {move.header.dtype, wanted.dtype} <= _CAST:
        stored, runs = dtype_name(move.header.dtype), dtype_name(wanted.dtype)
        return f"{move.label}: stored as {stored}, which is not cast to {runs}"
    return None


def _of_unknown(moves: Iterable[Move], expected: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for index, move in enumerate(moves):
        if index < _MAX_NAMED:  # the search compares with every name
            nearest = difflib.get_close_matches(move.destination.name, expected, n=1, cutoff=0.0)[0]
            yield f"{move.label}: unknown, the nearest expected name is {nearest}"
        else:
            yield f"{move.label}: unknown"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- checkpoint

# A network comes on the meta device, each parameter in the dtype that it runs in. Nothing is
# allocated before all tensors are known to fit. Few tensors are mapped at a time, so that the host
# holds little more than the weights that stay there.

_MAPPED_BYTES = 16 * 2**20  # of a mapping, unless one tensor is larger
_GIB = 2**30


def load(
    network: nn.Module,
    headers: Sequence[TensorHeader],
    rename: Rename,
    device: torch.device,
    options: LoadOptions = LOAD_DEFAULTS,
) -> None:
    """Fill a network with frozen copies of the tensors.

    Raises:
        InvalidField: the tensors do not fit the network (see `plan`), or the network does not fit
            the memory, and the network is unchanged; or a tensor holds a number that is not finite.
    """
    moves = plan(network, headers, rename)
    require_memory(network, device, options.memory)
    meter = ProgressMeter(sum(move.header.num_bytes for move in moves), options.progress)
    for part in _mappings(moves):
        with opened(part[0].header.file) as fill:
            for move in part:
                target = _target(network, move, device)
                fill(move.header, target)
                _require_finite(target, move.header)
                meter.add(move.header.num_bytes)
    meter.finish()


def randomise(
    network: nn.Module,
    seed: int,
    device: torch.device,
    scale: Callable[[str, torch.Size], float],
    gains: re.Pattern[str],
    options: LoadOptions = LOAD_DEFAULTS,
) -> None:
    """Fill a network with seeded noise, made on the device (CPU and GPU seeds differ).

    `scale`: standard deviation by name and shape. Tensors that match `gains` have a mean of 1.
    """
    require_memory(network, device, options.memory)
    generator = torch.Generator(device).manual_seed(seed)
    state: dict[str, torch.Tensor] = network.state_dict()
    meter = ProgressMeter(sum(like.nbytes for like in state.values()), options.progress)
    for name, like in state.items():
        noise = torch.randn(like.shape, generator=generator, device=device, dtype=like.dtype)
        noise.mul_(scale(name, like.shape))
        if gains.search(name):
            noise.add_(1.0)
        assign(network, name, noise)
        meter.add(like.nbytes)
    meter.finish()


def require_memory(network: nn.Module, device: torch.device, memory: int | None) -> None:
    tensors: dict[str, torch.Tensor] = network.state_dict()
    needed = sum(tensor.nbytes for tensor in tensors.values())
    if memory is None or needed <= memory:
        return
    dtypes = " and ".join(sorted({dtype_name(tensor.dtype) for tensor in tensors.values()}))
    raise InvalidField(
        f"the weights need {needed / _GIB:.2f} GiB as {dtypes}, and {memory / _GIB:.2f} GiB are "
        f"free on {device}: use a smaller dtype or another device, or free memory",
        field="weights",
        needed_bytes=needed,
        free_bytes=memory,
    )


def assign(network: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer `name`; a parameter is frozen."""
    path, _, leaf = name.rpartition(".")
    module = network.get_submodule(path)
    if isinstance(getattr(module, leaf), nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=False)
    setattr(module, leaf, tensor)


class ProgressMeter:
    """Reports progress once per full percent, and 1 at the end."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = max(total, 1)
        self._progress = progress
        self._done = 0
        self._percent = 0

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        percent = self._done * 100 // self._total
        if self._percent < percent < 100:
            self._percent = percent
            self._progress(percent / 100)

    def finish(self) -> None:
        self._progress(1.0)


def _mappings(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Group moves by mapping, whose end frees what was read."""
    part: list[Move] = []
    size = 0
    for move in moves:
        if part and (move.header.file != part[0].header.file or size >= _MAPPED_BYTES):
            yield part
            part, size = [], 0
        part.append(move)
        size += move.header.num_bytes
    if part:
        yield part


def _target(network: nn.Module, move: Move, device: torch.device) -> torch.Tensor:
    """Return the view of the parameter that a stored tensor fills, in stored shape and order."""
    destination = move.destination
    path, _, leaf = destination.name.rpartition(".")
    module = network.get_submodule(path)
    target: torch.Tensor = getattr(module, leaf)
    if target.is_meta:  # `empty_like` of such a tensor imports sympy, a second at each start
        shape, strides = target.shape, target.stride()
        filled = torch.empty_strided(shape, strides, dtype=target.dtype, device=device)
        assign(network, destination.name, filled)
        target = getattr(module, leaf)
    target = target.detach()
    if destination.first_row is not None:
        rows = move.rows(target.shape)
        target = target[rows.start : rows.stop]
    if destination.flat:
        return target.view(move.header.shape)
    return target.t() if destination.transposed else target


def _require_finite(tensor: torch.Tensor, header: TensorHeader) -> None:
    """One pass without a copy; of the 8-bit types only some have what is not finite."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.numel():
        return
    if not torch.isfinite(torch.stack(torch.aminmax(tensor))).all():
        raise InvalidField(
            f"{header.name} in {header.file} holds numbers that are not finite: the file is "
            "damaged, or its numbers are too large for the dtype",
            field="weights",
        )


# ---------------------------------------------------------------- GGUF

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_FORMATS = {
    "Q8_0": BLOCKS_OF_8_BITS,
    "Q4_0": CodeFormat(WeightKind.INT4, 32, torch.float16),
    "Q4_1": CodeFormat(WeightKind.INT4, 32, torch.float16, has_minima=True),
    "Q4_K": CodeFormat(WeightKind.INT4, 32, torch.float32, has_minima=True),
}
"""Blocks as codes; a scale of Q4_K is a product with as many bits as a half and 6 more."""

_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_GGUF_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def fill_from_gguf(header: TensorHeader, target: torch.Tensor) -> None:
    """Write a tensor by its name in a checkpoint, cast, into one of its shape."""
    path, name = header.file, header.name
    file = read_gguf(path)
    names = {_name_of_gguf(stored): stored for stored in file.tensors}
    if header.code_format is not None:
        base, _, part = name.rpartition(".")
        stored = names[f"{base}.weight"]
        with refusing(f"{stored} in {path.name}", "weights"):
            target.copy_(_gguf_codes(path, stored, header.code_format)[part])
        return
    stored = names[name]
    takes_numbers = target.device.type == "cpu" and target.dtype is torch.float32
    with refusing(f"{stored} in {path.name}", "weights"):
        heads = _rotated_heads(file, stored)
        direct = takes_numbers and target.is_contiguous() and not heads
        out = target if direct else torch.empty(target.shape)
        file.read(stored, out.numpy())
        if heads:
            out = _pairs_apart(out, heads)
    if not direct:
        target.copy_(out.to(target.device))


@functools.lru_cache(maxsize=1)
def _gguf_codes(path: Path, stored: str, code_format: CodeFormat) -> dict[str, torch.Tensor]:
    """Return the tensors of `MapCodes` by name, of a map in blocks, rounded if they are others."""
    file = read_gguf(path)
    if _keeps_blocks(file.tensors[stored], code_format):
        blocks = file.codes(stored)
        codes = torch.from_numpy(blocks.values)
        if codes.dtype is torch.uint8:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        found = {"codes": codes, "scales": torch.from_numpy(blocks.scales)}
        if blocks.minima is not None:
            found["minima"] = torch.from_numpy(blocks.minima)
    else:
        rounded = [
            map_codes(torch.from_numpy(each), code_format).tensors() for each in file.chunks(stored)
        ]
        found = {part: torch.cat([each[part] for each in rounded]) for part in rounded[0]}
    if heads := _rotated_heads(file, stored):
        found = {name: _pairs_apart(rows, heads) for name, rows in found.items()}
    return found


def _pairs_apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the two dims of rotated pairs, which are side by side, half a head apart."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _rotated_heads(file: GgufFile, stored: str) -> int:
    """Return the heads of a Llama's queries or keys, whose pairs are side by side, or 0."""
    part = stored.split(".")[-2]
    if file.architecture != "llama" or part not in _GGUF_HEADS:
        return 0
    heads: int = file.size(_GGUF_HEADS[part], file.size("attention.head_count"))
    return heads


@functools.cache
def _name_of_gguf(stored: str) -> str:
    base, _, kind = stored.rpartition(".")
    if base in _GGUF_NAMES:
        return f"{_GGUF_NAMES[base]}.{kind}"
    layer = _GGUF_LAYER.fullmatch(base)
    if layer and layer[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_GGUF_LAYER_NAMES[layer[2]]}.{kind}"
    return stored
