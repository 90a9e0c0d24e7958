"""Answers that are written into one message after another have nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato.v1 import inference_pb2 as pb
from legato.v1 import media_pb2
from legato_engine import core
from legato_engine.core import RequestKey
from legato_engine.ipc.messages import Done
from legato_service.convert import responses
from legato_service.convert.info import Answers

TEXT = st.text("ab é", max_size=4)
UNIT = st.floats(0, 1, width=32)
SMALL = st.integers(0, 3)
BOX = st.builds(core.Box, x_min=UNIT, y_min=UNIT, x_max=UNIT, y_max=UNIT)
POINT = st.builds(core.Point, x=UNIT, y=UNIT)
GROUNDING = st.builds(
    core.Grounding, start_index=SMALL, end_index=SMALL, points=st.tuples(POINT) | st.just(())
)


def several(each: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    """None, one or two of them."""
    return st.lists(each, max_size=2).map(tuple)


RESULTS: dict[str, tuple[Any, Callable[[Any, Any], None], st.SearchStrategy[core.TaskResult]]] = {
    "query": (
        pb.QueryResponse,
        responses.fill_query,
        st.builds(
            core.QueryResult,
            answer=TEXT,
            reasoning=st.none() | TEXT,
            grounding=several(GROUNDING),
        ),
    ),
    "caption": (
        pb.CaptionResponse,
        responses.fill_caption,
        st.builds(core.CaptionResult, caption=TEXT),
    ),
    "detect": (
        pb.DetectResponse,
        responses.fill_objects,
        st.builds(
            core.DetectResult, objects=several(st.builds(core.ObjectEvent, box=BOX, label=TEXT))
        ),
    ),
    "point": (
        pb.PointResponse,
        responses.fill_points,
        st.builds(
            core.PointResult, points=several(st.builds(core.PointEvent, point=POINT, label=TEXT))
        ),
    ),
    "segment": (
        pb.SegmentResponse,
        responses.fill_segments,
        st.builds(
            core.SegmentResult,
            segments=several(
                st.builds(core.Outline, path=TEXT, box=BOX, label=TEXT, coarse=st.booleans())
            ),
        ),
    ),
}
SECONDS = st.sampled_from([0.0, 0.25, 0.499, 1.0, 61.5])
IMAGE = st.builds(core.ImageInfo, image_id=TEXT, width=SMALL, height=SMALL, cache_hit=st.booleans())
TOKEN = st.builds(
    core.TokenInfo,
    token_id=SMALL,
    text=TEXT,
    logprob=st.none() | UNIT,
    coordinate=st.none() | UNIT,
    size=st.none(),
)
TIMES = st.sampled_from([0.0, 1.5e-6, 0.003, 0.4, 0.999_999_999_9, 1.25, 3600.5])
PARTS = ("queue", "image", "prefill", "first_token", "decode", "total")
TIMINGS = st.builds(
    lambda parts: core.Timings(**dict(zip(PARTS, (*parts, sum(parts)), strict=True))),
    st.tuples(*[SECONDS] * 5),
)
STAMP = st.builds(media_pb2.FrameStamp, frame_id=TEXT, sequence=SMALL)


def ends(result: st.SearchStrategy[core.TaskResult]) -> st.SearchStrategy[Done]:
    """How requests of one skill may end."""
    return st.builds(
        Done,
        request_id=st.just(RequestKey("engine's own")),
        result=result,
        finish_reason=st.sampled_from(core.FinishReason),
        usage=st.builds(core.Usage, *[SMALL] * 5),
        timings=TIMINGS,
        image=st.none() | IMAGE,
        tokens=several(TOKEN),
    )


@pytest.mark.parametrize("skill", RESULTS)
@given(data=st.data())
def test_an_answer_has_nothing_of_those_before_it(skill: str, data: st.DataObject) -> None:
    """It is what a message of its own would be, whatever was written before."""
    response, fill, results = RESULTS[skill]
    asked = st.tuples(TEXT, TEXT, ends(results), st.none() | STAMP)
    answers: Sequence[tuple[str, str, Done, media_pb2.FrameStamp | None]]
    answers = data.draw(st.lists(asked, min_size=2, max_size=4))
    shared = Answers(response, fill)
    for answer in answers:
        own = Answers(response, fill).write(*answer)
        assert response.FromString(shared.write(*answer)) == response.FromString(own)


@given(value=st.builds(core.Timings, **dict.fromkeys(PARTS, TIMES)))
def test_times_are_told_to_the_nanosecond(value: core.Timings) -> None:
    """Each part is there, rounded, with whole seconds apart."""
    usage = core.Usage(input_tokens=1, output_tokens=1)
    result, reason = core.CaptionResult(caption="yes"), core.FinishReason.STOP
    done = Done(
        request_id=RequestKey("r"), result=result, finish_reason=reason, usage=usage, timings=value
    )
    answers = Answers(pb.CaptionResponse, responses.fill_caption)
    told = pb.CaptionResponse.FromString(answers.write("r", "m", done, None)).info.timings
    for name in PARTS:
        assert told.HasField(name)  # type: ignore[arg-type]  # any of their names
        part = getattr(told, name)
        assert 0 <= part.nanos < 1_000_000_000
        assert part.ToNanoseconds() == round(getattr(value, name) * 1e9)


def test_an_answer_that_cannot_be_written_leaves_nothing_behind() -> None:
    """A picture that is too wide for the contract fails after its name was set."""
    usage, timings = core.Usage(1, 1), core.Timings()
    plain = Done("a", core.CaptionResult("x"), core.FinishReason.STOP, usage, timings)
    image = core.ImageInfo(image_id="secret", width=1 << 40, height=1, cache_hit=False)
    token = core.TokenInfo(token_id=7)
    bad = Done("b", plain.result, core.FinishReason.STOP, usage, timings, image, (token,))
    shared = Answers(pb.CaptionResponse, responses.fill_caption)
    with pytest.raises(ValueError, match="range"):
        shared.write("b", "model", bad, media_pb2.FrameStamp(frame_id="secret"))
    own = Answers(pb.CaptionResponse, responses.fill_caption)
    assert shared.write("a", "model", plain, None) == own.write("a", "model", plain, None)
