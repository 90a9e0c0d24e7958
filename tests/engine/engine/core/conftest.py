"""A model with random weights for the tests of a file, and engines over it."""

import dataclasses

import msgspec
import pytest
from legato_engine.engine.assembly import assemble

from tests.engine.engine.core.world import CONFIG, GatedFrontend, World


@pytest.fixture(scope="module")
def assembly(request):
    """One model for all tests, unless a test names another."""
    made = assemble(msgspec.structs.replace(CONFIG, model=getattr(request, "param", CONFIG.model)))
    yield made
    made.device.close()


@pytest.fixture
def world(assembly):
    """A core over the shared model."""
    made = World(assembly)
    yield made
    made.close()


@pytest.fixture
def gated(assembly):
    """A core whose pictures wait for a gate."""
    frontend = GatedFrontend(assembly.frontend)
    made = World(dataclasses.replace(assembly, frontend=frontend))
    yield made, frontend
    frontend.gate.set()
    made.close()
