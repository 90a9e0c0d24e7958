"""A request as a program in Go."""

from __future__ import annotations

import json
from collections.abc import Iterator

from legato_client._convert import skills
from legato_client._values.results import Point
from legato_client._values.tasks import (
    CaptionTask,
    DetectTask,
    Message,
    Options,
    PointTask,
    QueryTask,
    Sampling,
    SpatialRef,
    Task,
)
from legato_client.web.playground.snippets.connection import Connection

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


def program(connection: Connection, picture: str | None, task: Task, options: Options) -> str:
    """Prints every event of one task as it comes."""
    dial = list(_dial(connection))
    imports = ["context", "fmt", "log", *(["os"] if connection.token else [])]
    image = "nil" if picture is None else f"legato.File({_string(picture)})"
    return _PROGRAM.format(
        imports="\n".join(f'\t"{name}"' for name in imports),
        dial=", ".join(dial),
        task=_task(task),
        asked=", ".join((image, "task", *_call_options(options))),
    )


def _dial(connection: Connection) -> Iterator[str]:
    yield _string(connection.target)
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
            first = _string(getattr(task, skill.subject))
    arguments = [first, *_task_options(task)]
    return f"legato.{name}({', '.join(arguments)})"


def _messages(messages: tuple[Message, ...]) -> str:
    lines = "".join(
        f"\t\tlegato.{_ROLES[each.role]}({_string(_text(each))}),\n" for each in messages
    )
    return f"[]legato.Message{{\n{lines}\t}}"


def _text(message: Message) -> str:
    assert isinstance(message.content, str), "the page's conversations have words only"
    return message.content


def _task_options(task: Task) -> Iterator[str]:
    if isinstance(task, DetectTask | PointTask) and task.max_objects is not None:
        yield f"legato.WithMaxObjects({task.max_objects})"
    if isinstance(task, DetectTask | PointTask):
        if task.min_confidence is not None:
            yield f"legato.WithMinConfidence({task.min_confidence:g})"
        if task.order == "confidence":
            yield "legato.WithOrder(legato.OrderConfidence)"
    if isinstance(task, QueryTask) and task.reasoning:
        yield "legato.WithReasoning()"
    if refs := getattr(task, "spatial_refs", ()):
        yield f"legato.WithRefs({', '.join(map(_place, refs))})"
    yield from _sampling(task.sampling)
    if task.task_id:
        yield f"legato.WithTaskID({_string(task.task_id)})"


def _place(place: SpatialRef) -> str:
    if isinstance(place, Point):
        return f"legato.Point{{X: {place.x:g}, Y: {place.y:g}}}"
    low = f"XMin: {place.x_min:g}, YMin: {place.y_min:g}"
    return f"legato.Box{{{low}, XMax: {place.x_max:g}, YMax: {place.y_max:g}}}"


def _sampling(sampling: Sampling) -> Iterator[str]:
    if sampling.temperature is not None:
        yield f"legato.WithTemperature({sampling.temperature:g})"
    if sampling.top_p is not None:
        yield f"legato.WithTopP({sampling.top_p:g})"
    if sampling.top_k is not None:
        yield f"legato.WithTopK({sampling.top_k})"
    if sampling.max_tokens is not None:
        yield f"legato.WithMaxTokens({sampling.max_tokens})"
    if sampling.seed is not None:
        yield f"legato.WithSeed({sampling.seed})"
    if sampling.stop:
        yield f"legato.WithStop({', '.join(map(_string, sampling.stop))})"


def _call_options(options: Options) -> Iterator[str]:
    if options.top_logprobs is not None:
        yield f"legato.WithAlternatives({options.top_logprobs})"
    if options.model:
        yield f"legato.WithModel({_string(options.model)})"
    if options.adapter:
        yield f"legato.WithAdapter({_string(options.adapter)})"
    if options.request_id:
        yield f"legato.WithRequestID({_string(options.request_id)})"


def _string(text: str) -> str:
    """An interpreted string literal: JSON's escapes are Go's, but for pairs of surrogates."""
    return json.dumps(text, ensure_ascii=False)
