"""Configurations by name."""

from __future__ import annotations

from msgspec.structs import replace

from legato_engine.models.moondream.config import (
    ARCHITECTURE,
    ARCHITECTURE_3,
    CaptionTemplates,
    MoEConfig,
    MoondreamConfig,
    RefinerConfig,
    RegionConfig,
    SpecialTokens,
    Suppression,
    TauConfig,
    Template,
    Templates,
    TextConfig,
    VisionConfig,
)
from legato_engine.models.text import SamplingDefaults

_TOKENS = SpecialTokens(
    bos=0, eos=0, answer=3, thinking=4, coord=5, size=6, ground_start=7, ground_end=9
)

_VISION = VisionConfig(
    dim=1152,
    ff_dim=4304,
    num_layers=27,
    num_heads=16,
    patch_size=14,
    crop_size=378,
    max_crops=12,
    overlap_margin=4,
    proj_inner_dim=8192,
)
_QUERY = (1, 15381, 2)
_TEMPLATES = Templates(
    caption=CaptionTemplates(
        short=(1, 32708, 2, 12492, 3),
        normal=(1, 32708, 2, 6382, 3),
        long=(1, 32708, 2, 4059, 3),
    ),
    query=Template(prefix=_QUERY, suffix=(3,)),
    query_reasoning=Template(prefix=_QUERY, suffix=(4,)),
    detect=Template(prefix=(1, 7235, 476, 2), suffix=(3,)),
    point=Template(prefix=(1, 2581, 2), suffix=(3,)),
    segment=Template(prefix=(1, 17374, 2), suffix=(3,)),
)
_STAND_IN_QUERY = (1, 134, 2)  # a word of one letter


def moondream2_config() -> MoondreamConfig:
    """Moondream 2 (June 2025): 1.9 billion parameters."""
    return MoondreamConfig(
        architecture=ARCHITECTURE,
        name="moondream2",
        vision=_VISION,
        text=TextConfig(
            dim=2048,
            ff_dim=8192,
            num_layers=24,
            num_heads=32,
            vocab_size=51200,
            max_context=2048,
            rope_theta=10000.0,
            rotary_dim=32,
        ),
        region=RegionConfig(
            coord_features=128, size_features=256, coord_bins=1024, size_bins=1024, inner_dim=8192
        ),
        tokens=_TOKENS,
        templates=replace(
            _TEMPLATES,
            query=Template(prefix=_QUERY, suffix=(3, 3)),
            query_reasoning=Template(prefix=_QUERY, suffix=(3, 4)),
            segment=None,
        ),
        sampling=SamplingDefaults(temperature=0.5, top_p=0.3),
    )


def moondream3_config() -> MoondreamConfig:
    """Moondream 3 preview: 9.3 billion parameters, 2 billion active; a single answer token."""
    second = moondream2_config()
    return replace(
        second,
        architecture=ARCHITECTURE_3,
        name="moondream3",
        text=replace(
            second.text,
            max_context=32768,
            rope_theta=1_500_000.0,
            tau=TauConfig(),
            moe=MoEConfig(first_layer=4, num_experts=64, num_active=8, inner_dim=1024),
        ),
        region=replace(second.region, inner_dim=None),
        templates=_TEMPLATES,
        suppression=Suppression(),
        refiner=RefinerConfig(early_block=8),
        sampling=SamplingDefaults(temperature=0.5, top_p=0.9),
    )


def moondream3_1_config() -> MoondreamConfig:
    return replace(moondream3_config(), name="moondream3.1")


def legato_tiny_config() -> MoondreamConfig:
    """Return the sizes of legato-tiny with stand-in templates, for random weights."""
    return MoondreamConfig(
        architecture=ARCHITECTURE,
        name="legato-tiny",
        vision=VisionConfig(
            dim=320,
            ff_dim=960,
            num_layers=8,
            num_heads=5,
            patch_size=14,
            crop_size=336,
            max_crops=1,
            overlap_margin=4,
            proj_inner_dim=960,
        ),
        text=TextConfig(
            dim=320,
            ff_dim=960,
            num_layers=6,
            num_heads=5,
            vocab_size=1536,
            max_context=1024,
            rope_theta=10000.0,
            rotary_dim=32,
        ),
        region=RegionConfig(
            coord_features=128, size_features=256, coord_bins=1024, size_bins=1024, inner_dim=320
        ),
        tokens=_TOKENS,
        templates=_stand_in_templates(),
    )


def tiny_random_config() -> MoondreamConfig:
    """Return a tiny model for tests: every skill, several crops, two answer ids."""
    return MoondreamConfig(
        architecture=ARCHITECTURE,
        name="random-tiny",
        vision=VisionConfig(
            dim=48,
            ff_dim=80,
            num_layers=2,
            num_heads=3,
            patch_size=14,
            crop_size=56,
            max_crops=4,
            overlap_margin=1,
            proj_inner_dim=96,
        ),
        text=TextConfig(
            dim=64,
            ff_dim=128,
            num_layers=2,
            num_heads=2,
            vocab_size=300,
            max_context=256,
            rope_theta=10000.0,
            rotary_dim=16,
        ),
        region=RegionConfig(
            coord_features=16, size_features=32, coord_bins=1024, size_bins=1024, inner_dim=48
        ),
        tokens=_TOKENS,
        templates=_stand_in_templates(),
    )


def tiny_random3_config() -> MoondreamConfig:
    tiny = tiny_random_config()
    return replace(
        tiny,
        architecture=ARCHITECTURE_3,
        name="random-tiny3",
        text=replace(
            tiny.text,
            num_layers=3,
            rope_theta=1_500_000.0,
            tau=TauConfig(),
            moe=MoEConfig(first_layer=1, num_experts=6, num_active=2, inner_dim=32),
        ),
        region=replace(tiny.region, inner_dim=None),
        suppression=Suppression(),
        refiner=RefinerConfig(early_block=0),
        templates=replace(
            tiny.templates,
            query=Template(prefix=_STAND_IN_QUERY, suffix=(3,)),
            query_reasoning=Template(prefix=_STAND_IN_QUERY, suffix=(4,)),
        ),
    )


def _stand_in_templates() -> Templates:
    return Templates(
        caption=CaptionTemplates(
            short=(1, 120, 2, 136, 3), normal=(1, 120, 2, 131, 3), long=(1, 120, 2, 129, 3)
        ),
        query=Template(prefix=_STAND_IN_QUERY, suffix=(3, 3)),
        query_reasoning=Template(prefix=_STAND_IN_QUERY, suffix=(3, 4)),
        detect=Template(prefix=(1, 121, 2), suffix=(3,)),
        point=Template(prefix=(1, 133, 2), suffix=(3,)),
        segment=Template(prefix=(1, 137, 2), suffix=(3,)),
    )
