"""Adapter files: safetensors in memory, stacks of layers, and the PEFT format.

A PEFT adapter is a folder of adapter_config.json and adapter_model.safetensors; docs/adapters.md
has the settings. What either file says and is not computed is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors

from legato_engine.errors import AdapterUnusable
from legato_engine.kernels.parameters import LowRankStack
from legato_engine.layers.lora import AdapterWeights, BankSizes

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

MAX_HEADER = 1024 * 1024
"""Bytes of a safetensors file before its values, and of a file of settings."""


class _Header(msgspec.Struct, frozen=True):
    """The part of a safetensors header that is read here."""

    metadata: dict[str, str] | None = msgspec.field(name="__metadata__", default=None)


def read_safetensors(data: bytes, otherwise: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors by name, and the metadata.

    Raises:
        AdapterUnusable: with `otherwise`, what the file is if it is not safetensors.
    """
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER:
        raise AdapterUnusable(
            f"{otherwise}: a header of {length} bytes; at most {MAX_HEADER} are read",
            limit=MAX_HEADER,
            actual=length,
        )
    try:
        tensors = safetensors.load(data)
        header = msgspec.json.decode(data[8 : 8 + length], type=_Header)
    except (SafetensorError, KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise AdapterUnusable(f"{otherwise}: {error}") from None
    return tensors, header.metadata or {}


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be an adapter's, whatever its shape."""
    return tensor.layout is torch.strided and tensor.is_floating_point()


def stacked(
    name: str,
    a_LRI: torch.Tensor,
    b_LRO: torch.Tensor,
    changes: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
) -> LowRankStack:
    """Fill zeros with the A [R, I] and B [O, R] of layers, whose ranks may be lower."""
    for layer, (a_RI, b_OR) in changes.items():
        rank = a_RI.shape[-2]
        a_LRI[layer][..., :rank, :] = a_RI
        b_LRO[layer][..., :rank, :] = b_OR.transpose(-2, -1)
    for part, stack in (("lora_a", a_LRI), ("lora_b", b_LRO)):
        if not torch.isfinite(stack).all():
            raise AdapterUnusable(f"{name}.{part}: not finite in {stack.dtype}")
    return LowRankStack(a_LRI, b_LRO)


# ---------------------------------------------------------------- peft

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_VISION = re.compile(r"\bvisual\b")
_PLAIN = re.compile(r"\^?[A-Za-z0-9_]+(?:\\?\.[A-Za-z0-9_]+)*\$?")
"""A pattern of a rank that names a module, or the end of its name."""

_READ = frozenset(
    ("r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern")
)
_ONLY: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the model
}
_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version"),
        *("inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config"),
        *("exclude_modules", "layers_pattern", "layers_to_transform"),  # tensors say which layers
    )
)
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})
_MAX_REPR = 80  # characters of a refused setting and of its value


_Rank = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class _Settings(msgspec.Struct, frozen=True):
    """The part of adapter_config.json that is computed."""

    r: _Rank
    target_modules: list[str] | str | None = None
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PeftTargets:
    """Weights of a model that take adapters.

    `modules`: layer and map of each of a checkpoint's modules; `sizes`: those of the maps.
    """

    sizes: BankSizes
    modules: Mapping[str, tuple[int, str]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.modules))


def parse_peft(
    data: bytes, settings: bytes, targets: PeftTargets, max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """Parse both files of a PEFT adapter; its factor becomes a part of B.

    Raises:
        AdapterUnusable: a file is broken, does not fit, or asks for what is not computed.
    """
    if not settings:
        problem = f"this model takes PEFT adapters: a folder of {SETTINGS} and {WEIGHTS}"
        raise AdapterUnusable(problem)
    said = _read_settings(settings)
    tensors = read_safetensors(data, f"{WEIGHTS}: no safetensors")[0]
    pairs = _pairs(tensors, targets)
    _check_targets(said.target_modules, tuple(pairs), targets)
    ranks: dict[str, int] = {name: _pattern(said.rank_pattern, name, said.r) for name in pairs}
    rank = max(ranks.values())
    if not 1 <= min(ranks.values()) <= rank <= max_rank:
        refused = rank if rank > max_rank else min(ranks.values())
        problem = f"{SETTINGS}: r is {refused}, this server takes 1 to {max_rank}"
        raise AdapterUnusable(problem, limit=max_rank, actual=refused)
    sizes = targets.sizes
    changes: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {
        part: {} for part in sizes.maps
    }
    for module, (a_RI, b_OR) in pairs.items():
        layer, part = targets.modules[module]
        own, (inputs, outputs) = ranks[module], sizes.maps[part]
        _check_tensor(f"{module}.lora_A", a_RI, (own, inputs))
        _check_tensor(f"{module}.lora_B", b_OR, (outputs, own))
        alpha: float = _pattern(said.alpha_pattern, module, said.lora_alpha)
        factor = alpha / (math.sqrt(own) if said.use_rslora else own)
        changes[part][layer] = a_RI, b_OR.float() * factor

    def empty(width: int) -> torch.Tensor:
        return torch.zeros(sizes.num_layers, rank, width, dtype=dtype)

    return AdapterWeights(
        {
            part: stacked(part, empty(inputs), empty(outputs), changes[part])
            for part, (inputs, outputs) in sizes.maps.items()
        }
    )


def _read_settings(data: bytes) -> _Settings:
    if len(data) > MAX_HEADER:
        problem = f"{SETTINGS} has {len(data)} bytes; at most {MAX_HEADER} bytes are read"
        raise AdapterUnusable(problem, limit=MAX_HEADER, actual=len(data))
    try:
        said = json.loads(data)
        settings = msgspec.convert(said, _Settings)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise AdapterUnusable(f"{SETTINGS}: {error}") from None
    for name, value in said.items():
        if name in _READ or name in _WITHOUT_EFFECT:
            continue
        allowed = _ONLY.get(name, _EMPTY)
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise _refused(name, value, allowed if name in _ONLY else "absent, null or empty")
    for name, alpha in (
        ("lora_alpha", settings.lora_alpha),
        *(settings.alpha_pattern or {}).items(),
    ):
        if not math.isfinite(alpha):
            raise _refused(name, alpha, "a finite number")
    for name in (*(settings.rank_pattern or ()), *(settings.alpha_pattern or ())):
        if not _PLAIN.fullmatch(name):
            raise _refused("rank_pattern or alpha_pattern", name, "names of modules, or their ends")
    return settings


def _refused(name: str, value: object, allowed: object) -> AdapterUnusable:
    told = value if isinstance(value, str) else json.dumps(value)
    if isinstance(allowed, tuple):
        allowed = " or ".join(
            each if isinstance(each, str) else json.dumps(each) for each in allowed
        )
    return AdapterUnusable(
        f"{SETTINGS}: {name[:_MAX_REPR]} is {told[:_MAX_REPR]}; it may be {allowed}"
    )


def _pairs(
    tensors: Mapping[str, torch.Tensor], targets: PeftTargets
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B by module; refuse all other tensors."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[0]):
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in targets.modules:
            raise AdapterUnusable(f"{WEIGHTS}: {name[:200]} {_reason(name, targets)}")
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise AdapterUnusable(f"{WEIGHTS}: it holds no tensors")
    for module, pair in found.items():
        if missing := {"A", "B"} - set(pair):
            raise AdapterUnusable(f"{WEIGHTS}: {module}: lora_{missing.pop()} missing")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _reason(name: str, targets: PeftTargets) -> str:
    if _VISION.search(name):
        return "is of the vision tower, which takes no adapters"
    if "lora_magnitude_vector" in name:
        return "is of DoRA, which is not implemented"
    names, layers = ", ".join(targets.names), targets.sizes.num_layers
    return f"is no lora_A or lora_B of {names} in layers 0 to {layers - 1} of this model"


def _check_targets(
    told: Sequence[str] | None, modules: Sequence[str], targets: PeftTargets
) -> None:
    """Compare names of targets with the tensors; a regular expression is not evaluated."""
    if told is None or isinstance(told, str):
        return
    for each in told:
        if each.rpartition(".")[2] not in targets.names:
            raise _refused("target_modules", each, ", ".join(targets.names))
        if not any(_ends(module, each) for module in modules):
            problem = f"no tensors of {each[:_MAX_REPR]}, which is in target_modules"
            raise AdapterUnusable(f"{WEIGHTS}: {problem}")
    for module in modules:
        if not any(_ends(module, each) for each in told):
            raise AdapterUnusable(f"{WEIGHTS}: {module} is not in target_modules")


def _ends(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: float) -> Any:
    """Return the value of the first pattern of a module."""
    for pattern, value in (patterns or {}).items():
        plain = pattern.removesuffix("$").replace("\\.", ".")
        if module == plain[1:] if plain.startswith("^") else _ends(module, plain):
            return value
    return default


def _check_tensor(name: str, tensor: torch.Tensor, expected: tuple[int, int]) -> None:
    if not is_dense(tensor):
        raise AdapterUnusable(f"{WEIGHTS}: {name} is {tensor.dtype}, not dense floating-point")
    if tuple(tensor.shape) != expected:
        shapes = f"has the shape {list(tensor.shape)}, expected {list(expected)}"
        raise AdapterUnusable(f"{WEIGHTS}: {name} {shapes} by r and this model")
