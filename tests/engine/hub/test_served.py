"""What was pulled is what is served."""

from __future__ import annotations

import socket

import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.hub.store import MODELS, Published, Source
from legato_engine.models import registry

from tests.engine.hub.fake_hub import COMMIT
from tests.engine.hub.test_pull import REPOSITORY, hub, pulled
from tests.engine.models import hub_folder
from tests.engine.models.llama import test_llama as llama

__all__ = ["hub"]  # the fixture


def test_a_pulled_model_is_served_without_a_network(hub, tmp_path, monkeypatch):
    """`--model NAME` alone finds and loads it; no socket is connected."""
    hub_folder.write(tmp_path / "made", llama.config())
    for path in (tmp_path / "made").iterdir():
        hub.files[REPOSITORY][path.name] = path.read_bytes()
    catalogued = MODELS["smollm2-135m"].sources[0]
    source = Source(REPOSITORY, COMMIT, catalogued.files)
    model = Published("smollm2-135m", "llama", (source,), "", 1)
    pulled(tmp_path / "models" / model.name, model)

    def connect(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    bundle = registry.resolve(model.name, models=str(tmp_path / "models"))
    assert bundle.load(torch.device("cpu"), torch.float32).num_parameters > 0
    with pytest.raises(InvalidField, match=r"legato pull qwen3-0\.6b"):
        registry.resolve("qwen3-0.6b", models=str(tmp_path / "models"))
