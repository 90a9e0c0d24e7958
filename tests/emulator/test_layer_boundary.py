"""The kernel between two layers, on the emulated machine.

Its thread blocks wait for each other, so all run at once here, too. They share the one copy of its
`__shared__` variables, which are the same in all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.decoder import MOST_TOKENS, LayerBoundary
from legato_engine.models.moondream.presets import legato_tiny_config

from tests.emulator.module import EmulatedKernel
from tests.emulator.small import CPU
from tests.emulator.test_steps import PARTS
from tests.gpu.test_kernels import shallow, world_of

PROCESSORS = 24
"""One for each thread block."""
LAYERS = 3
"""The fewest that it takes."""


@pytest.mark.parametrize("batch", [1, 5, MOST_TOKENS])
def test_it_has_the_bits_of_a_kernel_for_each_end_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Hidden states, logits, keys and values of a step."""
    launched = []
    launch = EmulatedKernel.launch

    def at_once(self: EmulatedKernel, *arguments: Any, **options: Any) -> None:
        launched.append(self._name)
        if self._name == "emulate_layer_boundary":
            options["cooperative"] = True
        launch(self, *arguments, **options)

    monkeypatch.setattr(EmulatedKernel, "launch", at_once)
    monkeypatch.setattr(EmulatedKernel, "per_processor", lambda self, threads: 1, raising=False)
    monkeypatch.setattr(skinny_gemm, "num_processors", lambda: PROCESSORS)
    world = world_of(shallow(legato_tiny_config(), num_layers=LAYERS, **PARTS), CPU)
    inputs, before = world.inputs().part(slice(0, batch)), world.snapshot()
    across, written = world.forward(inputs), world.snapshot()
    assert launched.count("emulate_layer_boundary") == LAYERS + 1
    world.restore(before)
    launched.clear()
    monkeypatch.setattr(LayerBoundary, "takes", lambda self, batch: False)
    apart = world.forward(inputs)
    assert launched.count("emulate_layer_out") == LAYERS
    assert all(map(torch.equal, across, apart))
    assert torch.equal(written.k_LNHSE, world.kv.k_LNHSE)
    assert torch.equal(written.v_LNHSE, world.kv.v_LNHSE)
