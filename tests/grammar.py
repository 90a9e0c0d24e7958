"""The grammar of Generate, checked event by event; for every test that reads a stream.

    stream    = *queued started *( delta / heartbeat ) finished
    delta     = text / reasoning / point / object / outline / tokens

with heartbeats also before `started`, `index` without a gap, and `finished` repeating every delta.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable

from legato.v1 import inference_pb2, task_pb2

DELTAS = frozenset({"text", "reasoning", "point", "object", "outline", "tokens"})

TOKENS = frozenset({"text", "reasoning", "tokens"})


class Grammar:
    """Feed it a stream's events in order; raises AssertionError at the first broken rule."""

    def __init__(self) -> None:
        self.events: list[inference_pb2.GenerateResponse] = []
        self._started: inference_pb2.Started | None = None
        self._finished = False

    def feed(self, event: inference_pb2.GenerateResponse) -> None:
        """The next event."""
        kind = event.WhichOneof("event")
        assert not self._finished, f"{kind} after finished"
        assert event.index == len(self.events), f"index {event.index}, not {len(self.events)}"
        self.events.append(event)
        if kind == "queued":
            assert self._started is None, "queued after started"
        elif kind == "started":
            assert self._started is None, "started twice"
            assert event.started.request_id
            assert event.started.model
            self._started = event.started
        elif kind in DELTAS:
            assert self._started is not None, f"{kind} before started"
        elif kind == "finished":
            assert self._started is not None, "finished before started"
            self._finished = True
            self._check_finished(event.finished, self._started)
        else:
            assert kind == "heartbeat", f"unknown event {kind}"

    def end(self, *, ok: bool) -> None:
        """The stream's end: `finished` if and only if the status is OK."""
        assert self._finished == ok, f"finished: {self._finished}, status OK: {ok}"

    def of(self, kind: str) -> list[inference_pb2.GenerateResponse]:
        """The events of one kind."""
        return [event for event in self.events if event.WhichOneof("event") == kind]

    @property
    def tokens(self) -> list[inference_pb2.Token]:
        """Every token that the deltas told, in order."""
        told: list[inference_pb2.Token] = []
        for event in self.events:
            kind = event.WhichOneof("event")
            if kind in TOKENS:
                told += getattr(event, kind).tokens
        return told

    def _check_finished(
        self, finished: inference_pb2.Finished, started: inference_pb2.Started
    ) -> None:
        info, result = finished.info, finished.result
        assert info.request_id == started.request_id
        assert info.model == started.model
        assert info.image == started.image
        assert info.finish_reason == result.finish_reason != task_pb2.FINISH_REASON_UNSPECIFIED
        assert info.usage == result.usage
        assert info.usage.input_tokens == started.input_tokens
        assert list(info.tokens) == self.tokens
        kind = result.WhichOneof("result")
        assert kind is not None, "finished without a result"
        assert kind != "error"
        self._check_repeats(result, kind)

    def _check_repeats(self, result: task_pb2.TaskResult, kind: str) -> None:
        text = "".join(event.text.text for event in self.of("text"))
        thoughts = "".join(event.reasoning.text for event in self.of("reasoning"))
        if kind == "query":
            assert result.query.answer == text
            assert result.query.reasoning.text == thoughts
            spans = [span for event in self.of("reasoning") for span in event.reasoning.grounding]
            assert list(result.query.reasoning.grounding) == spans
        elif kind == "caption":
            assert result.caption.caption == text
        elif kind == "detect":
            assert list(result.detect.objects) == [event.object for event in self.of("object")]
        elif kind == "point":
            assert list(result.point.points) == [event.point for event in self.of("point")]
        else:
            self._check_outlines(result.segment)

    def _check_outlines(self, result: task_pb2.SegmentResult) -> None:
        boxed: set[int] = set()
        paths: dict[int, str] = {}
        for event in self.of("outline"):
            outline = event.outline
            first = outline.index not in boxed
            assert outline.HasField("box") == first, "an outline's box comes first, once"
            boxed.add(outline.index)
            paths[outline.index] = paths.get(outline.index, "") + outline.path_delta
        for index, segment in enumerate(result.segments):
            assert not segment.coarse or segment.path == paths.get(index, "")


async def replay(stream: AsyncIterable[inference_pb2.GenerateResponse]) -> Grammar:
    """All of a stream that ends well, checked."""
    grammar = Grammar()
    async for event in stream:
        grammar.feed(event)
    grammar.end(ok=True)
    return grammar


def check(events: Iterable[inference_pb2.GenerateResponse], *, ok: bool) -> Grammar:
    """Events already read, checked."""
    grammar = Grammar()
    for event in events:
        grammar.feed(event)
    grammar.end(ok=ok)
    return grammar
