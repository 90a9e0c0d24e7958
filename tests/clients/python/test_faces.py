"""The two faces show the same calls."""

from __future__ import annotations

import inspect

import pytest
from legato_client import AsyncClient, Client
from legato_client._client_methods import ClientMethods

CALLS = [name for name in vars(ClientMethods) if not name.startswith("_")]


@pytest.mark.parametrize("name", [*CALLS, "session", "encode_image", "lift"])
@pytest.mark.parametrize("face", [Client, AsyncClient])
def test_every_call_has_its_face(face, name):
    """Whatever can be called is a method of both faces, with its parameters and a sentence."""
    method = getattr(face, name)
    assert inspect.getdoc(method)
    shown = list(inspect.signature(method).parameters)
    assert shown[0] == "self"
    assert shown[1:] == list(inspect.signature(getattr(Client, name)).parameters)[1:]
    assert "args" not in shown


def test_there_are_calls():
    """The list above is not empty by mistake."""
    assert {"detect", "generate", "put_image", "server_info", "abort"} <= set(CALLS)
