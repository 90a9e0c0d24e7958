"""Loading of checkpoints and of random weights into networks.

A network comes on the meta device, each parameter in the dtype that it runs in. Nothing is
allocated before all tensors are known to fit. Few tensors are mapped at a time, so that the host
holds little more than the weights that stay there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from legato_engine.errors import InvalidField
from legato_engine.models.checkpoint_files import Header, opened
from legato_engine.models.checkpoint_plan import Move, Rename, dtype_name, plan

_MAPPED_BYTES = 16 * 2**20  # of a mapping, unless one tensor is larger
_GIB = 2**30

Progress = Callable[[float], None]
"""Called with the fraction done, which rises to 1."""


def load(
    network: nn.Module,
    headers: Sequence[Header],
    rename: Rename,
    device: torch.device,
    *,
    memory: int | None = None,
    progress: Progress = lambda fraction: None,
) -> None:
    """Fill a network with frozen copies of the tensors.

    Raises:
        InvalidField: the tensors do not fit the network (see `plan`), or the network does not fit
            `memory` bytes (None: unlimited), and the network is unchanged; or a tensor holds a
            number that is not finite.
    """
    moves = plan(network, headers, rename)
    require_memory(network, device, memory)
    meter = Meter(sum(move.header.num_bytes for move in moves), progress)
    for part in _mappings(moves):
        with opened(part[0].header.file) as fill:
            for move in part:
                target = _target(network, move, device)
                fill(move.header.name, target)
                _require_finite(target, move.header)
                meter.add(move.header.num_bytes)
    meter.finish()


def randomise(
    network: nn.Module,
    seed: int,
    device: torch.device,
    scale: Callable[[str, torch.Size], float],
    gains: re.Pattern[str],
    *,
    memory: int | None = None,
    progress: Progress = lambda fraction: None,
) -> None:
    """Fill a network with seeded noise, made on the device (CPU and GPU seeds differ).

    `scale`: standard deviation by name and shape. Tensors that match `gains` have a mean of 1.
    """
    require_memory(network, device, memory)
    generator = torch.Generator(device).manual_seed(seed)
    state: dict[str, torch.Tensor] = network.state_dict()
    meter = Meter(sum(like.nbytes for like in state.values()), progress)
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


class Meter:
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
    """What a stored tensor fills, in the shape and order that it is stored in."""
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


def _require_finite(tensor: torch.Tensor, header: Header) -> None:
    """One pass without a copy; of the 8-bit types only some have what is not finite."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.numel():
        return
    if not torch.isfinite(torch.stack(torch.aminmax(tensor))).all():
        raise InvalidField(
            f"{header.name} in {header.file} holds numbers that are not finite: the file is "
            "damaged, or its numbers are too large for the dtype",
            field="weights",
        )
