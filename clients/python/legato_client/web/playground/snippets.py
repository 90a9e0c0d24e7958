"""A request of the page as code: Python, Go, grpcurl."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import json_format

from legato_client._proto import requests, skills
from legato_client._types.results import Box, Point
from legato_client._types.tasks import (
    CaptionTask,
    Message,
    Options,
    QueryTask,
    ResponseFormat,
    Sampling,
    Task,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """A target of gRPC, and which options of security it needs.

    `authorities` and `certificate`: the server's authorities are in a file of one's own, and the
    server asks for a client's certificate.
    """

    target: str
    encrypted: bool = False
    authorities: bool = False
    certificate: bool = False
    token: bool = False


# ---------------------------------------------------------------- python

_WIDTH = 88


def python_program(connection: Connection, image: str | None, task: Task, options: Options) -> str:
    """Write a Python program that prints every event of one task as it comes."""
    names, files = {"Client", *_names(task)}, _shown(task)
    asked = ["None" if files else expression(image), "task"]
    if options != Options():
        names |= {*_names(options)}
        asked.append(f"options={expression(options)}")
    lines = [
        *(("from pathlib import Path", "") if files else ()),
        f"from legato_client import {', '.join(sorted(names))}",
        "",
        f"task = {expression(task)}",
        f"with Client({', '.join(_arguments(connection))}) as client:",
        f"    for event in client.generate({', '.join(asked)}):",
        "        print(event)",
    ]
    note = ["# the token is taken from the environment: LEGATO_TOKEN"] if connection.token else []
    return "\n".join((*note, *lines)) + "\n"


def expression(value: object, indent: int = 0) -> str:
    """Return the constructor expression of a value, omitting defaults."""
    if isinstance(value, tuple):
        items = [expression(each, indent + 4) for each in value]
        return _call("(", items, ",)" if len(items) == 1 else ")", indent)
    if isinstance(value, str):
        return _python_text(value)
    if isinstance(value, Path):
        return f"Path({_python_text(str(value))})"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    arguments, by_name = [], False
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if given == field.default:
            by_name = True  # arguments after an omitted one must be named
            continue
        shown = expression(given, indent + 4)
        arguments.append(f"{field.name}={shown}" if by_name else shown)
    return _call(f"{type(value).__name__}(", arguments, ")", indent)


def _python_text(value: str) -> str:
    """Quote a string with double quotes unless it contains some."""
    shown = repr(value)
    if shown[0] == '"' or '"' in shown:
        return shown
    return f'"{shown[1:-1]}"'


def _call(head: str, items: list[str], tail: str, indent: int) -> str:
    line = f"{head}{', '.join(items)}{tail}"
    if len(line) + indent <= _WIDTH or not items:
        return line
    margin = " " * indent
    body = "".join(f"\n{margin}    {each}," for each in items)
    return f"{head}{body}\n{margin}{tail.lstrip(',')}"


def _names(value: object) -> Iterator[str]:
    if isinstance(value, tuple):
        for each in value:
            yield from _names(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__
        for field in dataclasses.fields(value):
            if getattr(value, field.name) != field.default:
                yield from _names(getattr(value, field.name))


def _shown(task: Task) -> list[str]:
    """Return the files that the messages of a task show."""
    messages = task.messages if isinstance(task, QueryTask) else ()
    return [str(part) for each in messages for part in each.content if isinstance(part, Path)]


def _arguments(connection: Connection) -> Iterator[str]:
    yield _python_text(connection.target)
    if connection.authorities:
        yield 'ca="ca.pem"'
    if connection.certificate:
        yield 'cert="client.pem", key="client-key.pem"'
    if connection.encrypted and not (connection.authorities or connection.certificate):
        yield "tls=True"


# ---------------------------------------------------------------- golang

_PROGRAM = """\
package main

import (
{imports}

\t"github.com/legato-vlm/legato/clients/go/legato"
)

func main() {{
\tclient, err := legato.Dial({dial})
\tif err != nil {{
\t\tlog.Fatal(err)
\t}}
\tdefer client.Close()
\ttask := {task}
\tfor event, err := range client.Generate(context.Background(), {asked}) {{
\t\tif err != nil {{
\t\t\tlog.Fatal(err)
\t\t}}
\t\tfmt.Printf("%T %+v\\n", event, event)
\t}}
}}
"""
_LENGTHS = {"short": "ShortCaption", "normal": "NormalCaption", "long": "LongCaption"}
_ROLES = {"system": "SystemMessage", "user": "UserMessage", "assistant": "AssistantMessage"}


def go_program(connection: Connection, image: str | None, task: Task, options: Options) -> str:
    """Write a Go program that prints every event of one task as it comes."""
    dial = list(_dial(connection))
    imports = ["context", "fmt", "log", *(["os"] if connection.token else [])]
    sent = "nil" if image is None or _shown(task) else _go(Path(image))
    return _PROGRAM.format(
        imports="\n".join(f'\t"{name}"' for name in imports),
        dial=", ".join(dial),
        task=_task(task),
        asked=", ".join((sent, "task", *_options(options))),
    )


def _dial(connection: Connection) -> Iterator[str]:
    yield _go(connection.target)
    if connection.authorities:
        yield 'legato.WithCA("ca.pem")'
    if connection.certificate:
        yield 'legato.WithClientCertificate("client.pem", "client-key.pem")'
    if connection.encrypted and not (connection.authorities or connection.certificate):
        yield "legato.WithTLS(nil)"
    if connection.token:
        yield 'legato.WithToken(os.Getenv("LEGATO_TOKEN"))'


def _task(task: Task) -> str:
    skill = skills.of(task)
    name = f"{skill.name.capitalize()}Task"
    match task:
        case QueryTask() if task.messages:
            name, first = "ChatTask", _messages(task.messages)
        case CaptionTask():
            first = f"legato.{_LENGTHS[task.length]}"
        case _:
            first = _go(getattr(task, skill.subject))
    arguments = [first, *_task_options(task)]
    return f"legato.{name}({', '.join(arguments)})"


def _messages(messages: tuple[Message, ...]) -> str:
    lines = "".join(f"\t\tlegato.{_said(each)},\n" for each in messages)
    return f"[]legato.Message{{\n{lines}\t}}"


def _said(message: Message) -> str:
    if isinstance(message.content, str):
        return f"{_ROLES[message.role]}({_go(message.content)})"
    parts = [
        f"legato.Words({_go(part)})" if isinstance(part, str) else "legato.Shown()"
        for part in message.content
    ]
    return f"UserParts({', '.join(parts)})"


_OPTIONS = {
    "max_objects": "MaxObjects",
    "min_confidence": "MinConfidence",
    "spatial_refs": "Refs",
    "temperature": "Temperature",
    "top_p": "TopP",
    "top_k": "TopK",
    "max_tokens": "MaxTokens",
    "seed": "Seed",
    "stop": "Stop",
    "task_id": "TaskID",
    "top_logprobs": "Alternatives",
    "model": "Model",
    "adapter": "Adapter",
    "request_id": "RequestID",
    "choices": "Choices",
    "regex": "Regex",
    "grammar": "Grammar",
}
"""Go's options by the fields that they set."""


def _options(value: Task | Sampling | Options | ResponseFormat) -> Iterator[str]:
    """Yield an option for each field that has a value."""
    for name, option in _OPTIONS.items():
        given = getattr(value, name, None)
        if given not in (None, "", ()):
            yield f"legato.With{option}({_go(given)})"


def _task_options(task: Task) -> Iterator[str]:
    yield from _options(task)
    if getattr(task, "order", "") == "confidence":
        yield "legato.WithOrder(legato.OrderConfidence)"
    if isinstance(task, QueryTask):
        if task.reasoning:
            yield "legato.WithReasoning()"
        if files := _shown(task):
            yield f"legato.WithImages({_go(tuple(map(Path, files)))})"
        if wanted := task.response_format:
            yield from _options(wanted)
            if (schema := wanted.json_schema) is not None:
                text = schema if isinstance(schema, str) else json.dumps(schema)
                yield f"legato.WithJSONSchema({_go(text)})"
    yield from _options(task.sampling)


def _go(value: object) -> str:
    """Write a literal; JSON's escapes are Go's, except for surrogate pairs."""
    match value:
        case tuple():
            return ", ".join(map(_go, value))
        case Path():
            return f"legato.File({_go(str(value))})"
        case Point(x, y):
            return f"legato.Point{{X: {x:g}, Y: {y:g}}}"
        case Box(left, top, right, bottom):
            low = f"XMin: {left:g}, YMin: {top:g}"
            return f"legato.Box{{{low}, XMax: {right:g}, YMax: {bottom:g}}}"
        case float():
            return f"{value:g}"
        case _:
            return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- grpcurl

_METHOD = "legato.v1.InferenceService/Generate"


def command(connection: Connection, image: str | None, task: Task, options: Options) -> str:
    """Write a grpcurl command that prints every event; the server supplies the contract."""
    request = requests.generate(None, task, options)
    document = json_format.MessageToDict(request, preserving_proto_field_name=True)
    files = _shown(task)
    if files:  # the last member of the last member, so that they can be put at the text's end
        asked = document.pop("task")
        query = {**asked.pop("query"), "images": []}
        document["task"] = {**asked, "query": query}
    text = _quoted(json.dumps(document, ensure_ascii=False))
    if files:
        shown = ", ".join(f"{{{_encoded(name)}}}" for name in files)
        text = f"{text.removesuffix('[]}}}')}[{shown}]}}}}}}"
    elif image is not None:
        text = f"{text[:-1]}, {_encoded(image)}}}"
    words = ["grpcurl", *_security(connection), "-d @", connection.target, _METHOD, "<<JSON"]
    return f"{' '.join(words)}\n{text}\nJSON\n"


def _encoded(name: str) -> str:
    return f'"image": {{"encoded": {{"data": "$(base64 -w0 {name})"}}}}'


def _quoted(text: str) -> str:
    """Escape backslash, dollar and backquote for an expanding here-document."""
    return text.replace("\\", "\\\\").replace("$", "\\$").replace("`", "\\`")


def _security(connection: Connection) -> list[str]:
    words = [] if connection.encrypted else ["-plaintext"]
    if connection.authorities:
        words.append("-cacert ca.pem")
    if connection.certificate:
        words.append("-cert client.pem -key client-key.pem")
    if connection.token:
        words.append('-H "authorization: Bearer $LEGATO_TOKEN"')
    return words


# ---------------------------------------------------------------- snippets

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """Programs that make one request."""

    python: str
    go: str
    grpcurl: str


def file_name(name: str, number: int | None = None) -> str:
    """Return a name that needs no quotes: `name`, or that of the image of a number."""
    if _FILE_NAME.fullmatch(name):
        return name
    return "image.jpg" if number is None else f"image-{number}.jpg"


def code(connection: Connection, image: str | None, task: Task, options: Options) -> Code:
    """Return the code of a request about a file's image, or about those that its messages show."""
    name = None if image is None else file_name(image)
    return Code(
        python_program(connection, name, task, options),
        go_program(connection, name, task, options),
        command(connection, name, task, options),
    )
