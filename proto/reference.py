"""The contract as Markdown: a pure function of its descriptor set, comments included.

`generate.py` writes what it gives to docs/contract.md and the folder beside it.
"""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from google.protobuf import descriptor_pb2 as pb
from google.protobuf import descriptor_pool, message_factory

INDEX = "contract.md"
# Titles, and the files on each page: one per service, then what they share.
PAGES = {
    "contract/inference.md": ("InferenceService", ("inference",)),
    "contract/session.md": ("SessionService", ("session",)),
    "contract/image.md": ("ImageService", ("image",)),
    "contract/server.md": ("ServerService", ("server",)),
    "contract/admin.md": ("AdminService", ("admin",)),
    "contract/types.md": ("Tasks, images and geometry", ("task", "media", "geometry")),
    "contract/errors.md": ("Errors and limits", ("error", "limit")),
}
RETRY = {
    pb.MethodOptions.IDEMPOTENCY_UNKNOWN: "no",
    pb.MethodOptions.NO_SIDE_EFFECTS: "yes, no side effects",
    pb.MethodOptions.IDEMPOTENT: "yes, idempotent",
}
INTRO = """\
# The contract, `legato.v1`

Every service, RPC, message, field and value, with the comments of `proto/legato/v1`, which bind
the server. Written by `make proto` and checked by `make proto-check`: edit the `.proto` files, not
these pages. The rules of change are in [proto/README.md](../proto/README.md).

How to read it: a field whose type says *optional* tells absence from zero; so does every field
whose type is a message. Of the fields under *one of*, at most one is set. Numbers are those on the
wire. In JSON (grpcurl) names are lowerCamelCase; those given here are understood too.

A failure is written as its status code and its reason: INVALID_ARGUMENT IMAGE_TOO_LARGE. What
every RPC may fail with is said once, at `InferenceService`; each reason, its remedy and an example
are at `ErrorReason`.
"""
REASON = "ERROR_REASON_"
# Reasons that text does not mean by these words: two are status codes too.
OTHER_WORDS = {"INTERNAL", "UNAUTHENTICATED", "UNSPECIFIED"}
# Field numbers of descriptor.proto, which a source location's path is made of.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_ONEOF, ENUM_VALUE, SERVICE_METHOD = 2, 8, 2, 2

T = pb.FieldDescriptorProto
INTEGERS = {
    T.TYPE_UINT32: (0, 2**32 - 1),
    T.TYPE_UINT64: (0, 2**64 - 1),
    T.TYPE_INT32: (-(2**31), 2**31 - 1),
    T.TYPE_INT64: (-(2**63), 2**63 - 1),
}
TIMES = {".google.protobuf.Duration": " s", ".google.protobuf.Timestamp": " s since 1970"}

Path = tuple[int, ...]
Bounds = dict[str, float | int | bool]
Limits = tuple[dict[str, dict[str, Bounds]], dict[str, int]]
OPTIONS = "legato.v1"
"""Package of the options that bound fields."""
"""The bounds of a field that its `FieldLimit` gives, by their names there."""


class Source(NamedTuple):
    """One file of the contract, and the comment above each of its elements."""

    noun: str
    file: pb.FileDescriptorProto
    comments: dict[Path, str]
    limits: dict[str, dict[str, Bounds]]

    def comment(self, *path: int) -> str:
        """Return the comment above the element at this path, without the indent of its lines."""
        return textwrap.dedent(self.comments.get(path, "")).strip()


def markdown(descriptors: pb.FileDescriptorSet, package: str = "legato.v1") -> dict[str, str]:
    """Write the pages of the reference of `package`; the same text for the same descriptors."""
    bounds, _ = limits(descriptors, package)
    own = (_source(file, bounds) for file in descriptors.file if file.package == package)
    by_noun = {source.noun: source for source in own}
    sources = [by_noun.pop(noun) for _, nouns in PAGES.values() for noun in nouns]
    assert not by_noun, f"on no page: {', '.join(by_noun)}"
    link = _linker(sources)
    drafts = {INDEX: [link(INTRO), *_overview(sources), "", *_contents()]}
    for page, (title, nouns) in PAGES.items():
        drafts[page] = [f"# {title}"]
        for source in sources:
            if source.noun in nouns:
                drafts[page] += _sections(source, link)
    return _across({page: "\n".join(lines) + "\n" for page, lines in drafts.items()})


def _contents() -> Iterator[str]:
    """Write a table of the pages, and the `.proto` files on each."""
    yield from ("| page | files |", "| --- | --- |")
    for page, (title, nouns) in PAGES.items():
        yield f"| [{title}]({page}) | {', '.join(f'`{noun}.proto`' for noun in nouns)} |"


def _across(pages: dict[str, str]) -> dict[str, str]:
    """Make links to anchors of another page name that page."""
    home = {
        anchor: page
        for page, text in pages.items()
        for anchor in re.findall(r'<a id="([^"]+)"', text)
    }

    def on(page: str, text: str) -> str:
        def link(found: re.Match[str]) -> str:
            target = home[found[1]]
            path = posixpath.relpath(target, posixpath.dirname(page)) if target != page else ""
            return f"]({path}#{found[1]})"

        return re.sub(r"\]\(#([^)]+)\)", link, text)

    return {page: on(page, text) for page, text in pages.items()}


def limits(descriptors: pb.FileDescriptorSet, package: str = OPTIONS) -> Limits:
    """Return a package's bounds of fields, by message and field, and the most bytes of messages.

    A pool of its own reads the options, so that the stubs need not be imported.
    """
    pool = descriptor_pool.DescriptorPool()
    waiting = {file.name: file for file in descriptors.file}

    def add(name: str) -> None:
        if (file := waiting.pop(name, None)) is not None:
            for needed in file.dependency:
                add(needed)
            pool.Add(file)  # type: ignore[no-untyped-call]  # the stubs of protobuf lack it

    for file in descriptors.file:
        add(file.name)
    field_limit = pool.FindExtensionByName(f"{OPTIONS}.limit")
    max_bytes = pool.FindExtensionByName(f"{OPTIONS}.message_max_bytes")
    field_options, message_options = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"google.protobuf.{name}"))
        for name in ("FieldOptions", "MessageOptions")
    )
    fields: dict[str, dict[str, Bounds]] = {}
    sizes: dict[str, int] = {}
    outer = [m for file in descriptors.file if file.package == package for m in file.message_type]
    for message in (each for m in outer for each in (m, *m.nested_type)):
        options = message_options.FromString(message.options.SerializeToString())
        if options.HasExtension(max_bytes):
            sizes[message.name] = options.Extensions[max_bytes]
        for field in message.field:
            options = field_options.FromString(field.options.SerializeToString())
            if options.HasExtension(field_limit):
                given = options.Extensions[field_limit].ListFields()
                bounds = {bound.name: _plain(value) for bound, value in given}
                fields.setdefault(message.name, {})[field.name] = bounds
    return fields, sizes


def _plain(value: float | int | bool) -> float | int | bool:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _source(file: pb.FileDescriptorProto, bounds: dict[str, dict[str, Bounds]]) -> Source:
    comments = {tuple(at.path): at.leading_comments for at in file.source_code_info.location}
    return Source(file.name.rsplit("/", 1)[-1].removesuffix(".proto"), file, comments, bounds)


# ---------------------------------------------------------------- sections


def _overview(sources: list[Source]) -> Iterator[str]:
    """Write a table of all RPCs, each with the first sentence of its comment."""
    yield from ("| RPC | kind | safe to retry | does |", "| --- | --- | --- | --- |")
    for source in sources:
        for i, service in enumerate(source.file.service):
            for j, method in enumerate(service.method):
                name = f"{service.name}.{method.name}"
                said = _cell(source.comment(FILE_SERVICE, i, SERVICE_METHOD, j))
                does = re.split(r"[.:;][ <]|\.$", said)[0] + "."
                retry = RETRY[method.options.idempotency_level]
                yield f"| [{name}](#{_anchor(name)}) | {_kind(method)} | {retry} | {does} |"


def _sections(source: Source, link: Callable[[str], str]) -> Iterator[str]:
    """Write everything that a file declares."""
    for i, service in enumerate(source.file.service):
        yield from _service(source, i, service, link)
    for i, message in enumerate(source.file.message_type):
        yield from _message(source, i, message, link)
    for i, enum in enumerate(source.file.enum_type):
        yield from _enum(source, i, enum, link)


def _service(
    source: Source, i: int, service: pb.ServiceDescriptorProto, link: Callable[[str], str]
) -> Iterator[str]:
    yield from ("", f'<a id="{_anchor(service.name)}"></a>', "", f"## service {service.name}")
    yield from ("", link(source.comment(FILE_SERVICE, i)))
    for j, method in enumerate(service.method):
        name = f"{service.name}.{method.name}"
        given, told = (_bare(type_name) for type_name in (method.input_type, method.output_type))
        given = f"{'stream ' * method.client_streaming}[{given}](#{_anchor(given)})"
        told = f"{'stream ' * method.server_streaming}[{told}](#{_anchor(told)})"
        yield from ("", f'<a id="{_anchor(name)}"></a>', "", f"### rpc {method.name}")
        retry = RETRY[method.options.idempotency_level]
        yield from ("", f"{given} → {told} · {_kind(method)} · safe to retry: {retry}")
        yield from ("", link(source.comment(FILE_SERVICE, i, SERVICE_METHOD, j)))


def _message(
    source: Source, i: int, message: pb.DescriptorProto, link: Callable[[str], str]
) -> Iterator[str]:
    yield from ("", f'<a id="{_anchor(message.name)}"></a>', "", f"## {message.name}")
    yield from ("", link(source.comment(FILE_MESSAGE, i)))
    if not message.field:
        yield from ("", "No fields.")
        return
    yield from ("", "| field | type | no. | meaning |", "| --- | --- | --- | --- |")
    inside = None
    for j, field in enumerate(message.field):
        oneof = field.oneof_index if _is_choice(field) else None
        if oneof is not None and oneof != inside:
            name = message.oneof_decl[oneof].name
            said = link(_cell(source.comment(FILE_MESSAGE, i, MESSAGE_ONEOF, oneof)))
            yield f"| *one of* `{name}` | | | {said} |"
        inside = oneof
        said = link(_cell(source.comment(FILE_MESSAGE, i, MESSAGE_FIELD, j)))
        said += _bounds(field, source.limits.get(message.name, {}).get(field.name, {}))
        indent = "· " if oneof is not None else ""
        yield f"| {indent}`{field.name}` | {_type(field)} | {field.number} | {said} |"


def _enum(
    source: Source, i: int, enum: pb.EnumDescriptorProto, link: Callable[[str], str]
) -> Iterator[str]:
    yield from ("", f'<a id="{_anchor(enum.name)}"></a>', "", f"## enum {enum.name}")
    yield from ("", link(source.comment(FILE_ENUM, i)))
    yield from ("", "| value | no. | meaning |", "| --- | --- | --- |")
    for j, value in enumerate(enum.value):
        said = link(_cell(source.comment(FILE_ENUM, i, ENUM_VALUE, j)))
        yield f'| <a id="{_anchor(value.name)}"></a>`{value.name}` | {value.number} | {said} |'


# ---------------------------------------------------------------- words


def _anchor(name: str) -> str:
    return name.lower()


def _bare(type_name: str) -> str:
    """`.legato.v1.Box` is `Box`."""
    return type_name.rsplit(".", 1)[-1]


def _is_choice(field: pb.FieldDescriptorProto) -> bool:
    """Whether the field is part of a declared oneof, not of the one that `optional` implies."""
    return field.HasField("oneof_index") and not field.proto3_optional


def _kind(method: pb.MethodDescriptorProto) -> str:
    kinds = ("unary", "server stream", "client stream", "both ways")
    return kinds[method.server_streaming + 2 * method.client_streaming]


def _type(field: pb.FieldDescriptorProto) -> str:
    if field.type_name.startswith(".google."):
        name = f"`{field.type_name[1:]}`"
    elif field.type_name:
        name = f"[{_bare(field.type_name)}](#{_anchor(_bare(field.type_name))})"
    else:
        name = pb.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == pb.FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _bounds(field: pb.FieldDescriptorProto, bounds: Bounds) -> str:
    """Return the sentence about the bounds of a field, empty without any."""
    parts = [
        f"at most {bounds[name]} {unit}"
        for name, unit in (
            ("max_items", "entries"),
            ("max_characters", "characters"),
            ("max_bytes", "bytes"),
        )
        if name in bounds
    ]
    least, greatest = INTEGERS.get(field.type, (None, None))
    least, greatest = bounds.get("min", least), bounds.get("max", greatest)
    unit = TIMES.get(field.type_name, "")
    if "above" in bounds:
        most = "" if greatest is None else f", at most {greatest}{unit}"
        parts.append(f"above {bounds['above']}{most}")
    elif least is not None and bounds:
        parts.append(
            f"at least {least}{unit}" if greatest is None else f"{least} to {greatest}{unit}"
        )
    return f" *Range: {'; '.join(parts)}.*" if parts else ""


def _cell(comment: str) -> str:
    """Put a comment into one line of a table; indented blocks are examples."""
    parts = []
    for block in comment.split("\n\n"):
        text = " ".join(re.sub(r"-\n\s*", "-", block).split())
        parts.append(f"`{text}`" if block.startswith("    ") else text)
    return "<br>".join(parts).replace("|", "\\|")


def _names(sources: list[Source]) -> Iterator[tuple[str, str]]:
    """Everything a comment may name, with the anchor that it is found under."""
    for source in sources:
        things: Iterable[pb.DescriptorProto | pb.EnumDescriptorProto]
        things = (*source.file.message_type, *source.file.enum_type)
        yield from ((thing.name, thing.name) for thing in things)
        for message in source.file.message_type:
            yield from ((f"{message.name}.{f.name}", message.name) for f in message.field)
        for enum in source.file.enum_type:
            yield from ((value.name, value.name) for value in enum.value)
        for service in source.file.service:
            yield service.name, service.name
            for method in service.method:
                yield f"{service.name}.{method.name}", f"{service.name}.{method.name}"


def _linker(sources: list[Source]) -> Callable[[str], str]:
    """Make a function that links names in backticks, error reasons and "as Query does"."""
    known = dict(_names(sources))
    rpcs = {name.split(".")[1]: name for name in known if "Service." in name}
    reasons = {name.removeprefix(REASON): name for name in known if name.startswith(REASON)}
    words = {**known, **{r: name for r, name in reasons.items() if r not in OTHER_WORDS}}

    def quoted_or_upper(match: re.Match[str]) -> str:
        name, shown = match[1] or match[2], match[0]
        found = known.get(name) if match[1] else words.get(name)
        return f"[{shown}](#{_anchor(found)})" if found else shown

    def as_another(match: re.Match[str]) -> str:
        rpc = match[1]
        return f"as [{rpc}](#{_anchor(rpcs[rpc])}) does" if rpc in rpcs else match[0]

    def link(text: str) -> str:
        text = re.sub(r"`([^`]*)`|\b([A-Z]+(?:_[A-Z]+)*)\b", quoted_or_upper, text)
        return re.sub(r"\bas (\w+) does\b", as_another, text)

    return link
