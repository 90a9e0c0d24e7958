"""docs/contract.md and its folder hold the whole contract and are up to date."""

from __future__ import annotations

import importlib.util
import posixpath
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.contract import schema

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix(): path.read_text()
    for path in (DOCS / "contract.md", *sorted((DOCS / "contract").iterdir()))
}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """Import proto/reference.py, whose folder is no package on purpose."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "proto" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sections() -> dict[str, str]:
    """Return the text under each heading, by the heading's words."""
    parts = re.split(r"^#{1,4} (.+)$", "\n".join(PAGES.values()), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def plain(text: str) -> str:
    """Return text without links, anchors, markup and line breaks."""
    text = re.sub(
        r"\[([^\]]*)\]\([\w./]*#[^)]*\)", r"\1", re.sub(r"<a id[^>]*></a>|<br>", " ", text)
    )
    return "".join(text.replace("`", "").replace("\\|", "|").split())


def home_of(element: schema.Element) -> str:
    """Return the heading of an element."""
    owner, _, rest = element.name.partition(".")
    match element.kind:
        case "service":
            return f"service {owner}"
        case "rpc":
            return f"rpc {rest}"
        case "enum":
            return f"enum {owner}"
        case "value":
            enums = [e for file in schema.files() for e in file.enum_type]
            (name,) = [e.name for e in enums if any(v.name == owner for v in e.value)]
            return f"enum {name}"
    return owner


ELEMENTS = list(schema.elements())


@pytest.mark.parametrize("element", ELEMENTS, ids=[f"{e.kind} {e.name}" for e in ELEMENTS])
def test_every_element_is_in_it_with_its_comment(element: schema.Element) -> None:
    """Services, RPCs, messages, fields, enums and values are under their owners, word for word."""
    section = sections()[home_of(element)]
    assert plain(element.comment) in plain(section)
    if element.kind in ("field", "oneof", "value"):
        assert f"`{element.name.rpartition('.')[2]}`" in section


def test_it_is_fresh(reference: ModuleType) -> None:
    """The committed pages are generated from the committed descriptor set."""
    assert reference.markdown(schema.descriptor_set()) == PAGES


def test_its_order_is_that_of_the_reader(reference: ModuleType) -> None:
    """The order of the descriptor set, which protoc chooses, has no effect."""
    turned = type(schema.descriptor_set())()
    turned.file.extend(reversed(schema.descriptor_set().file))
    assert reference.markdown(turned) == PAGES


def test_every_service_has_a_page() -> None:
    """A page names its service in its title, and holds that service alone."""
    for service in (s for file in schema.files() for s in file.service):
        (page,) = [text for text in PAGES.values() if f"## service {service.name}\n" in text]
        assert page.startswith(f"# {service.name}\n")
        assert page.count("\n## service ") == 1


def test_every_link_leads_somewhere() -> None:
    """Each link within the pages has one anchor on the page that it names; anchors are unique."""
    anchors = {page: re.findall(r'<a id="([^"]+)"', text) for page, text in PAGES.items()}
    every = [anchor for each in anchors.values() for anchor in each]
    assert len(every) == len(set(every))
    for page, text in PAGES.items():
        for path, anchor in re.findall(r"\]\(([\w./]*)#([^)]+)\)", text):
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
            )
            assert anchor in anchors[target], (page, path, anchor)


def test_kinds_and_retries_are_those_of_the_rpcs() -> None:
    """Retries and streaming are as the descriptors have them."""
    for method in schema.methods():
        section = sections()[f"rpc {method.name}"]
        assert ("safe to retry: yes" in section) == (method.options.idempotency_level != 0)
        assert ("stream [" in section.partition("→")[0]) == method.client_streaming
        assert ("stream [" in section.partition("→")[2]) == method.server_streaming
