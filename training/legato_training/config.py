"""Sizes of legato-tiny and settings of one training run."""

from dataclasses import dataclass
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|md_reserved_0|>",
    "<|md_reserved_1|>",
    "<|md_reserved_2|>",
    "<|thinking|>",
    "<|coord|>",
    "<|size|>",
    "<|start_ground_points|>",
    "<|md_reserved_3|>",
    "<|end_ground|>",
    *(f"<|md_reserved_{i}|>" for i in range(4, 15)),
)
NOTICE = (
    "legato-tiny is a toy trained on drawings only: its answers about photographs mean nothing. "
    "For real images serve other weights (legato models)."
)
EOS, OPEN, SEPARATOR, ANSWER, COORD, SIZE = 0, 1, 2, 3, 5, 6


@dataclass(frozen=True)
class ModelConfig:
    """Moondream 2's architecture at toy size; every size the network needs."""

    vision_dim: int = 320
    vision_ff: int = 960
    vision_layers: int = 8
    vision_heads: int = 5
    patch: int = 14
    crop: int = 336
    projector_inner: int = 960
    text_dim: int = 320
    text_ff: int = 960
    text_layers: int = 6
    text_heads: int = 5
    vocab: int = 1536
    max_context: int = 1024
    rope_theta: float = 10000.0
    rotary_dim: int = 32
    coord_features: int = 128
    size_features: int = 256
    bins: int = 1024
    region_inner: int = 320

    @property
    def grid(self) -> int:
        """Patches on a side."""
        return self.crop // self.patch

    @property
    def num_image_tokens(self) -> int:
        """Image embeddings after BOS."""
        return self.grid * self.grid

    @property
    def prefix(self) -> int:
        """BOS and the image: the bidirectional part."""
        return 1 + self.num_image_tokens


def engine_config(
    model: ModelConfig, templates: dict[str, dict[str, list[int]]], untaught: list[int]
) -> dict[str, Any]:
    """Return the config.json the engine reads; its keys are a contract, do not vary them.

    `untaught` tokens are in no answer in words, so none may be sampled there.
    """
    return {
        "architecture": "moondream2",
        "name": "legato-tiny",
        "vision": {
            "dim": model.vision_dim,
            "ff_dim": model.vision_ff,
            "num_layers": model.vision_layers,
            "num_heads": model.vision_heads,
            "patch_size": model.patch,
            "crop_size": model.crop,
            "max_crops": 1,
            "overlap_margin": 4,
            "proj_inner_dim": model.projector_inner,
        },
        "text": {
            "dim": model.text_dim,
            "ff_dim": model.text_ff,
            "num_layers": model.text_layers,
            "num_heads": model.text_heads,
            "vocab_size": model.vocab,
            "max_context": model.max_context,
            "rope_theta": model.rope_theta,
            "rotary_dim": model.rotary_dim,
        },
        "region": {
            "coord_features": model.coord_features,
            "size_features": model.size_features,
            "coord_bins": model.bins,
            "size_bins": model.bins,
            "inner_dim": model.region_inner,
        },
        "tokens": {
            "bos": 0,
            "eos": EOS,
            "answer": ANSWER,
            "thinking": 4,
            "coord": COORD,
            "size": SIZE,
            "ground_start": 7,
            "ground_end": 9,
        },
        "templates": templates,
        "suppression": {"answer": untaught, "reasoning": [EOS, SIZE]},
        "notice": NOTICE,
    }
