"""Captured steps of whole small models, on the emulated machine.

The tests are those on a GPU (tests/gpu/test_kernels.py, test_adapter_kernels.py). Launches run one
after the other, so how kernels overlap is not seen here.
"""

from __future__ import annotations

import functools
import itertools

import msgspec
import pytest
from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.models.moondream.config import (
    ARCHITECTURE_3,
    Gelu,
    MoEConfig,
    MoondreamConfig,
    TauConfig,
)
from legato_engine.models.moondream.presets import legato_tiny_config

from tests.emulator.module import CPU
from tests.gpu import test_adapters, test_kernels
from tests.gpu.test_adapters import Adapted
from tests.gpu.test_kernels import World, shallow, world_of

SMALL = {"dim": 128, "ff_dim": 256, "num_heads": 2, "vocab_size": 256, "max_context": 64}
PARTS = SMALL | {"dim": 256, "ff_dim": 3840, "num_heads": 4}
"""The inputs of a layer's output map are cut; heads' output and inner activations share a part."""
LAPS = PARTS | {"ff_dim": 9984}
"""A part has more chunks of inputs than their ring has stages."""
WIDE = SMALL | {"dim": 2048, "ff_dim": 8192, "num_heads": 32}
"""Those of Moondream 3."""
RUNS = SMALL | {"dim": 1280, "num_heads": 20}
"""Stages of packed experts have several runs of inputs, and the heads' map several stages."""
MAX_RANKS = (8, 512)
"""Of banks of adapters: by dot products, and by tensor cores."""


def plain(text: dict[str, int]) -> MoondreamConfig:
    """Two layers of Moondream 2's kind."""
    return shallow(legato_tiny_config(), num_layers=2, **text)


def routed(
    text: dict[str, int], gelu: Gelu = Gelu.EXACT, *, active: int = 3, inner_dim: int = 64
) -> MoondreamConfig:
    """Of Moondream 3's: gains, and experts in the last layer."""
    tau = TauConfig(gelu=gelu)
    moe = MoEConfig(first_layer=1, num_experts=16, num_active=active, inner_dim=inner_dim)
    config = shallow(legato_tiny_config(), num_layers=2, **text, tau=tau, moe=moe)
    region = msgspec.structs.replace(config.region, inner_dim=None, coord_reaches_one=True)
    return msgspec.structs.replace(config, architecture=ARCHITECTURE_3, region=region)


CONFIGS = {
    "plain": plain(SMALL),
    "plain-parts": plain(PARTS),
    "plain-laps": plain(LAPS),
    "routed": routed(SMALL),
    "routed-e4m3": routed(SMALL, Gelu.TANH),
    "routed-kv8": routed(SMALL),
    "routed-parts": routed(PARTS),
    "routed-runs": routed(RUNS, Gelu.TANH, inner_dim=640),
}


SOON = {("plain", 5), ("plain-parts", 13), ("plain-laps", 5), ("routed", 5)}
MORE = sorted({*itertools.product(CONFIGS, (5, 13, 32))} - SOON)
WIDEST = routed(WIDE, Gelu.TANH, active=8, inner_dim=1024)


@functools.cache
def world(name: str) -> World:
    return world_of(CONFIGS[name], CPU, e4m3="e4m3" in name, kv8=name.endswith("kv8"))


@functools.cache
def with_adapters(name: str, max_rank: int) -> Adapted:
    return test_adapters.with_adapters(world(name), max_rank)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *sorted(SOON),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE),
    ],
)
def test_a_step_is_as_exact_as_torch(name: str, batch: int) -> None:
    """Against float32 the kernels err no more than 1.2 times what torch errs in bf16."""
    test_kernels.a_step_is_as_exact_as_torch(world(name), batch)


@pytest.mark.usefixtures("portable_gpu")
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("plain-parts", 13),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("plain", 5), ("routed", 5), ("routed-e4m3", 13), ("routed-kv8", 32))
        ),
    ],
)
def test_a_step_without_hoppers_features_is_as_exact_as_torch(name: str, batch: int) -> None:
    """By copies of 16 bytes, without clusters; tokens at a tile's end have their own bits."""
    config = CONFIGS[name]
    if config.text.moe is None:
        config = shallow(config, num_layers=1)  # another one has the same kernels
    portable = world_of(config, CPU, e4m3="e4m3" in name, kv8=name.endswith("kv8"))
    test_kernels.a_step_is_as_exact_as_torch(portable, batch)
    test_kernels.a_row_has_the_same_bits_in_any_batch(portable, (9,), rows=(7, 8))


@pytest.mark.usefixtures("portable_gpu")
@pytest.mark.parametrize(
    "batch", [9, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (5, 32))]
)
def test_inputs_in_two_rounds_are_as_exact_as_torch(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """The first half of all inputs in registers; the token of a second tile has its own bits."""
    monkeypatch.setattr(skinny_gemm, "held_rounds", lambda inputs, *_: 1 + (inputs > 512))
    config = plain(SMALL | {"dim": 576, "num_heads": 9})
    halved = world_of(shallow(config, num_layers=1), CPU)
    test_kernels.a_step_is_as_exact_as_torch(halved, batch)
    test_kernels.a_row_has_the_same_bits_in_any_batch(halved, (9,), rows=(8,))


@pytest.mark.parametrize(
    ("name", "weights", "batch"),
    [
        ("plain", "fp8", 5),
        ("plain-parts", "int4", 9),
        ("routed", "int8", 13),
        ("routed-runs", "int4", 3),
        *(
            pytest.param(name, weights, batch, marks=pytest.mark.slow)
            for name, weights, batch in (
                ("plain", "int8", 5),
                ("plain-parts", "fp8", 13),
                ("plain-parts", "int8", 5),
                ("plain", "int4", 32),
                ("routed", "fp8", 5),
                ("routed", "int4", 32),
                ("routed-runs", "fp8", 13),
            )
        ),
    ],
)
def test_a_step_of_quantised_weights_is_as_exact_as_torch(
    name: str, weights: str, batch: int
) -> None:
    """Against the quantised weights in float32, keys and values in e4m3 beside them."""
    quantised = world_of(CONFIGS[name], CPU, kv8=weights != "int8", weights=weights)
    test_kernels.a_step_is_as_exact_as_torch(quantised, batch)
    test_kernels.a_row_has_the_same_bits_in_any_batch(quantised, (batch,), rows=(batch - 1,))


@pytest.mark.usefixtures("portable_gpu")
@pytest.mark.parametrize("weights", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_packed_experts_without_hoppers_features_are_as_exact_as_torch(weights: str) -> None:
    """Those of int4 with adapters too, of rows with one and without."""
    portable = world_of(CONFIGS["routed"], CPU, weights=weights)
    test_kernels.a_step_is_as_exact_as_torch(portable, 5)
    adapted = test_adapters.with_adapters(portable, 8)
    test_adapters.a_step_with_adapters_is_as_exact_as_torch(adapted, slice(0, 5))
    test_adapters.a_row_has_the_same_bits_whatever_is_beside_it(adapted, (5,))


@pytest.mark.parametrize(
    ("name", "batch", "max_rank"),
    [
        ("plain", 13, 72),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product(CONFIGS, (5, 13, 32), MAX_RANKS)
        ),
    ],
)
def test_a_step_with_adapters_is_as_exact_as_torch(name: str, batch: int, max_rank: int) -> None:
    """Of rows with an adapter and without."""
    adapted = with_adapters(name, max_rank)
    slots = adapted.slot_R[adapted.world.inputs().row_B[:batch]].tolist()
    assert 0 in slots
    assert {*slots} == set(range(len(adapted.bank.rank_S))) or batch < 32
    test_adapters.a_step_with_adapters_is_as_exact_as_torch(adapted, slice(0, batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    """A token's results are those that it has alone."""
    test_kernels.a_row_has_the_same_bits_in_any_batch(world(name), (2, 5, 9, 17))


@pytest.mark.parametrize(
    ("name", "max_rank", "batches"),
    [
        ("plain", 72, (5,)),
        *(
            pytest.param(*each, (2, 5, 9, 17), marks=pytest.mark.slow)
            for each in itertools.product(CONFIGS, MAX_RANKS)
        ),
    ],
)
def test_a_row_has_the_same_bits_whatever_adapters_are_beside_it(
    name: str, max_rank: int, batches: tuple[int, ...]
) -> None:
    """Alone, in any batch, and without an adapter as in a step without adapters."""
    adapted = with_adapters(name, max_rank)
    test_adapters.a_row_has_the_same_bits_whatever_is_beside_it(adapted, batches)


@pytest.mark.slow
def test_a_step_of_moondream_3s_widths_is_as_exact_as_torch() -> None:
    """With adapters and without; only layers, experts, words and positions are fewer."""
    wide = world_of(WIDEST, CPU)
    test_kernels.a_step_is_as_exact_as_torch(wide, 9)
    for max_rank in MAX_RANKS:
        adapted = test_adapters.with_adapters(wide, max_rank)
        test_adapters.a_step_with_adapters_is_as_exact_as_torch(adapted, slice(0, 9))
