"""ServerService."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from legato.v1 import server_pb2 as pb
from legato.v1 import server_pb2_grpc
from legato_engine.errors import EngineStarting, InvalidField
from legato_engine.ipc.messages import ServedModel
from legato_engine.types import CalibrationInfo

from legato_service.config import ServiceConfig
from legato_service.convert.responses import duration
from legato_service.engines.group import EngineGroup
from legato_service.images.shared_memory import shm_namespace
from legato_service.rpc.call import Context
from legato_service.version import CONTRACT_REVISION, MINIMUM_CLIENT_REVISION, version

CAPABILITIES = (
    "sessions",
    "images",
    "logprobs",
    "checkpoints",
    "tracking",
    "pixel_format.nv12",
    "pixel_format.yuyv",
)  # of every server


class ServerServicer(server_pb2_grpc.ServerServiceServicer):
    """`capabilities` are additions to `CAPABILITIES`."""

    def __init__(
        self, config: ServiceConfig, engines: EngineGroup, capabilities: Sequence[str] = ()
    ) -> None:
        self._config = config
        shared = ("shared_images",) if config.shared_images else ()
        depth = ("pipeline_depth",) if config.depth_switch else ()
        self._capabilities = (*CAPABILITIES, *shared, *depth, *capabilities)
        self._engines = engines
        self._instance_id = str(uuid.uuid4())
        self._namespace = shm_namespace() if config.shared_images else ""

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Describe the server; the model's limits are 0 until it is loaded."""
        model = self._engines.model
        adapters = ("adapters",) if model is not None and model.adapters else ()
        return pb.GetServerInfoResponse(
            name="legato",
            version=version(),
            instance_id=self._instance_id,
            contract_revision=CONTRACT_REVISION,
            minimum_client_revision=MINIMUM_CLIENT_REVISION,
            limits=self._limits(model),
            capabilities=(*self._capabilities, *adapters),
            shm_namespace=self._namespace,
        )

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """List the one model, on the only page."""
        if request.page_token:
            raise InvalidField("not a page token of this server", field="page_token")
        model = self._engines.model
        if model is None:
            raise EngineStarting("the model is loading")
        listed = pb.Model(
            name=model.name,
            tasks=model.tasks,
            streaming_regions=True,
            max_context_tokens=model.max_context_tokens,
            confidence=_confidence(model.confidence),
            notice=model.notice,
            max_images=model.max_images,
        )
        return pb.ListModelsResponse(models=[listed])

    def _limits(self, model: ServedModel | None) -> pb.Limits:
        num_engines = len(self._engines.serving) or len(self._engines.members)
        return pb.Limits(
            max_request_bytes=self._config.max_request_bytes,
            max_image_pixels=self._config.engine.max_image_pixels,
            max_context_tokens=model.max_context_tokens if model else 0,
            max_output_tokens=model.max_output_tokens if model else 0,
            max_running=self._config.engine.max_running * num_engines,
            max_waiting=self._config.engine.max_waiting * num_engines,
            max_sessions=self._config.max_sessions,
            default_deadline=duration(self._config.unary_deadline),
        )


def _confidence(info: CalibrationInfo | None) -> pb.Confidence | None:
    if info is None:
        return None
    message = pb.Confidence(
        tasks=info.skills, calibrated_tasks=info.calibrated, fitted_on=info.fitted_on
    )
    if info.fitted_at:
        message.fitted_at.FromSeconds(info.fitted_at)
    return message
