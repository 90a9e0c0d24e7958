"""A light client for Legato servers: grpcio and protobuf, nothing else.

    from legato_client import Client

    with Client("127.0.0.1:50051") as client:
        for found in client.detect("street.jpg", "bicycle").objects:
            print(found.label, found.box)

`AsyncClient` has the same calls for asyncio. `generate` yields typed events while the answer is
being made. Every failure is a `LegatoError`.
"""

# gRPC reads its environment once, when it is imported.
from legato_client._transport import grpc_environment as grpc_environment

# isort: split

from legato_client._async_client import AsyncClient
from legato_client._client import Client
from legato_client._errors import (
    Aborted,
    AlreadyExists,
    Busy,
    Cancelled,
    ClientTooOld,
    DeadlineExceeded,
    DuplicateRequest,
    FailedPrecondition,
    FieldViolation,
    ImageNotFound,
    IncompleteStream,
    InternalError,
    InvalidArgument,
    LegatoError,
    NotFound,
    PermissionDenied,
    Preempted,
    QuotaExceeded,
    ResourceExhausted,
    SessionProtocol,
    SharedMemoryRefused,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from legato_client._images.raw_frame import PixelFormat, RawFrame
from legato_client._images.shared_frames import SharedFrame, SharedFrames, SlotsBusy, shm_namespace
from legato_client._images.sources import CachedImage, HeldImage, ImageInput
from legato_client._session.async_session import AsyncSession
from legato_client._session.blocking_session import Session
from legato_client._values.admin import AbortCount, DecodeSteps, Load, Unfinished
from legato_client._values.events import (
    Event,
    Finished,
    OutlineDelta,
    Queued,
    ReasoningDelta,
    Started,
    TextDelta,
    TokensDelta,
)
from legato_client._values.results import (
    Box,
    CaptionResult,
    Detection,
    DetectResult,
    FrameStamp,
    Grounding,
    ImageInfo,
    Outline,
    Point,
    PointedObject,
    PointResult,
    QueryResult,
    Reasoning,
    ResponseInfo,
    Result,
    SegmentResult,
    Timings,
    Token,
    Usage,
)
from legato_client._values.server import Limits, ModelInfo, ServerInfo
from legato_client._values.session import (
    Answer,
    FrameDelta,
    FrameDropped,
    FramePolicy,
    FrameResult,
    GoAway,
    SessionStats,
    SessionTerms,
)
from legato_client._values.tasks import (
    CaptionLength,
    CaptionTask,
    DetectTask,
    Message,
    Options,
    PointTask,
    QueryTask,
    Sampling,
    SegmentTask,
    SpatialRef,
    Task,
)

__all__ = [
    "AbortCount",
    "Aborted",
    "AlreadyExists",
    "Answer",
    "AsyncClient",
    "AsyncSession",
    "Box",
    "Busy",
    "CachedImage",
    "Cancelled",
    "CaptionLength",
    "CaptionResult",
    "CaptionTask",
    "Client",
    "ClientTooOld",
    "DeadlineExceeded",
    "DecodeSteps",
    "DetectResult",
    "DetectTask",
    "Detection",
    "DuplicateRequest",
    "Event",
    "FailedPrecondition",
    "FieldViolation",
    "Finished",
    "FrameDelta",
    "FrameDropped",
    "FramePolicy",
    "FrameResult",
    "FrameStamp",
    "GoAway",
    "Grounding",
    "HeldImage",
    "ImageInfo",
    "ImageInput",
    "ImageNotFound",
    "IncompleteStream",
    "InternalError",
    "InvalidArgument",
    "LegatoError",
    "Limits",
    "Load",
    "Message",
    "ModelInfo",
    "NotFound",
    "Options",
    "Outline",
    "OutlineDelta",
    "PermissionDenied",
    "PixelFormat",
    "Point",
    "PointResult",
    "PointTask",
    "PointedObject",
    "Preempted",
    "QueryResult",
    "QueryTask",
    "Queued",
    "QuotaExceeded",
    "RawFrame",
    "Reasoning",
    "ReasoningDelta",
    "ResourceExhausted",
    "ResponseInfo",
    "Result",
    "Sampling",
    "SegmentResult",
    "SegmentTask",
    "ServerInfo",
    "Session",
    "SessionProtocol",
    "SessionStats",
    "SessionTerms",
    "SharedFrame",
    "SharedFrames",
    "SharedMemoryRefused",
    "SlotsBusy",
    "SpatialRef",
    "Started",
    "Task",
    "TextDelta",
    "Timings",
    "Token",
    "TokensDelta",
    "Unauthenticated",
    "Unavailable",
    "Unfinished",
    "Unimplemented",
    "Usage",
    "shm_namespace",
]
