"""Rules of the contract that buf does not check; its stubs, its page, and who fills its parts."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import posixpath
import re
from pathlib import Path
from types import ModuleType

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf import descriptor_pb2 as pb

from tests.contract import schema
from tests.contract.recording import WORDS

SKILLS = ("Query", "Caption", "Detect", "Point", "Segment")
ALL_REQUESTS = (*SKILLS, "RunTasks", "Generate")


def test_every_element_is_commented() -> None:
    """Whatever reflection shows has a comment."""
    bare = [f"{e.kind} {e.name}" for e in schema.elements() if not e.comment]
    assert bare == []


def test_comments_are_sentences() -> None:
    """A comment starts like a sentence or with a name, and ends with punctuation."""
    pattern = re.compile(r"^[A-Z0-9`{].*([.:?)}\"]|```)$", re.DOTALL)
    odd = [f"{e.name}: {e.comment}" for e in schema.elements() if not pattern.match(e.comment)]
    assert odd == []


def test_every_rpc_has_its_own_request_and_response() -> None:
    """No two RPCs share a message, so each can evolve alone."""
    for method in schema.methods():
        assert method.input_type == f".legato.v1.{method.name}Request"
        assert method.output_type == f".legato.v1.{method.name}Response"
    names = [method.name for method in schema.methods()]
    assert len(names) == len(set(names))


def test_no_request_or_response_without_an_rpc() -> None:
    """A message named like an RPC's belongs to an RPC."""
    rpcs = {method.name for method in schema.methods()}
    ends = re.compile(r"^(.+)(Request|Response)$")
    named = {match[1] for name in schema.messages() if (match := ends.match(name))}
    assert named == rpcs


def test_service_names() -> None:
    """Services end in Service; the list is complete."""
    assert set(schema.services()) == {
        "AdminService",
        "ImageService",
        "InferenceService",
        "ServerService",
        "SessionService",
    }


def test_rpc_names_are_plain_verbs() -> None:
    """AIP-136: no preposition, no Async in an RPC's name."""
    for method in schema.methods():
        words = set(re.findall("[A-Z][a-z]*", method.name))
        assert not words & {"Async", "For", "From", "With", "By", "To", "Of", "In"}, method.name


def test_enums_start_unspecified_and_carry_their_prefix() -> None:
    """AIP-126: value 0 is unspecified, and every value has its enum's prefix."""
    for file in schema.files():
        for enum in file.enum_type:
            prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
            assert enum.value[0].number == 0
            assert enum.value[0].name == f"{prefix}_UNSPECIFIED"
            assert all(value.name.startswith(f"{prefix}_") for value in enum.value)
            assert [value.number for value in enum.value] == list(range(len(enum.value)))


@pytest.mark.parametrize("name", SKILLS)
def test_skills_are_unary_and_safe_to_retry(name: str) -> None:
    """By default a skill has one request, one response, and a safe retry."""
    (method,) = [m for m in schema.services()["InferenceService"].method if m.name == name]
    assert not method.client_streaming
    assert not method.server_streaming
    assert method.options.idempotency_level == pb.MethodOptions.NO_SIDE_EFFECTS


def test_reading_rpcs_have_no_side_effects_and_repeatable_ones_say_so() -> None:
    """Which RPCs may be retried is in the descriptors."""
    levels = {
        method.name: pb.MethodOptions.IdempotencyLevel.Name(method.options.idempotency_level)
        for method in schema.methods()
    }
    safe = {name for name, level in levels.items() if level == "NO_SIDE_EFFECTS"}
    repeatable = {name for name, level in levels.items() if level == "IDEMPOTENT"}
    reading = {"GetServerInfo", "ListModels", "GetLoad", "GetMetrics", "WatchTimeline"}
    assert safe == {*SKILLS, "RunTasks", *reading}
    assert repeatable == {"DeleteImage", "Abort", "Drain", "SetPipelineDepth"}


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("QueryRequest", {"image", "question", "reasoning", "spatial_refs"}),
        ("CaptionRequest", {"image", "length"}),
        ("DetectRequest", {"image", "object", "max_objects"}),
        ("PointRequest", {"image", "object", "max_objects", "spatial_refs"}),
        ("SegmentRequest", {"image", "object", "spatial_refs"}),
        ("Sampling", {"temperature", "top_p", "max_tokens"}),
        ("QueryResponse", {"answer", "reasoning"}),
        ("CaptionResponse", {"caption"}),
        ("DetectResponse", {"objects"}),
        ("PointResponse", {"points"}),
        ("SegmentResponse", {"segments"}),
        ("Box", {"x_min", "y_min", "x_max", "y_max"}),
        ("Point", {"x", "y"}),
        ("Outline", {"path"}),
    ],
)
def test_names_are_those_of_the_moondream_sdk(message: str, names: set[str]) -> None:
    """JSON for the Moondream SDK works in grpcurl."""
    assert names <= set(schema.fields(message))


@pytest.mark.parametrize("name", SKILLS)
def test_a_skill_is_the_same_alone_and_as_a_task(name: str) -> None:
    """`XRequest` is `XTask` plus the fields of any request; `XResponse` is `XResult` plus info.

    Only what needs the frames before is a task's alone.
    """
    shared = {"image", "sampling", "options", "stamp"}
    of_frames = {"tracking"}
    task, result = schema.messages()[f"{name}Task"], schema.messages()[f"{name}Result"]
    request, response = schema.messages()[f"{name}Request"], schema.messages()[f"{name}Response"]

    def typed(message: pb.DescriptorProto) -> dict[str, tuple[int, str, int]]:
        return {f.name: (f.type, f.type_name, f.label) for f in message.field}

    assert {k: v for k, v in typed(request).items() if k not in shared} == {
        k: v for k, v in typed(task).items() if k not in of_frames
    }
    assert {k: v for k, v in typed(response).items() if k != "info"} == typed(result)


@pytest.mark.parametrize("name", ALL_REQUESTS)
def test_requests_share_their_frame(name: str) -> None:
    """Every request about an image has image, options and stamp under these names and types."""
    types = {f.name: f.type_name for f in schema.messages()[f"{name}Request"].field}
    assert types["image"] == ".legato.v1.Image"
    assert types["options"] == ".legato.v1.RequestOptions"
    assert types["stamp"] == ".legato.v1.FrameStamp"


def test_absent_differs_from_zero_where_it_matters() -> None:
    """Scalars whose zero means something have presence."""
    optional = {
        f"{message.name}.{field.name}"
        for message in schema.messages().values()
        for field in message.field
        if field.proto3_optional
    }
    scalars = {"temperature", "top_p", "top_k", "max_tokens", "seed"}
    assert {f"Sampling.{name}" for name in scalars} <= optional
    confident = {"DetectedObject", "PointedObject", "Outline"}
    assert {f"{name}.confidence" for name in confident} <= optional
    assert {name for name in optional if name.endswith(".max_objects")} == {
        "DetectTask.max_objects",
        "DetectRequest.max_objects",
        "PointTask.max_objects",
        "PointRequest.max_objects",
    }


def test_lists_are_paged() -> None:
    """AIP-158: a List RPC has a page size and page tokens."""
    for method in schema.methods():
        if method.name.startswith("List"):
            assert {"page_size", "page_token"} <= set(schema.fields(f"{method.name}Request"))
            assert "next_page_token" in schema.fields(f"{method.name}Response")


def test_every_error_reason_names_its_code_and_an_example() -> None:
    """A reason's comment starts with a gRPC status code and shows its ErrorInfo."""
    codes = {code.name for code in grpc.StatusCode}
    reasons = [e for e in schema.elements() if e.name.startswith("ERROR_REASON_")]
    for reason in reasons[1:]:
        short = reason.name.removeprefix("ERROR_REASON_")
        assert reason.comment.split(":")[0] in codes, reason.name
        assert f'{{"reason": "{short}", "domain": "legato"' in reason.comment
        assert "Remedy:" in reason.comment


def test_the_event_grammar_is_written_where_it_is_read() -> None:
    """Both the RPC and the message document the grammar of a Generate stream."""
    comments = {e.name: e.comment for e in schema.elements()}
    for name in ("InferenceService.Generate", "GenerateResponse"):
        assert "*queued started *( delta / heartbeat ) finished" in comments[name]


# ---------------------------------------------------------------- what tests fill

ROOT = Path(__file__).parents[2]
FILLED = json.loads(Path(__file__).with_name("filled.json").read_text())
"""By part of the contract the test that fills it; `recording.py` writes it."""

RESERVED = "Reserved for later"


def parts() -> dict[str, str]:
    """Fields, values of enums and words, with their comments; unspecified values say nothing."""
    found = {}
    for element in schema.elements():
        if element.name.startswith("FieldLimit."):  # an option, which no message holds
            continue
        if element.kind == "field" or (
            element.kind == "value" and not element.name.endswith("_UNSPECIFIED")
        ):
            found[element.name] = element.comment
        if element.name in WORDS:
            names = re.findall(r"`([a-z0-9_.]+)`", element.comment)
            found |= {f"{element.name}: {name}": element.comment for name in names}
    return found


@functools.cache
def names_of_tests(path: str) -> set[str]:
    """The tests of a file by name; none where there is no such file."""
    if not (ROOT / path).is_file():
        return set()
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    functions = (each for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return {each.name for each in functions if each.name.startswith("test_")}


def test_every_part_is_filled_or_reserved():
    """A part that no test fills says so in its comment, and one that is filled does not."""
    known = parts()
    reserved = {name for name, comment in known.items() if RESERVED in comment}
    missing = known.keys() - FILLED.keys() - reserved
    assert not missing, f"fill them in a test, or write {RESERVED!r}: {sorted(missing)}"
    assert not reserved & FILLED.keys()


def test_every_test_that_fills_a_part_exists():
    """The table names tests by file and function, of parts that there are."""
    gone = {
        part: test
        for part, test in FILLED.items()
        if test.partition("::")[2] not in names_of_tests(test.partition("::")[0])
    }
    assert not gone
    assert not FILLED.keys() - parts().keys()


# ---------------------------------------------------------------- stubs
# The committed stubs can be imported, are typed, and match the contract.

SOURCES = Path(__file__).resolve().parents[2] / "proto" / "legato" / "v1"
NOUNS = sorted(path.stem for path in SOURCES.glob("*.proto"))
SERVICES = {noun for noun in NOUNS if "\nservice " in (SOURCES / f"{noun}.proto").read_text()}


def test_nouns() -> None:
    """The contract has one file for each of these nouns."""
    nouns = "admin error geometry image inference limit media server session task"
    assert nouns.split() == NOUNS


@pytest.mark.parametrize("noun", NOUNS)
def test_stub_imports(noun: str) -> None:
    """Every file of the contract has stubs under the path that protoc assumes."""
    module = importlib.import_module(f"legato.v1.{noun}_pb2")
    if noun in SERVICES:
        importlib.import_module(f"legato.v1.{noun}_pb2_grpc")
    assert module.DESCRIPTOR.name == f"legato/v1/{noun}.proto"


@pytest.mark.parametrize("noun", NOUNS)
def test_stub_is_typed(noun: str) -> None:
    """Every stub has a type stub, gRPC's those with a service; the package is marked as typed."""
    assert (schema.PACKAGE / f"{noun}_pb2.pyi").is_file()
    assert (schema.PACKAGE / f"{noun}_pb2_grpc.pyi").is_file() == (noun in SERVICES)
    assert (schema.PACKAGE.parent / "py.typed").is_file()


@pytest.mark.parametrize("noun", NOUNS)
def test_descriptor_set_is_that_of_the_stubs(noun: str) -> None:
    """`descriptor.binpb` without comments equals what the stubs register."""
    name = f"legato/v1/{noun}.proto"
    importlib.import_module(f"legato.v1.{noun}_pb2")
    (shipped,) = [file for file in schema.files() if file.name == name]
    registered = type(shipped)()
    descriptor_pool.Default().FindFileByName(name).CopyToProto(registered)
    bare = type(shipped)()
    bare.CopyFrom(shipped)
    bare.ClearField("source_code_info")
    for file in (bare, registered):
        clear_json_names(file)
    # Options of the contract's own are parsed where their file was imported before.
    assert type(bare).FromString(bare.SerializeToString()) == type(bare).FromString(
        registered.SerializeToString()
    )


def clear_json_names(file: descriptor_pb2.FileDescriptorProto) -> None:
    """Clear derived JSON names, which protoc writes into descriptor sets only."""
    fields = [field for message in file.message_type for field in message.field]
    for field in (*fields, *file.extension):
        field.ClearField("json_name")


def test_descriptor_set_is_complete() -> None:
    """All imports are included, in an order that can be loaded."""
    seen: set[str] = set()
    for file in schema.descriptor_set().file:
        assert set(file.dependency) <= seen
        seen.add(file.name)
    assert {f"legato/v1/{noun}.proto" for noun in NOUNS} <= seen


@pytest.mark.parametrize("noun", NOUNS)
def test_comments_are_those_of_the_source(noun: str) -> None:
    """The comments are those of the proto files, word for word."""
    source = " ".join((SOURCES / f"{noun}.proto").read_text().replace("//", " ").split())
    (shipped,) = [file for file in schema.files() if file.name == f"legato/v1/{noun}.proto"]
    for place in shipped.source_code_info.location:
        assert " ".join(place.leading_comments.split()) in source


# ---------------------------------------------------------------- docs/contract.md

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


@pytest.mark.parametrize("kind", sorted({element.kind for element in ELEMENTS}))
def test_every_element_is_in_it_with_its_comment(kind: str) -> None:
    """Services, RPCs, messages, fields, enums and values are under their owners, word for word."""
    texts = sections()
    plain_texts = {home: plain(text) for home, text in texts.items()}
    for element in (each for each in ELEMENTS if each.kind == kind):
        home = home_of(element)
        assert plain(element.comment) in plain_texts[home], element.name
        if kind in ("field", "oneof", "value"):
            assert f"`{element.name.rpartition('.')[2]}`" in texts[home], element.name


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
