"""The reference's modules from a checkout, without their downloads and device detection."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import legato_tiny
import msgspec
import numpy as np
import tokenizers
import torch
from legato_engine.models.moondream import presets
from legato_engine.models.moondream.config import MoondreamConfig, Template
from legato_engine.models.moondream.weights import random_weights
from PIL import Image
from safetensors.torch import save_file

GRID = 27  # patches on a side; the reference takes its number of vision layers for it


class Checkout:
    """Builds models of one dtype, and loads checkpoints as the reference does.

    The modules are the interpreter's: they hold the replacements of the newest checkout.
    """

    def __init__(self, folder: str, dtype: torch.dtype, device: torch.device) -> None:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        self.dtype = dtype
        self.device = device
        self._module = _module("moondream")
        self._cropping = _module("image_crops")
        self._weights = _module("weights")
        vars(self._cropping).update(HAS_VIPS=False, Image=Image)
        vars(self._module).update(Tokenizer=_LocalTokenizer, prepare_crops=self.prepare_crops)

    def watch(self, embedder: str, home: str, saw: Callable[[torch.Tensor], None]) -> None:
        """Pass what the model gives to an embedder of the module `home` to `saw`, too."""
        original = getattr(_module(home), embedder)

        def embed(values: torch.Tensor, weights: Any) -> Any:
            saw(values)
            return original(values, weights)

        vars(self._module)[embedder] = embed

    def build(self, config: MoondreamConfig) -> Any:
        """Build the reference's model without weights."""
        configs = _module("config")
        vision, text, region = config.vision, config.text, config.region
        model = self._module.MoondreamModel(
            configs.MoondreamConfig(
                text=configs.TextConfig(
                    dim=text.dim,
                    ff_dim=text.ff_dim,
                    n_layers=text.num_layers,
                    n_heads=text.num_heads,
                    n_kv_heads=text.num_heads,
                ),
                vision=configs.VisionConfig(
                    enc_dim=vision.dim,
                    enc_ff_dim=vision.ff_dim,
                    enc_n_layers=GRID,
                    enc_n_heads=vision.num_heads,
                    proj_out_dim=text.dim,
                    proj_inner_dim=vision.proj_inner_dim,
                ),
                region=configs.RegionConfig(dim=text.dim, inner_dim=region.inner_dim),
            ),
            dtype=self.dtype,
        )
        model.vision["blocks"] = model.vision["blocks"][: vision.num_layers]
        return model.to(self.device).eval()

    def load(self, model: Any, folder: Path) -> None:
        """Read a checkpoint and its tokenizer.

        Raises:
            AssertionError: A tensor was not loaded.
        """
        model.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        file = str(folder / "model.safetensors")
        self._weights.load_weights_into_model(file, model)
        with self._weights.safetensors_open(file) as stored:
            for name, tensor in model.state_dict().items():
                if not name.endswith("_cache"):
                    held = stored(f"model.{name}").to(self.dtype).to(self.device)
                    assert torch.equal(tensor, held), f"the reference has another {name}"

    def prepare_crops(
        self, image: Image.Image, config: Any, device: object
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return crops [N, C, H, W] in the model's dtype, -1..1, and their tiling."""
        pixels = np.asarray(image.convert("RGB"))
        cut = self._cropping.overlap_crop_image(
            pixels, max_crops=config.max_crops, overlap_margin=config.overlap_margin
        )
        levels = torch.from_numpy(cut["crops"]).permute(0, 3, 1, 2)
        values = levels.to(self.dtype).div_(255.0).sub_(0.5).div_(0.5)
        return values.to(self.device), cut["tiling"]


def _module(name: str) -> Any:
    return importlib.import_module(f"moondream.torch.{name}")


class _LocalTokenizer:
    """Replaces a downloaded tokenizer, until `load` sets the checkpoint's."""

    @classmethod
    def from_pretrained(cls, name: str) -> None:
        """Return the tokenizer without reading anything."""


# ---------------------------------------------------------------- weights
# Moondream 2 in two widths with random weights, as a checkpoint that both sides load.
#
# Random heads never end a text and never continue a list. So the head's bias raises the tokens that
# advance a skill, differently for each family of skills; every other weight is the same.
#
# Random attention is nearly even, and the mean of an image's 729 positions then drowns the prompt:
# every prompt gets the same answer, which repeats one token. Longer queries and keys make attention
# choose, and longer outputs of blocks and images do the same.


CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Skills that share a head. `bias` by token id; `num_answers`: ids that open an answer.

    The best of 51200 random logits of deviation 1 is about 4.3: a bias of 2.6 lets a token win one
    step in twenty.
    """

    name: str
    bias: Mapping[int, float]
    num_answers: int = 2


EOS, ANSWER, COORD, SIZE, GROUND_START, GROUND_END = 0, 3, 5, 6, 7, 9
_THINKING = {EOS: 3.0, ANSWER: 3.4, COORD: 2.8, SIZE: 2.0, GROUND_START: 2.4, GROUND_END: 2.4}
FAMILIES = (
    Family("text", {EOS: 3.0, ANSWER: 2.0}),
    Family("reasoning", _THINKING),
    Family("reasoning, one answer id", _THINKING, num_answers=1),
    Family("spatial", {COORD: 8.0, EOS: 7.0}),
)


_QUERY_KEY, _ADDED, _PICTURE = 2.5, 2.0, 3.0


def _sharpen(name: str, tensor: torch.Tensor) -> None:
    """Scale weights in place, so that answers depend on prompt, image and position."""
    if name.endswith("attn.qkv.weight"):
        tensor[: tensor.shape[0] // 3 * 2] *= _QUERY_KEY
    elif name.startswith("text.blocks") and name.endswith("mlp.fc2.weight"):
        tensor *= _ADDED
    elif name in ("vision.proj_mlp.fc2.weight", "vision.pos_emb"):
        tensor *= _PICTURE


def make_config(
    shape: str, vision_layers: int, text_layers: int, family: Family
) -> MoondreamConfig:
    """Return Moondream 2's templates, vocabulary, context and image sizes, `tiny` or `full`.

    Heads of the decoder are 64 wide and images are 27 by 27 patches in both: the reference has
    these as constants.
    """
    config = presets.moondream2_config()
    replace = msgspec.structs.replace
    vision, text, region = config.vision, config.text, config.region
    if shape == "tiny":
        vision = replace(vision, dim=48, ff_dim=80, num_heads=3, proj_inner_dim=96)
        text = replace(text, dim=128, ff_dim=256, num_heads=2)
        region = replace(region, inner_dim=96)
    query = Template(prefix=(1, 15381, 2), suffix=(ANSWER,) * family.num_answers)
    return replace(
        config,
        vision=replace(vision, num_layers=vision_layers),
        text=replace(text, num_layers=text_layers),
        region=region,
        templates=replace(config.templates, query=query),
    )


def write_checkpoint(config: MoondreamConfig, family: Family, seed: int, folder: Path) -> Path:
    """Write a folder of config.json, tokenizer.json and model.safetensors in bfloat16."""
    folder.mkdir(parents=True)
    state = random_weights(config, seed, CPU, torch.float32).state_dict()
    for name, tensor in state.items():
        _sharpen(name, tensor)
    for token, lift in family.bias.items():
        state["text.lm_head.bias"][token] += lift
    stored = {f"model.{name}": tensor.bfloat16() for name, tensor in state.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    shutil.copy(legato_tiny.path() / "tokenizer.json", folder / "tokenizer.json")
    return folder
