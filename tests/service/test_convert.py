"""Responses say what results hold, each of them nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato.v1 import inference_pb2 as pb
from legato.v1 import media_pb2
from legato_engine.ipc.messages import Done
from legato_engine.types import (
    CaptionOutput,
    DetectOutput,
    FinishReason,
    GroundedText,
    ImageBox,
    ImagePoint,
    ImageProperties,
    MaskOutline,
    ObjectEvent,
    PointEvent,
    PointOutput,
    QueryOutput,
    RequestKey,
    RequestTimings,
    SegmentOutput,
    TaskOutput,
    TokenInfo,
    TokenUsage,
)
from legato_service.convert import skills
from legato_service.convert.responses import FINISH_REASONS, fill_info

TEXT = st.text("ab é", max_size=4)
UNIT = st.floats(0, 1, width=32)
SMALL = st.integers(0, 3)
BOX = st.builds(ImageBox, x_min=UNIT, y_min=UNIT, x_max=UNIT, y_max=UNIT)
POINT = st.builds(ImagePoint, x=UNIT, y=UNIT)
GROUNDING = st.builds(
    GroundedText, start_index=SMALL, end_index=SMALL, points=st.tuples(POINT) | st.just(())
)


def several(each: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    """Draw none, one or two values."""
    return st.lists(each, max_size=2).map(tuple)


RESULTS: dict[str, tuple[Callable[[Any], Any], st.SearchStrategy[Any]]] = {
    "query": (
        skills.QUERY.answer,
        st.builds(
            QueryOutput,
            answer=TEXT,
            reasoning=st.none() | TEXT,
            grounding=several(GROUNDING),
        ),
    ),
    "caption": (skills.CAPTION.answer, st.builds(CaptionOutput, caption=TEXT)),
    "detect": (
        skills.DETECT.answer,
        st.builds(DetectOutput, objects=several(st.builds(ObjectEvent, box=BOX, label=TEXT))),
    ),
    "point": (
        skills.POINT.answer,
        st.builds(PointOutput, points=several(st.builds(PointEvent, point=POINT, label=TEXT))),
    ),
    "segment": (
        skills.SEGMENT.answer,
        st.builds(
            SegmentOutput,
            segments=several(
                st.builds(MaskOutline, path=TEXT, box=BOX, label=TEXT, coarse=st.booleans())
            ),
        ),
    ),
}
SECONDS = st.sampled_from([0.0, 0.25, 0.499, 1.0, 61.5])
IMAGE = st.builds(
    ImageProperties, image_id=TEXT, width=SMALL, height=SMALL, cache_hit=st.booleans()
)
TOKEN = st.builds(
    TokenInfo,
    token_id=SMALL,
    text=TEXT,
    piece=st.binary(max_size=3),
    logprob=st.none() | UNIT,
    coordinate=st.none() | UNIT,
    size=st.none(),
)
TIMES = st.sampled_from([0.0, 1.5e-6, 0.003, 0.4, 0.999_999_999_9, 1.25, 3600.5])
PARTS = ("queue", "image", "prefill", "first_token", "decode", "total")
TIMINGS = st.builds(
    lambda parts: RequestTimings(**dict(zip(PARTS, (*parts, sum(parts)), strict=True))),
    st.tuples(*[SECONDS] * 5),
)
STAMP = st.builds(media_pb2.FrameStamp, frame_id=TEXT, sequence=SMALL)


def ends(result: st.SearchStrategy[TaskOutput]) -> st.SearchStrategy[Done]:
    """How requests of one skill may end."""
    return st.builds(
        Done,
        request_id=st.just(RequestKey("engine's own")),
        result=result,
        finish_reason=st.sampled_from(FinishReason),
        usage=st.builds(TokenUsage, *[SMALL] * 5),
        timings=TIMINGS,
        image=st.none() | IMAGE,
        tokens=several(TOKEN),
    )


def response_of(
    convert: Callable[[Any], Any], request_id: str, model: str, done: Done, stamp: Any
) -> Any:
    """Convert a result as the handlers do, and read it as a client does."""
    response = convert(done.result)
    fill_info(response.info, request_id, model, done, stamp)
    return type(response).FromString(response.SerializeToString())


def box_of(message: Any) -> ImageBox:
    """Read a box."""
    return ImageBox(
        x_min=message.x_min, y_min=message.y_min, x_max=message.x_max, y_max=message.y_max
    )


def result_of(response: Any) -> TaskOutput:
    """Read a result from a response."""
    match response:
        case pb.QueryResponse():
            reasoning = response.reasoning
            return QueryOutput(
                answer=response.answer,
                reasoning=reasoning.text if response.HasField("reasoning") else None,
                grounding=tuple(
                    GroundedText(
                        start_index=each.start_index,
                        end_index=each.end_index,
                        points=tuple(ImagePoint(x=spot.x, y=spot.y) for spot in each.points),
                    )
                    for each in reasoning.grounding
                ),
            )
        case pb.CaptionResponse():
            return CaptionOutput(caption=response.caption)
        case pb.DetectResponse():
            objects = (
                ObjectEvent(box=box_of(each.box), label=each.label) for each in response.objects
            )
            return DetectOutput(objects=tuple(objects))
        case pb.PointResponse():
            points = (
                PointEvent(point=ImagePoint(x=each.point.x, y=each.point.y), label=each.label)
                for each in response.points
            )
            return PointOutput(points=tuple(points))
    segments = (
        MaskOutline(path=each.path, box=box_of(each.box), label=each.label, coarse=each.coarse)
        for each in response.segments
    )
    return SegmentOutput(segments=tuple(segments))


@pytest.mark.parametrize("skill", RESULTS)
@given(data=st.data())
def test_a_response_says_all_of_its_result_and_nothing_else(
    skill: str, data: st.DataObject
) -> None:
    """Result, names, reason, usage, image, stamp and tokens are read back as they were."""
    convert, results = RESULTS[skill]
    done = data.draw(ends(results))
    request_id, model, stamp = data.draw(st.tuples(TEXT, TEXT, st.none() | STAMP))
    response = response_of(convert, request_id, model, done, stamp)
    info, expected = response.info, done.result
    if isinstance(expected, QueryOutput) and expected.reasoning is None:
        expected = QueryOutput(answer=expected.answer)  # grounding is part of reasoning
    assert result_of(response) == expected
    assert (info.request_id, info.model) == (request_id, model)
    assert info.finish_reason == FINISH_REASONS[done.finish_reason]
    for name in TokenUsage.__struct_fields__:
        assert getattr(info.usage, name) == getattr(done.usage, name)
    for name in ("cached_tokens", "image_tokens", "reasoning_tokens"):
        assert info.usage.HasField(name)
    assert info.HasField("stamp") == (stamp is not None)
    assert stamp is None or info.stamp == stamp
    assert info.HasField("image") == (done.image is not None)
    for name in ImageProperties.__struct_fields__ if done.image is not None else ():
        assert getattr(info.image, name) == getattr(done.image, name)
    tokens = tuple(
        TokenInfo(
            token_id=each.token_id,
            text=each.text,
            logprob=each.logprob if each.HasField("logprob") else None,
            coordinate=each.coordinate if each.HasField("coordinate") else None,
            piece=each.bytes,
        )
        for each in info.tokens
    )
    assert tokens == done.tokens


@given(value=st.builds(RequestTimings, **dict.fromkeys(PARTS, TIMES)))
def test_times_are_sent_to_the_nanosecond(value: RequestTimings) -> None:
    """Each part is there, rounded, with whole seconds apart."""
    usage = TokenUsage(input_tokens=1, output_tokens=1)
    result, reason = CaptionOutput(caption="yes"), FinishReason.STOP
    done = Done(
        request_id=RequestKey("r"),
        result=result,
        finish_reason=reason,
        usage=usage,
        timings=value,
    )
    sent = response_of(skills.CAPTION.answer, "r", "m", done, None).info.timings
    for name in PARTS:
        assert sent.HasField(name)
        part = getattr(sent, name)
        assert 0 <= part.nanos < 1_000_000_000
        assert part.ToNanoseconds() == round(getattr(value, name) * 1e9)


def test_a_response_that_cannot_be_built_leaves_nothing_to_the_next() -> None:
    """An image that is too wide for the contract fails after other fields were set."""
    usage, timings = TokenUsage(1, 1), RequestTimings()
    plain = Done(RequestKey("a"), CaptionOutput("x"), FinishReason.STOP, usage, timings)
    image = ImageProperties(image_id="secret", width=1 << 40, height=1, cache_hit=False)
    token = TokenInfo(token_id=7)
    bad = Done(RequestKey("b"), plain.result, FinishReason.STOP, usage, timings, image, (token,))
    expected = response_of(skills.CAPTION.answer, "a", "model", plain, None)
    with pytest.raises(ValueError, match="range"):
        response_of(
            skills.CAPTION.answer, "b", "model", bad, media_pb2.FrameStamp(frame_id="secret")
        )
    assert response_of(skills.CAPTION.answer, "a", "model", plain, None) == expected
