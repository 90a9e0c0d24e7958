"""Server and image responses as Python values."""

from __future__ import annotations

import datetime

from legato.v1 import image_pb2, server_pb2

from legato_client._convert.pieces import moment, seconds
from legato_client._images.sources import HeldImage
from legato_client._values import server


def server_info(response: server_pb2.GetServerInfoResponse) -> server.ServerInfo:
    limits = response.limits
    return server.ServerInfo(
        name=response.name,
        version=response.version,
        instance_id=response.instance_id,
        contract_revision=response.contract_revision,
        minimum_client_revision=response.minimum_client_revision,
        limits=server.Limits(
            max_request_bytes=limits.max_request_bytes,
            max_image_pixels=limits.max_image_pixels,
            max_context_tokens=limits.max_context_tokens,
            max_output_tokens=limits.max_output_tokens,
            max_running=limits.max_running,
            max_waiting=limits.max_waiting,
            max_sessions=limits.max_sessions,
            default_deadline=seconds(limits.default_deadline),
        ),
        capabilities=tuple(response.capabilities),
        shm_namespace=response.shm_namespace,
    )


def models(response: server_pb2.ListModelsResponse) -> tuple[tuple[server.ModelInfo, ...], str]:
    """The token of the next page is empty at the end."""
    return tuple(map(_model, response.models)), response.next_page_token


def held_image(response: image_pb2.PutImageResponse) -> HeldImage:
    image, expires = response.image, None
    if response.HasField("expire_time"):
        expires = moment(response.expire_time).ToDatetime(datetime.UTC)
    return HeldImage(image.image_id, image.width, image.height, expires)


def nothing(response: image_pb2.DeleteImageResponse) -> None:
    pass


def _model(message: server_pb2.Model) -> server.ModelInfo:
    return server.ModelInfo(
        name=message.name,
        aliases=tuple(message.aliases),
        tasks=tuple(message.tasks),
        streaming_regions=message.streaming_regions,
        max_context_tokens=message.max_context_tokens,
        confidence=_confidence(message.confidence) if message.HasField("confidence") else None,
    )


def _confidence(message: server_pb2.Confidence) -> server.ConfidenceInfo:
    fitted_at = None
    if message.HasField("fitted_at"):
        fitted_at = moment(message.fitted_at).ToDatetime(datetime.UTC)
    return server.ConfidenceInfo(
        tuple(message.tasks), tuple(message.calibrated_tasks), message.fitted_on, fitted_at
    )
