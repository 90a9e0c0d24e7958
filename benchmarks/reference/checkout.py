"""The reference's modules from a checkout, without their downloads and device detection."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from legato_engine.models.moondream.config import MoondreamConfig
from PIL import Image

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
