"""The page's files: all of them are here, and nothing of another host is named."""

from __future__ import annotations

import re

import pytest
from legato_client.web.playground.routes import STATIC

SCRIPTS = sorted(STATIC.glob("*.js"))
TEXTS = [*SCRIPTS, *STATIC.glob("*.css"), *STATIC.glob("*.html")]
PAGE = (STATIC / "index.html").read_text()
LATE = {"timeline.js"}  # loaded when its tab is shown, which says so if it is missing


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_file_names_another_host(path):
    """The page works without a network; the name of SVG's namespace is no address."""
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://|[\"'(]//|@import|wss?://(?!\$)", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_what_exists(path):
    """Each name that is imported is exported there."""
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    for names, module in re.findall(r'import \{([^}]*)\} from "\./([^"]+)"', text):
        exported = (STATIC / module).read_text()
        for name in filter(None, (each.strip() for each in names.split(","))):
            assert re.search(rf"export (async )?(function\*?|class|const) {name}\b", exported), name
    for module in re.findall(r'import\("\./([^"]+)"\)', text):
        assert module in LATE or (STATIC / module).is_file()


def test_scripts_look_for_elements_that_exist():
    """An id that is looked for is in the page, or made by a script."""
    texts = "".join(path.read_text() for path in SCRIPTS)
    looked_for = set(re.findall(r'byId\("([^"]+)"\)', texts))
    known = set(re.findall(r'id="([^"]+)"', PAGE)) | set(re.findall(r'id: "([^"]+)"', texts))
    assert looked_for
    assert looked_for <= known


def test_the_page_s_files_exist():
    """Scripts, styles, the icon; styles and scripts are never inline."""
    named = re.findall(r'(?:src|href)="/static/([^"]+)"', PAGE)
    assert {"app.js", "theme.js", "base.css", "page.css", "icon.svg"} <= set(named)
    assert all((STATIC / name).is_file() for name in named)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", PAGE)


def test_the_images_come_with_their_licence():
    """And each that a script names is there."""
    for folder in ("samples", "drawings"):
        assert "MIT License" in (STATIC / folder / "LICENSE-fluent-emoji").read_text()
    samples = re.findall(r'file: "([^"]+)"', (STATIC / "picture.js").read_text())
    nouns = re.findall(r'noun: "([^"]+)"', (STATIC / "scene.js").read_text())
    assert len(samples) == 3
    assert all((STATIC / "samples" / name).is_file() for name in samples)
    assert {f"{noun}.webp" for noun in nouns} == {
        path.name for path in (STATIC / "drawings").glob("*.webp")
    }
