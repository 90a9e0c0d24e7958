"""The RPCs of this client."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message
from legato.v1 import admin_pb2, image_pb2, inference_pb2, server_pb2

from legato_client._convert import admin, pieces, responses, server, skills
from legato_client._errors import InternalError

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")


@dataclasses.dataclass(frozen=True, slots=True)
class Method(Generic[ResponseT, ValueT]):
    """One RPC; `parse` turns its response into a value."""

    path: str
    response: type[ResponseT]
    parse: Callable[[ResponseT], ValueT]


def message_of(kind: type[ResponseT], data: bytes) -> ResponseT:
    """Parse a response. gRPC's own parsing gives None for damaged bytes in asyncio.

    Raises:
        InternalError: the bytes are no message.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InternalError("the server's answer is malformed") from None


def _answer(skill: skills.AnySkill, response: Any) -> Any:
    return skill.read(response, pieces.info(response.info), "")


_INFERENCE = "/legato.v1.InferenceService/"
_ADMIN = "/legato.v1.AdminService/"
_IMAGE = "/legato.v1.ImageService/"
_SERVER = "/legato.v1.ServerService/"

SESSION_PATH = "/legato.v1.SessionService/Session"

OF_SKILLS: Mapping[str, Method[Any, Any]] = {
    skill.name: Method(
        f"{_INFERENCE}{skill.name.capitalize()}",
        skill.response,
        functools.partial(_answer, skill),
    )
    for skill in skills.SKILLS
}
"""The call of each skill alone, by the skill's name."""
RUN_TASKS = Method(_INFERENCE + "RunTasks", inference_pb2.RunTasksResponse, responses.run_tasks)
GENERATE = Method(_INFERENCE + "Generate", inference_pb2.GenerateResponse, responses.event)
PUT_IMAGE = Method(_IMAGE + "PutImage", image_pb2.PutImageResponse, server.held_image)
DELETE_IMAGE = Method(_IMAGE + "DeleteImage", image_pb2.DeleteImageResponse, server.nothing)
GET_SERVER_INFO = Method(
    _SERVER + "GetServerInfo", server_pb2.GetServerInfoResponse, server.server_info
)
LIST_MODELS = Method(_SERVER + "ListModels", server_pb2.ListModelsResponse, server.models)
GET_LOAD = Method(_ADMIN + "GetLoad", admin_pb2.GetLoadResponse, admin.load)
ABORT = Method(_ADMIN + "Abort", admin_pb2.AbortResponse, admin.abort_count)
GET_METRICS = Method(_ADMIN + "GetMetrics", admin_pb2.GetMetricsResponse, admin.metrics)
WATCH_TIMELINE = Method(_ADMIN + "WatchTimeline", admin_pb2.WatchTimelineResponse, admin.timeline)
SET_PIPELINE_DEPTH = Method(
    _ADMIN + "SetPipelineDepth", admin_pb2.SetPipelineDepthResponse, admin.nothing
)
DRAIN = Method(_ADMIN + "Drain", admin_pb2.DrainResponse, admin.unfinished)
