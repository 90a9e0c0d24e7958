"""docs/contract.md holds the whole contract and is up to date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.contract import schema

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "contract.md"


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
    parts = re.split(r"^#{1,4} (.+)$", REFERENCE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def plain(text: str) -> str:
    """Return text without links, anchors, markup and line breaks."""
    text = re.sub(r"\[([^\]]*)\]\(#[^)]*\)", r"\1", re.sub(r"<a id[^>]*></a>|<br>", " ", text))
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
    """The committed file is generated from the committed descriptor set."""
    assert reference.markdown(schema.descriptor_set()) == REFERENCE.read_text()


def test_its_order_is_that_of_the_reader(reference: ModuleType) -> None:
    """The order of the descriptor set, which protoc chooses, has no effect."""
    turned = type(schema.descriptor_set())()
    turned.file.extend(reversed(schema.descriptor_set().file))
    assert reference.markdown(turned) == REFERENCE.read_text()


def test_every_link_leads_somewhere() -> None:
    """Each link within the file has one anchor, and anchors are unique."""
    text = REFERENCE.read_text()
    anchors = re.findall(r'<a id="([^"]+)"', text)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors)


def test_kinds_and_retries_are_those_of_the_rpcs() -> None:
    """Retries and streaming are as the descriptors have them."""
    for method in schema.methods():
        section = sections()[f"rpc {method.name}"]
        assert ("safe to retry: yes" in section) == (method.options.idempotency_level != 0)
        assert ("stream [" in section.partition("→")[0]) == method.client_streaming
        assert ("stream [" in section.partition("→")[2]) == method.server_streaming
