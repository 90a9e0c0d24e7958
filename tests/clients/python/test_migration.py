"""The table for users of the moondream package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

TABLE = Path(__file__).parents[3] / "docs" / "migration-from-moondream.md"
ROWS = re.findall(r"^\| `(.+)` \| `(.+)` \|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
SKILLS = ("caption", "query", "chat", "detect", "point", "segment", "encode_image")


def test_every_line_works(server):
    """Each line on the right runs, after those above it, against a server."""
    names: dict[str, Any] = {"image": Image.new("RGB", (200, 100))}
    for _, line in ROWS:
        exec(line.replace("127.0.0.1:50051", server.target), names)
    assert names["text"] == ["a cat"]
    assert isinstance(names["last"], names["Finished"])
    assert names["encoded"].image_id in server.images.held
    assert server.last("Query").image.image_id == names["encoded"].image_id
    assert server.last("Caption").sampling.max_tokens == 64


@pytest.mark.parametrize("skill", SKILLS)
def test_every_skill_is_there(skill):
    """The table speaks of each call of that package, under the same name on both sides."""
    rows = [row for row in ROWS if f"model.{skill}(" in row[0]]
    assert rows
    for theirs, ours in rows:
        assert f"client.{skill}(" in ours or "stream=True" in theirs
