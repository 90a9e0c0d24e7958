"""Hugging Face checkpoints for decoder networks.

Layers of a `PackedLinear` are stored apart; a tied head may be stored, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from legato_engine.errors import InvalidField
from legato_engine.layers.linear import PackedLinear
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint_files import Header, headers, opened
from legato_engine.models.checkpoint_plan import Destination
from legato_engine.models.decoder.network import DecoderNetwork

_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # in old checkpoints; `Rope` computes it
_HEAD = "lm_head.weight"
_GAINS = re.compile(r"norm\.weight$")


class _Part(NamedTuple):
    """A stored tensor's destination, and the rows that it fills."""

    destination: Destination
    num_rows: int


def load_weights(
    network: DecoderNetwork,
    folder: Path,
    device: torch.device,
    *,
    memory: int | None = None,
    progress: checkpoint.Progress = lambda fraction: None,
) -> DecoderNetwork:
    """Fill a network made on the meta device.

    Raises:
        InvalidField: as `checkpoint.load`, or a stored head differs from tied embeddings.
    """
    parts = _parts(network)
    stored = headers(folder)
    _check_rows(stored, parts)
    if network.config.tied_head:
        _check_tied(stored, network.checkpoint_name("embed_tokens.weight"))

    def rename(name: str) -> str | Destination | None:
        if _DERIVED.search(name) or (name == _HEAD and network.config.tied_head):
            return None
        return parts[name].destination if name in parts else name

    checkpoint.load(network, stored, rename, device, memory=memory, progress=progress)
    return network.eval()


def random_weights(
    network: DecoderNetwork,
    seed: int,
    device: torch.device,
    *,
    memory: int | None = None,
    progress: checkpoint.Progress = lambda fraction: None,
) -> DecoderNetwork:
    checkpoint.randomise(network, seed, device, _scale, _GAINS, memory=memory, progress=progress)
    return network.eval()


def _scale(_name: str, shape: torch.Size) -> float:
    return 1.0 / math.sqrt(shape[1]) if len(shape) == 2 else 0.02


def _parts(network: DecoderNetwork) -> dict[str, _Part]:
    packed = {name: m for name, m in network.named_modules() if isinstance(m, PackedLinear)}
    parts: dict[str, _Part] = {}
    for name, tensor in network.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module not in packed:
            parts[network.checkpoint_name(name)] = _Part(Destination(name), tensor.shape[0])
            continue
        parent, row = module.rpartition(".")[0], 0
        for part, num_rows in packed[module].parts.items():
            stored = network.checkpoint_name(f"{parent}.{part}.{kind}")
            parts[stored] = _Part(Destination(name, row), num_rows)
            row += num_rows
    return parts


def _check_rows(stored: Sequence[Header], parts: dict[str, _Part]) -> None:
    """A part with too many rows would overwrite the next one."""
    for header in stored:
        part = parts.get(header.name)
        if part is None or part.destination.first_row is None:
            continue
        if header.shape[:1] != (part.num_rows,):
            shape = f"shape {list(header.shape)}, expected {part.num_rows} rows"
            raise InvalidField(f"{header.name}: {shape}", field="weights")


def _check_tied(stored: Sequence[Header], embeddings: str) -> None:
    """A stored head must equal the embeddings, because it is not loaded."""
    by_name = {header.name: header for header in stored}
    if _HEAD not in by_name or embeddings not in by_name:
        return
    if not torch.equal(_read(by_name[_HEAD]), _read(by_name[embeddings])):
        raise InvalidField(
            f"{_HEAD} differs from {embeddings}, to which tie_word_embeddings ties it",
            field="weights",
        )


def _read(header: Header) -> torch.Tensor:
    tensor = torch.empty(header.shape, dtype=header.dtype)
    with opened(header.file) as fill:
        fill(header.name, tensor)
    return tensor
