"""The repository's Markdown pages, as the tests of them read them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LEFT_OUT = ("build/", "dist/", "site/", "node_modules/", "engine/tiny/build/")


def pages() -> list[Path]:
    """Return all Markdown files that are not ignored by git; without git, those of the tree."""
    command = ("git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "*.md")
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md")]
    hidden = re.compile(r"(^|/)\.")
    return sorted(
        ROOT / name
        for name in names
        if not name.startswith(_LEFT_OUT) and not hidden.search(name) and (ROOT / name).exists()
    )


def prose(text: str) -> str:
    """Remove fenced code and inline code, in which brackets are not links."""
    return _CODE.sub("``", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: GitHub's for its headings, and explicit ones."""
    found: set[str] = set(re.findall(r'<a id="([^"]+)"', text))
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", _FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found
