"""What Moondream's own endpoint takes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from legato_client._values.results import Box
from legato_client._values.results import Point as PointValue
from legato_client._values.tasks import (
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    Sampling,
    SegmentTask,
    SpatialRef,
    Task,
)
from legato_client.web.errors import Refused
from legato_client.web.operations import MAX_COUNT, sampling_of

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Place = Annotated[list[float], Meta(min_length=2, max_length=4)]
"""[x, y], or [x_min, y_min, x_max, y_max]: fractions of the image."""


class Settings(Struct, forbid_unknown_fields=True):
    """How tokens are chosen, and which objects are returned; `min_confidence` is an addition."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Count | None = None
    max_objects: Count | None = None
    min_confidence: Annotated[float, Meta(ge=0, le=1)] | None = None

    def sampling(self) -> Sampling:
        return sampling_of(
            temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens
        )


class Question(Struct, forbid_unknown_fields=True, kw_only=True):
    """What all bodies share; `image_url` is a data URL."""

    image_url: str | None
    model: str | None = None
    settings: Settings = msgspec.field(default_factory=Settings)
    stream: bool = False

    can_stream: ClassVar[bool] = True

    def task(self) -> Task:
        """Raises Refused for places of no valid form."""
        raise NotImplementedError


class CaptionBody(Question, kw_only=True):
    """Of `/v1/caption`."""

    image_url: str
    length: Literal["short", "normal", "long"] = "normal"

    def task(self) -> Task:
        return CaptionTask(self.length, self.settings.sampling())


class QueryBody(Question, kw_only=True):
    """Of `/v1/query`."""

    question: str
    image_url: str | None = None
    reasoning: bool = False
    spatial_refs: list[Place] | None = None

    def task(self) -> Task:
        refs = places(self.spatial_refs)
        return QueryTask(self.question, self.reasoning, refs, self.settings.sampling())


class DetectBody(Question, kw_only=True):
    """Of `/v1/detect`."""

    image_url: str
    object: str

    can_stream: ClassVar[bool] = False

    def task(self) -> Task:
        most, least = self.settings.max_objects, self.settings.min_confidence
        return DetectTask(self.object, most, self.settings.sampling(), min_confidence=least)


class PointBody(Question, kw_only=True):
    """Of `/v1/point`."""

    image_url: str
    object: str
    spatial_refs: list[Place] | None = None

    can_stream: ClassVar[bool] = False

    def task(self) -> Task:
        most, least = self.settings.max_objects, self.settings.min_confidence
        refs = places(self.spatial_refs)
        return PointTask(self.object, most, refs, self.settings.sampling(), min_confidence=least)


class SegmentBody(Question, kw_only=True):
    """Of `/v1/segment`."""

    image_url: str
    object: str
    spatial_refs: list[Place] | None = None

    def task(self) -> Task:
        return SegmentTask(self.object, places(self.spatial_refs), self.settings.sampling())


def places(given: list[list[float]] | None) -> tuple[SpatialRef, ...]:
    """Raises Refused for one of neither form."""
    found: list[SpatialRef] = []
    for index, numbers in enumerate(given or ()):
        if len(numbers) == 2:
            found.append(PointValue(*numbers))
        elif len(numbers) == 4:
            found.append(Box(*numbers))
        else:
            raise Refused(
                "a place is [x, y] or [x_min, y_min, x_max, y_max]",
                field=f"spatial_refs[{index}]",
            )
    return tuple(found)
