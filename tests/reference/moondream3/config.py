"""Sizes, special ids and switches of Moondream 3, each a frozen dataclass."""

from dataclasses import dataclass, field, replace
from typing import Literal

Length = Literal["short", "normal", "long"]


@dataclass(frozen=True)
class VisionConfig:
    """The encoder of crops, and how an image is cut into them."""

    width: int = 1152
    layers: int = 27
    heads: int = 16
    inner: int = 4304
    projection_inner: int = 8192
    patch: int = 14  # pixels a side
    grid: int = 27  # patches a side of a crop, and of what pooling leaves
    margin: int = 4  # patches a side that neighbouring crops share with this one
    max_crops: int = 12  # without the one of the whole picture

    @property
    def crop(self) -> int:
        """Side of a crop in pixels."""
        return self.grid * self.patch

    @property
    def window(self) -> int:
        """Distance of neighbouring crops in pixels."""
        return (self.grid - 2 * self.margin) * self.patch

    @property
    def overlap(self) -> int:
        """What both margins of a crop take together, in pixels."""
        return 2 * self.margin * self.patch

    @property
    def tokens(self) -> int:
        """Embeddings of an image."""
        return self.grid * self.grid


@dataclass(frozen=True)
class TextConfig:
    """The decoder: layers below `dense_layers` have one MLP, the others experts."""

    vocab: int = 51200
    layers: int = 24
    dense_layers: int = 4
    heads: int = 32
    head_dim: int = 64
    rotary_dim: int = 32  # of a head's dims, those that are rotated: the first ones
    theta: float = 1_500_000.0
    inner: int = 8192
    experts: int = 64
    experts_per_token: int = 8
    expert_inner: int = 1024

    @property
    def width(self) -> int:
        """Width of the residual stream: all heads side by side."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class RegionConfig:
    """Coordinates and sizes: frequencies on the way in, bins on the way out."""

    coord_frequencies: int = 128
    size_frequencies: int = 256
    coord_bins: int = 1024
    size_bins: int = 1024  # for the width, and as many for the height


@dataclass(frozen=True)
class TokenIds:
    """The ids with a meaning, and those that the templates spell."""

    bos: int = 0
    eos: int = 0
    open: int = 1
    separator: int = 2
    answer: int = 3
    thinking: int = 4
    coord: int = 5
    size: int = 6
    ground_start: int = 7
    ground_end: int = 9
    last_special: int = 20
    describe: tuple[int, ...] = (32708,)
    short: tuple[int, ...] = (12492,)
    normal: tuple[int, ...] = (6382,)
    long: tuple[int, ...] = (4059,)
    query: tuple[int, ...] = (15381,)
    detect: tuple[int, ...] = (7235, 476)
    point: tuple[int, ...] = (2581,)
    segment: tuple[int, ...] = (17374,)


@dataclass(frozen=True)
class Switches:
    """Points on which sources differ; README.md gives the sources and reasons for the defaults."""

    tau_gelu: Literal["tanh", "erf"] = "tanh"
    tau_position: Literal["exact", "bfloat16_gain", "bfloat16_position"] = "exact"
    coord_divisor: Literal["bins", "bins_minus_one"] = "bins"
    round_values: bool = False  # coordinates and sizes to bfloat16, as returned and as fed back
    fourier: Literal["exact", "bfloat16"] = "exact"
    pixels: Literal["exact", "bfloat16"] = "exact"
    region_norm: bool = True
    region_hidden: Literal["raw", "post_ln"] = "raw"
    boundary: Literal["restricted", "eos_only"] = "restricted"
    clamp_boxes: bool = True
    spatial_answers: bool = True  # coord and size ids stand for values in captions and answers too
    reasoning_budget: Literal["shared", "each"] = "shared"


@dataclass(frozen=True)
class Config:
    """A whole model."""

    vision: VisionConfig = field(default_factory=VisionConfig)
    text: TextConfig = field(default_factory=TextConfig)
    region: RegionConfig = field(default_factory=RegionConfig)
    ids: TokenIds = field(default_factory=TokenIds)
    switches: Switches = field(default_factory=Switches)

    @property
    def image_prefix(self) -> int:
        """Positions that attend both ways if there is an image: BOS and its embeddings."""
        return 1 + self.vision.tokens

    def switched(self, **switches: object) -> "Config":
        """The same sizes with other switches.

        Raises:
            TypeError: no such switch.
        """
        return replace(self, switches=replace(self.switches, **switches))  # type: ignore[arg-type]  # typed by the dataclass


def full() -> Config:
    """The published sizes."""
    return Config()


def thin() -> Config:
    """Small sizes with published crops: 378 pixels, 27 x 27 patches, 729 embeddings."""
    sizes = small()
    full_vision = VisionConfig()
    vision = replace(
        sizes.vision, patch=full_vision.patch, grid=full_vision.grid, margin=full_vision.margin
    )
    return replace(sizes, vision=vision)


def small() -> Config:
    """Tiny sizes in which every part has an effect."""
    return Config(
        vision=VisionConfig(
            width=24,
            layers=2,
            heads=3,
            inner=40,
            projection_inner=48,
            patch=4,
            grid=7,
            margin=1,
        ),
        text=TextConfig(
            vocab=128,
            layers=5,
            dense_layers=2,
            heads=4,
            head_dim=16,
            rotary_dim=8,
            theta=100.0,
            inner=96,
            experts=8,
            experts_per_token=3,
            expert_inner=24,
        ),
        region=RegionConfig(coord_frequencies=8, size_frequencies=12, coord_bins=64, size_bins=32),
        ids=TokenIds(
            describe=(30,),
            short=(31,),
            normal=(32,),
            long=(33,),
            query=(34,),
            detect=(35, 36),
            point=(37,),
            segment=(38,),
        ),
    )
