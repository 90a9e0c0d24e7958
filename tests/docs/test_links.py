"""Links between pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, pages, prose

LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|<img[^>]+src=\"([^\"]+)\"")


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and images that are not on the web."""
    found = [one or other for one, other in LINK.findall(prose(page.read_text()))]
    return [target for target in found if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_and_anchors_exist(page: Path) -> None:
    """Each local link of a page names a file or folder, and each anchor one of its headings."""
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists():
            broken.append(f"{target}: no such file")
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked.read_text()):
            broken.append(f"{target}: no such heading")
    assert not broken, "\n".join(broken)


def test_every_page_of_the_docs_can_be_reached() -> None:
    """Each page of docs/ is reached from README.md by links."""
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        todo += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
    docs = {page for page in pages() if page.is_relative_to(ROOT / "docs")}
    assert docs <= seen, sorted(str(page.relative_to(ROOT)) for page in docs - seen)
