"""A small model with random weights, and engines over it."""

import dataclasses

import msgspec
import pytest
from legato_engine.core.assembly import assemble

from tests.engine.core.world import CONFIG, GatedFrontend, World


@pytest.fixture(scope="module")
def assembly(request):
    """One model for all tests, unless a test names another."""
    made = assemble(msgspec.structs.replace(CONFIG, model=getattr(request, "param", CONFIG.model)))
    yield made
    made.device.close()


@pytest.fixture
def world(assembly):
    """An engine over the shared model."""
    made = World(assembly)
    yield made
    made.close()


@pytest.fixture
def gated(assembly):
    """An engine whose images are prepared once a gate is set."""
    frontend = GatedFrontend(assembly.frontend)
    made = World(dataclasses.replace(assembly, frontend=frontend))
    yield made, frontend
    frontend.gate.set()
    made.close()
