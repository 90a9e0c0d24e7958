"""One tiny Phi for tests that read it, and copies for tests that change it."""

from __future__ import annotations

import shutil

import pytest

from tests.engine.models import hub_folder


@pytest.fixture(scope="package")
def phi_folder(tmp_path_factory):
    """A Phi with a chat template and two EOS tokens."""
    folder = tmp_path_factory.mktemp("phi")
    generation = {"eos_token_id": [0, 2]}
    hub_folder.write(
        folder, hub_folder.phi(num_key_value_heads=2), chat=hub_folder.CHAT, generation=generation
    )
    return folder


@pytest.fixture
def folder(phi_folder, tmp_path):
    """A copy to change."""
    return shutil.copytree(phi_folder, tmp_path / "phi")
