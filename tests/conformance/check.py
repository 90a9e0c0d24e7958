"""The list of cases, as the Python programs read it, and checks of what a program saw."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, json_format, symbol_database
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from legato.v1 import inference_pb2, media_pb2, session_pb2

from tests import grammar

MODEL = "legato-tiny"
CASES = Path(__file__).with_name("cases.json")

Json = Any  # a JSON document
Step = dict[str, Json]
Case = dict[str, Json]


def load(path: Path = CASES, run: str = "$RUN", model: str = MODEL) -> list[Case]:
    """Return all cases that hold for a model in order, with the name of a run filled in."""
    text = path.read_text().replace("$RUN", run).replace(MODEL, model)
    cases: list[Case] = json.loads(text)
    return [case for case in cases if model == MODEL or "only" not in case]


def fill(template: Json, images: Path, done: list[Step]) -> Json:
    """Fill images and earlier responses into a message template."""
    if isinstance(template, list):
        return [fill(each, images, done) for each in template]
    if not isinstance(template, dict):
        return template
    if "$file" in template:
        return base64.b64encode((images / template["$file"]).read_bytes()).decode()
    if "$step" in template:
        found = done[template["$step"]]["messages"][-1]
        for name in template["at"].split("."):
            found = found[name]
        return found
    if "$checkpoint" in template:
        return checkpoint_of(done[template["$checkpoint"]]["messages"])
    return {name: fill(value, images, done) for name, value in template.items()}


def checkpoint_of(messages: list[Json]) -> Json:
    """Return the sum of a stream's checkpoints, as protobuf merges them."""
    whole: dict[str, Json] = {}
    for message in messages:
        for name, value in message.get("checkpoint", {}).items():
            whole[name] = whole.get(name, []) + value if isinstance(value, list) else value
    return whole


COORDINATES = {"x", "y", "xMin", "yMin", "xMax", "yMax"}

Rule = Callable[[Case, int, list[Step]], None]


def check(case: Case, seen: list[Step]) -> None:
    """Raise AssertionError with the place of the first difference."""
    seen = [plain(step) for step in seen]
    for number, (step, saw) in enumerate(zip(case["steps"], seen, strict=True)):
        expect = step["expect"]
        assert saw["code"] == expect["code"], f"step {number}: {saw}"
        messages = saw["messages"]
        count = expect.get("count", len(messages))
        assert len(messages) == count, f"step {number}: {len(messages)} messages"
        for place, pattern in (("first", 0), ("last", -1)):
            if place in expect:
                match(expect[place], messages[pattern], f"step {number}, {place}")
        if "error" in expect:
            match(expect["error"], details_of(saw["details"]), f"step {number}, error")
        for rule in expect.get("rules", ()):
            RULES[rule](case, number, seen)


def match(pattern: Json, found: Json, at: str) -> None:
    """Match a document against a pattern of the list."""
    if pattern == "*":
        assert found not in (None, "", [], {}), f"{at} is absent"
    elif isinstance(pattern, dict):
        assert isinstance(found, dict), f"{at} is {found}"
        for name, value in pattern.items():
            match(value, found.get(name), f"{at}.{name}")
    elif isinstance(pattern, list):
        assert isinstance(found, list), f"{at} is {found}"
        assert len(found) == len(pattern), f"{at} is {found}"
        for number, value in enumerate(pattern):
            match(value, found[number], f"{at}[{number}]")
    else:
        assert found == pattern, f"{at} is {found}, not {pattern}"


# ---------------------------------------------------------------- errors


def plain(document: Json) -> Json:
    """Convert all Any messages to protobuf's own JSON.

    Programs that lack a type print its bytes instead.
    """
    if isinstance(document, list):
        return [plain(each) for each in document]
    if not isinstance(document, dict):
        return document
    if "@type" not in document:
        return {name: plain(value) for name, value in document.items()}
    return json_format.MessageToDict(unpacked(document))


def unpacked(document: dict[str, Json]) -> Message:
    """Return the Any of a document."""
    packed = any_pb2.Any(type_url=document["@type"])
    if "@value" in document:
        packed.value = base64.b64decode(document["@value"])
        return packed
    known = dict(document)
    known.pop("@type")
    kind = symbol_database.Default().GetSymbol(packed.TypeName())
    packed.Pack(json_format.ParseDict(known, kind()))
    return packed


def details_of(details: list[Json]) -> dict[str, Json]:
    """Return the content of a status's details."""
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.RequestInfo()
    bad = error_details_pb2.BadRequest()
    for detail in details:
        packed = json_format.ParseDict(detail, any_pb2.Any())
        for message in (info, request, bad):
            packed.Unpack(message)
    assert info.domain == "legato", details
    return {
        "reason": info.reason,
        "metadata": dict(info.metadata),
        "fields": [violation.field for violation in bad.field_violations],
        "requestId": request.request_id,
    }


# ---------------------------------------------------------------- rules


def check_places(case: Case, number: int, seen: list[Step]) -> None:
    """Check that there are boxes or points, all in the unit square, edges in order."""
    places = list(found(seen[number]["messages"], "box", "point"))
    assert places
    for place in places:
        assert all(0 <= share <= 1 for share in place.values()), place
        if "xMax" in place:
            assert place.get("xMin", 0) <= place.get("xMax", 0), place
            assert place.get("yMin", 0) <= place.get("yMax", 0), place


def found(document: Json, *names: str) -> Iterator[dict[str, float]]:
    """Return all coordinates under members of these names, at any depth."""
    if isinstance(document, list):
        for each in document:
            yield from found(each, *names)
    elif isinstance(document, dict):
        for name, value in document.items():
            if name in names and isinstance(value, dict) and value.keys() <= COORDINATES:
                yield value
            else:
                yield from found(value, *names)


def check_generate(case: Case, number: int, seen: list[Step]) -> None:
    """Check the grammar of a stream, and that `finished` repeats the deltas."""
    events = [
        json_format.ParseDict(message, inference_pb2.GenerateResponse())
        for message in seen[number]["messages"]
    ]
    grammar.check(events, ok=True)
    assert len(events) > 2, "nothing came between started and finished"


def check_session(case: Case, number: int, seen: list[Step]) -> None:
    """Check that every frame has a result for each task, with its stamp verbatim."""
    answers = [
        json_format.ParseDict(message, session_pb2.SessionResponse())
        for message in seen[number]["messages"]
    ]
    assert [answer.index for answer in answers] == list(range(len(answers)))
    assert not any(answer.HasField("dropped") for answer in answers)
    results = [answer.result for answer in answers if answer.HasField("result")]
    opened, *frames = case["steps"][number]["send"]
    standing = [task["taskId"] for task in opened["open"]["standingTasks"]]
    for frame in (message["frame"] for message in frames):
        stamp = json_format.ParseDict(frame["stamp"], media_pb2.FrameStamp())
        own = [result for result in results if result.stamp == stamp]
        tasks = [] if frame.get("skipStandingTasks") else list(standing)
        tasks += [task["taskId"] for task in frame.get("extraTasks", ())]
        assert sorted(result.result.task_id for result in own) == sorted(tasks)
        assert [result.last_for_frame for result in own] == [False] * (len(tasks) - 1) + [True]
        is_picture = "$file" in frame["image"]["encoded"]["data"]
        assert all(result.result.HasField("error") != is_picture for result in own)
        results = [result for result in results if result.stamp != stamp]
    assert not results, "results of frames that were not sent"


def check_tracks(case: Case, number: int, seen: list[Step]) -> None:
    """Check that frames of one picture have the same tracks, moving by estimate, and their age."""
    answers = [
        json_format.ParseDict(message, session_pb2.SessionResponse())
        for message in seen[number]["messages"]
    ]
    results = [answer.result for answer in answers if answer.HasField("result")]
    assert all(result.HasField("age") for result in results)
    tracks = [[each.track_id for each in r.result.detect.objects] for r in results]
    assert "" not in tracks[0]
    assert len(set(tracks[0])) == len(tracks[0]) > 0
    assert all(sorted(each) == sorted(tracks[0]) for each in tracks)
    for each in (each for result in results for each in result.result.detect.objects):
        assert each.motion.position.width > 0
        assert each.motion.velocity_deviation.center_x > 0


def check_as_before(case: Case, number: int, seen: list[Step]) -> None:
    """Check that the response equals that of the step before."""
    (before,), (after,) = seen[number - 1]["messages"], seen[number]["messages"]
    assert after["answer"] == before["answer"]


def check_goes_on(case: Case, number: int, seen: list[Step]) -> None:
    """Check that a stream tells what the step before has not: together they are its result."""
    told = [
        json_format.ParseDict(message, inference_pb2.GenerateResponse())
        for step in seen[number - 1 : number + 1]
        for message in step["messages"]
    ]
    result = told[-1].finished.result
    assert "".join(event.text.text for event in told) == result.query.answer
    boxes = [event.object.box for event in told if event.HasField("object")]
    assert boxes == [each.box for each in result.detect.objects]
    assert result.query.answer or boxes, result


def check_as_resumed(case: Case, number: int, seen: list[Step]) -> None:
    """Check that the answer equals that of the stream before."""
    (whole,), resumed = seen[number]["messages"], seen[number - 1]["messages"][-1]
    assert whole["answer"] == resumed["finished"]["result"]["query"]["answer"]


RULES: dict[str, Rule] = {
    "places": check_places,
    "generate": check_generate,
    "session": check_session,
    "tracks": check_tracks,
    "as_before": check_as_before,
    "goes_on": check_goes_on,
    "as_resumed": check_as_resumed,
}
