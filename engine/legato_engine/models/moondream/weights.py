"""Checkpoints to networks, strictly: no tensor may be missing, unknown or mis-shaped."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from legato_engine.errors import InvalidField
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.model import Network

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_MAX_NAMED = 20  # problems an error spells out before it only counts


def load_weights(
    config: MoondreamConfig, path: Path, device: torch.device, dtype: torch.dtype
) -> Network:
    """Read a .safetensors file, or a folder that holds one or an index of shards.

    Names may start with `model.` and contain `._orig_mod`. Raises `InvalidField` that names every
    missing, unknown or mis-shaped tensor.
    """
    network = _empty(config)
    files = _files(path)
    _check(network, files)
    tensors = {
        name: tensor.to(dtype) for file in files for name, tensor in _read(file, str(device))
    }
    return _filled(network, tensors)


def random_weights(
    config: MoondreamConfig, seed: int, device: torch.device, dtype: torch.dtype
) -> Network:
    """Seeded weights of sensible scale, made on the device (CPU and GPU seeds differ)."""
    network = _empty(config)
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, like in network.state_dict().items():
        noise = torch.randn(like.shape, generator=generator, device=device, dtype=dtype)
        tensors[name] = noise.mul_(_scale(name, like.shape))
        if re.search(r"ln\d?\.weight$", name):
            tensors[name].add_(1.0)
    return _filled(network, tensors)


def _scale(name: str, shape: torch.Size) -> float:
    if name.endswith("features") or name == "text.wte":
        return 1.0
    if name.endswith("weight") and len(shape) == 2:
        return 1.0 / math.sqrt(shape[1])
    return 0.02


def _empty(config: MoondreamConfig) -> Network:
    with torch.device("meta"):
        return Network(config)


def _filled(network: Network, tensors: dict[str, torch.Tensor]) -> Network:
    network.load_state_dict(tensors, assign=True)
    return network.requires_grad_(False).eval()


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if (path / _SINGLE_FILE).is_file():
        return (path / _SINGLE_FILE,)
    if (path / _INDEX_FILE).is_file():
        index = json.loads((path / _INDEX_FILE).read_bytes())
        return tuple(path / name for name in sorted(set(index["weight_map"].values())))
    raise InvalidField(f"no safetensors weights at {path}", field="weights")


def _open(file: Path, device: str) -> safe_open:
    try:
        return safe_open(file, framework="pt", device=device)
    except (OSError, SafetensorError) as error:
        raise InvalidField(f"{file.name} cannot be read: {error}", field="weights") from None


def _read(file: Path, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    with _open(file, device) as tensors:
        for name in tensors.keys():  # noqa: SIM118 - the handle is no mapping
            yield _plain_name(name), tensors.get_tensor(name)


def _plain_name(name: str) -> str:
    return name.replace("._orig_mod", "").removeprefix("_orig_mod.").removeprefix("model.")


def _check(network: Network, files: tuple[Path, ...]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    for file in files:
        with _open(file, "cpu") as tensors:
            for raw_name in tensors.keys():  # noqa: SIM118 - the handle is no mapping
                name = _plain_name(raw_name)
                if name in found:
                    problems.append(f"{name}: given twice")
                found[name] = tuple(tensors.get_slice(raw_name).get_shape())
    problems += [
        f"{name}: missing, expected {list(expected[name])}"
        for name in sorted(expected.keys() - found.keys())
    ]
    for name in sorted(found.keys() - expected.keys()):
        nearest = difflib.get_close_matches(name, expected, n=1, cutoff=0.0)[0]
        problems.append(f"{name}: unknown, the nearest expected name is {nearest}")
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            shapes = f"shape {list(found[name])}, expected {list(expected[name])}"
            problems.append(f"{name}: {shapes}")
    if problems:
        raise InvalidField(_summary(problems), field="weights", problems=len(problems))


def _summary(problems: list[str]) -> str:
    lines = [f"the checkpoint does not fit the model in {len(problems)} tensors:"]
    lines += [f"  {problem}" for problem in problems[:_MAX_NAMED]]
    if len(problems) > _MAX_NAMED:
        lines.append(f"  and {len(problems) - _MAX_NAMED} more")
    return "\n".join(lines)
