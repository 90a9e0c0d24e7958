"""Configurations known by name."""

from __future__ import annotations

from legato_engine.models.budget import SamplingDefaults
from legato_engine.models.moondream.config import (
    ARCHITECTURE,
    CaptionTemplates,
    MoondreamConfig,
    RegionConfig,
    SpecialTokens,
    Template,
    Templates,
    TextConfig,
    VisionConfig,
)

_TOKENS = SpecialTokens(
    bos=0, eos=0, answer=3, thinking=4, coord=5, size=6, ground_start=7, ground_end=9
)


def moondream2_config() -> MoondreamConfig:
    """Moondream 2 (June 2025): 1.9 billion parameters, no segment skill."""
    query = (1, 15381, 2)
    return MoondreamConfig(
        architecture=ARCHITECTURE,
        name="moondream2",
        vision=VisionConfig(
            dim=1152,
            ff_dim=4304,
            num_layers=27,
            num_heads=16,
            patch_size=14,
            crop_size=378,
            max_crops=12,
            overlap_margin=4,
            proj_inner_dim=8192,
        ),
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
        templates=Templates(
            caption=CaptionTemplates(
                short=(1, 32708, 2, 12492, 3),
                normal=(1, 32708, 2, 6382, 3),
                long=(1, 32708, 2, 4059, 3),
            ),
            query=Template(prefix=query, suffix=(3, 3)),
            query_reasoning=Template(prefix=query, suffix=(3, 4)),
            detect=Template(prefix=(1, 7235, 476, 2), suffix=(3,)),
            point=Template(prefix=(1, 2581, 2), suffix=(3,)),
        ),
        sampling=SamplingDefaults(temperature=0.5, top_p=0.3),
    )


def legato_tiny_config() -> MoondreamConfig:
    """The sizes of legato-tiny with made-up template words, for random weights only."""
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
    """A model of milliseconds for tests: every skill, several crops, reasoning, doubled answer."""
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


def _stand_in_templates() -> Templates:
    """Templates whose words are single letters of the stand-in tokenizer."""
    query = (1, 134, 2)
    return Templates(
        caption=CaptionTemplates(
            short=(1, 120, 2, 136, 3), normal=(1, 120, 2, 131, 3), long=(1, 120, 2, 129, 3)
        ),
        query=Template(prefix=query, suffix=(3, 3)),
        query_reasoning=Template(prefix=query, suffix=(3, 4)),
        detect=Template(prefix=(1, 121, 2), suffix=(3,)),
        point=Template(prefix=(1, 133, 2), suffix=(3,)),
        segment=Template(prefix=(1, 137, 2), suffix=(3,)),
    )
