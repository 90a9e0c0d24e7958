"""Failures as servers send them."""

from __future__ import annotations

import dataclasses

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2


@dataclasses.dataclass(frozen=True)
class Failure:
    """A status to end a call with; `trailers` go beside the packed details."""

    code: grpc.StatusCode
    message: str = "no"
    details: tuple[Message, ...] = ()
    trailers: tuple[tuple[str, str | bytes], ...] = ()

    def status(self) -> status_pb2.Status:
        """The google.rpc.Status of this failure."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status

    def abort(self, context: grpc.ServicerContext) -> None:
        """End the call."""
        trailers = self.trailers
        if self.details:
            trailers += (("grpc-status-details-bin", self.status().SerializeToString()),)
        context.set_trailing_metadata(trailers)
        context.abort(self.code, self.message)


def failure(code: grpc.StatusCode, reason: str, *more: Message, **metadata: str) -> Failure:
    """A failure as Legato sends it: ErrorInfo, RequestInfo and more details."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain="legato", metadata=metadata)
    return Failure(code, details=(info, error_details_pb2.RequestInfo(request_id="r-9"), *more))


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    """When to come back."""
    delay = duration_pb2.Duration(nanos=int(seconds * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)
