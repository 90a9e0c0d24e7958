"""The calibration of a vision tower in e4m3: made from images, kept beside the weights.

The file has each kind of input's means, [L, K] float32, and a `Recipe` in its metadata.

Shape legend: N crops, L blocks, K inputs of a layer.
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch
from safetensors.torch import save_file

from legato_engine.config import Progress
from legato_engine.errors import InvalidField
from legato_engine.layers.fp8 import Centres
from legato_engine.models import checkpoint
from legato_engine.models.moondream.vision import Vision
from legato_engine.models.untrusted import reason, refusing

FILE_NAME = "vision_fp8.safetensors"
_KEY = "legato_vision_fp8"
_VERSION = 1


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first blocks that stay as they are, and the error measured with them.

    `error` is that of embeddings of `images` images, relative to the exact ones, on those that the
    means are not of. `tower` is the SHA-256 of the weights that patches are embedded by, in bf16.
    """

    version: int
    plain_blocks: Annotated[int, msgspec.Meta(ge=0)]
    error: float
    images: int
    tower: str
    legato: str


class Calibration(NamedTuple):
    """A recipe and the mean inputs of every block."""

    recipe: Recipe
    centres: Sequence[Centres]

    def save(self, path: Path) -> None:
        metadata = {_KEY: msgspec.json.encode(self.recipe).decode()}
        save_file(_tensors(self.centres), path, metadata)


def calibrate(
    vision: Vision, images: Sequence[torch.Tensor], limit: float, progress: Progress
) -> Calibration:
    """Measure means on every other image, and on the rest which blocks must stay plain.

    An image is uint8 crops [N, H, W, 3]. Errors of the first blocks weigh most, so these stay: as
    few as keep the error of embeddings within `limit`.

    Raises:
        InvalidField: there is one image only, or fp8 cannot run.
    """
    fitted, held = images[::2], images[1::2]
    if not held:
        problem = f"calibration needs 2 images or more, not {len(images)}"
        raise InvalidField(problem, field="images")
    num_blocks = len(vision.blocks)
    num_trials = num_blocks.bit_length()
    errors: dict[int, float] = {num_blocks: 0.0}

    def embeddings(tower: Vision) -> torch.Tensor:
        features = [tower.encode(crops_NHWC) for crops_NHWC in held]
        return torch.cat([tower.proj_mlp(torch.cat([x, x], -1)).float() for x in features])

    def is_within(plain_blocks: int) -> bool:
        tower = copy.deepcopy(vision)
        tower.use_fp8(plain_blocks, centres)
        errors[plain_blocks] = float((embeddings(tower) - truth).norm() / truth.norm())
        progress(len(errors) / (num_trials + 1))
        return errors[plain_blocks] <= limit

    with torch.inference_mode():
        means = [vision.input_means(crops_NHWC) for crops_NHWC in fitted]
        centres = [
            Centres(*(torch.stack(kind).mean(0) for kind in zip(*block, strict=True)))
            for block in zip(*means, strict=True)
        ]
        truth = embeddings(vision)
        progress(1 / (num_trials + 1))
        plain_blocks = bisect.bisect_left(range(num_blocks), True, key=is_within)
    recipe = Recipe(
        version=_VERSION,
        plain_blocks=plain_blocks,
        error=errors[plain_blocks],
        images=len(images),
        tower=_fingerprint(vision),
        legato=importlib.metadata.version("legato"),
    )
    return Calibration(recipe, centres)


def use_fp8(vision: Vision, folder: Path | None) -> None:
    """Quantise a loaded tower by the calibration in the folder of its weights, if there is one.

    Raises:
        InvalidField: the calibration is not of this tower or version, or fp8 cannot run.
    """
    path = None if folder is None else folder / FILE_NAME
    if path is None or not path.exists():
        vision.use_fp8()
        return
    try:
        with refusing(str(path), "vision_dtype"):
            calibration = _read(path, vision)
    except InvalidField as error:
        raise InvalidField(
            f"{error.message}: use vision_dtype auto, remove the file, or write it anew with "
            "`legato quantize --images`",
            field="vision_dtype",
        ) from None
    device = vision.pos_emb.device
    centres = [Centres(*(each.to(device) for each in block)) for block in calibration.centres]
    vision.use_fp8(calibration.recipe.plain_blocks, centres)


def _read(path: Path, vision: Vision) -> Calibration:
    try:
        recipe = msgspec.json.decode(checkpoint.metadata(path).get(_KEY, ""), type=Recipe)
    except msgspec.MsgspecError as error:
        raise _refused(path, f"has an unknown recipe ({reason(error)})") from None
    if recipe.version != _VERSION:
        raise _refused(path, f"is of version {recipe.version}, not {_VERSION}")
    if recipe.tower != _fingerprint(vision):
        raise _refused(path, "was made for other weights")
    if recipe.plain_blocks > len(vision.blocks):
        problem = f"keeps {recipe.plain_blocks} blocks of {len(vision.blocks)}"
        raise _refused(path, problem)
    headers = {header.name: header for header in checkpoint.headers(path)}
    expected = {name: tensor.shape for name, tensor in _tensors(vision.no_centres()).items()}
    found = {name: header.shape for name, header in headers.items()}
    if found != expected or any(each.dtype != torch.float32 for each in headers.values()):
        raise _refused(path, f"has other tensors than this tower's {', '.join(expected)}")
    tensors = {name: checkpoint.read(headers[name]) for name in expected}
    if wrong := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise _refused(path, f"has a number in {wrong[0]} that is not finite")
    blocks = zip(*tensors.values(), strict=True)
    return Calibration(recipe, [Centres(*block) for block in blocks])


def _tensors(centres: Sequence[Centres]) -> dict[str, torch.Tensor]:
    """Stack each kind of input's means."""
    kinds = zip(*centres, strict=True)
    return {
        name: torch.stack(kind).cpu() for name, kind in zip(Centres._fields, kinds, strict=True)
    }


def _refused(path: Path, problem: str) -> InvalidField:
    return InvalidField(f"{path} {problem}", field="vision_dtype")


def _fingerprint(vision: Vision) -> str:
    weights = vision.patch_emb.weight.detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(weights.view(torch.int16).numpy().tobytes()).hexdigest()
