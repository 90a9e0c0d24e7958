"""Wheels made up for a test."""

from __future__ import annotations

import zipfile

import pytest


@pytest.fixture
def wheel(tmp_path):
    """Return a function that writes a wheel with metadata and files of one byte into `tmp_path`."""

    def write(name, version, requires=(), files=()):
        stem = f"{name.replace('-', '_')}-{version}"
        path = tmp_path / f"{stem}-py3-none-any.whl"
        metadata = [f"Name: {name}", f"Version: {version}"]
        metadata += [f"Requires-Dist: {each}" for each in requires]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata))
            for file in files:
                inside = file.replace("licenses/", f"{stem}.dist-info/licenses/", 1)
                archive.writestr(inside, "-")
        return path

    return write
