"""What the documents show of the records: tables, charts and diagrams.

`python -m benchmarks publish` writes the tables of `DOCUMENTS`, each between two markers, and the
SVG files in docs/images. `--check` writes nothing and fails when one of them is not current, or
when a figure in prose has no record (`records`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.publish import charts, records, tables
from benchmarks.publish.records import Records

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/performance.md", "docs/quickstart-robot.md", "docs/scaling.md")
IMAGES = "docs/images"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    """Write all tables and drawings, or name those that are not current and unfounded records."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks publish", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; 1 if one is stale or a figure has no record",
    )
    arguments = parser.parse_args(argv)
    stale = {path: text for path, text in outputs(ROOT).items() if _read(path) != text}
    for path, text in stale.items():
        print(f"{'stale' if arguments.check else 'written'}: {path.relative_to(ROOT)}")
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    unfounded = records.check(ROOT)
    print(*unfounded, sep="\n", end="\n" if unfounded else "")
    return 1 if arguments.check and (stale or unfounded) else 0


def outputs(root: Path) -> dict[Path, str]:
    """Return the text that each document and drawing should have."""
    records = Records(root)
    drawings = charts.draw(records) | charts.draw_diagrams()
    texts = {root / IMAGES / f"{name}.svg": text for name, text in drawings.items()}
    for name in DOCUMENTS:
        path = root / name
        texts[path] = filled(path.read_text(), records.seen_from(path.parent))
    return texts


def filled(text: str, records: Records) -> str:
    """Replace the content between each pair of markers by the table that the first one names."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}\n{tables.TABLES[found[2]](records)}\n\n{found[3]}"

    return _BLOCK.sub(block, text)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
