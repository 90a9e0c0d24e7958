"""Prepare the pages of the documentation site and build it: `make docs`.

Zensical needs all pages in one folder. Pages of docs/ link to files outside of it, as they should
on GitHub: this script copies those files to `repository/` beside the pages, and rewrites the links.
README.md becomes the index page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "docs"
PAGES = STAGE / "pages"
SITE = ROOT / "site"
ICON = ROOT / "clients" / "python" / "legato_client" / "web" / "static" / "icon.svg"
COPIED = {".md", ".svg", ".png", ".webp", ".css", ".woff2", ".txt"}
LOADED = re.compile(r"""<(?:script|img|link)\b[^>]*?(?:src|href)=["']?(https?://[^\s"'>/]+)""")
LINK = re.compile(r"(?<!\\)(\]\()([^)\s:]+?)(#[^)\s]*)?(\))")


def main() -> int:
    """Stage the pages, then run Zensical; 1 when a page has a broken link."""
    shutil.rmtree(STAGE, ignore_errors=True)
    PAGES.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "zensical.toml", STAGE)
    _stage(ROOT / "README.md", PAGES / "index.md")
    for source in sorted((ROOT / "docs").rglob("*")):
        if source.suffix in COPIED:
            _stage(source, PAGES / source.relative_to(ROOT / "docs"))
    shutil.copy(ICON, PAGES / "images")
    zensical = Path(sys.executable).with_name("zensical")
    command = [zensical, "build", "--clean", "--strict"]
    status = subprocess.run(command, cwd=STAGE, check=False).returncode
    if status == 0:
        shutil.rmtree(SITE, ignore_errors=True)
        shutil.move(STAGE / "site", SITE)  # Zensical writes below its configuration only
        for name, host in sorted(foreign(SITE)):
            sys.stderr.write(f"{name} loads from another host: {host}\n")
            status = 1
    return status


def foreign(site: Path) -> set[tuple[str, str]]:
    """Return pages with the other hosts that a browser asks to show them."""
    return {
        (str(page.relative_to(site)), host)
        for page in site.rglob("*.html")
        for host in LOADED.findall(page.read_text())
    }


def _stage(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".md":
        shutil.copy(source, target)
        return

    def link(found: re.Match[str]) -> str:
        path, anchor = found[2], found[3] or ""
        linked = Path(os.path.normpath(source.parent / path))
        return f"{found[1]}{os.path.relpath(_page(linked), target.parent)}{anchor}{found[4]}"

    target.write_text(LINK.sub(link, source.read_text()))


def _page(linked: Path) -> Path:
    """Return where the site has a file, after copying it there if it is not a page."""
    if linked == ROOT / "README.md":
        return PAGES / "index.md"
    if linked.is_relative_to(ROOT / "docs"):
        return PAGES / linked.relative_to(ROOT / "docs")
    target = PAGES / "repository" / linked.relative_to(ROOT)
    if linked.is_dir():
        target = target / "index.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        names = "\n".join(f"- `{each.name}`" for each in sorted(linked.iterdir()))
        target.write_text(
            f"# {linked.relative_to(ROOT)}\n\nA folder of the repository:\n\n{names}\n"
        )
    elif linked.suffix in {"", ".proto", ".sh", ".py"}:
        target = target.with_name(f"{target.name}.md")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"# {linked.name}\n\n```\n{linked.read_text()}\n```\n")
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()  # before its own links are followed, which may lead back here
        _stage(linked, target)
    return target


if __name__ == "__main__":
    sys.exit(main())
