"""GRPCInferenceService of the Open Inference Protocol (KServe v2)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import structlog
from legato.kserve import open_inference_pb2 as pb
from legato.kserve import open_inference_pb2_grpc
from legato.v1 import inference_pb2
from legato_engine.client.request_stream import RequestStream
from legato_engine.errors import (
    EngineStarting,
    InternalError,
    InvalidField,
    LegatoError,
    ModelNotFound,
)
from legato_engine.ipc.messages import Done, OutputDelta, ServedModel
from legato_engine.types import RequestKey, TextEvent

from legato_service.convert import requests, responses, tensors
from legato_service.errors import failure
from legato_service.requests.dispatcher import Dispatcher, completed, follow
from legato_service.requests.registry import ActiveRequest
from legato_service.rpc import call, limits
from legato_service.rpc.call import Context
from legato_service.version import version

log = structlog.get_logger("legato.rpc")

_TASK = limits.kind_of(inference_pb2.GenerateRequest.DESCRIPTOR)
_FINAL = "triton_final_response"


class KServeServicer(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Handlers of GRPCInferenceService. The deadline, in seconds, is for requests without one."""

    def __init__(
        self, dispatcher: Dispatcher, is_ready: Callable[[], bool], *, deadline: float
    ) -> None:
        self._dispatcher = dispatcher
        self._is_ready = is_ready
        self._deadline = deadline

    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: Context
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._is_ready())

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        try:
            self._model(request.name, request.version)
        except (EngineStarting, ModelNotFound):
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._is_ready())

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="legato", version=version())

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        self._model(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[tensors.VERSION],
            platform="legato",
            inputs=tensors.INPUTS.values(),
            outputs=tensors.OUTPUTS.values(),
        )

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: Context
    ) -> pb.ModelInferResponse:
        asked = tensors.infer_task(request)
        if asked.streams_text:
            raise InvalidField(
                "parameter 'stream' is for ModelStreamInfer", field="parameters[stream]"
            )
        key = self._dispatcher.key("")
        with self._dispatcher.admit(key, context.time_remaining(), self._deadline) as active:
            model, stream = await self._submit(asked, key, active)
            return _response(request, asked, model, completed(await stream.done()))

    async def ModelStreamInfer(
        self, messages: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Answer the requests in their order; one that fails does not end the stream."""
        principal, count = call.current().principal, 0
        async for request in messages:
            try:
                if principal is not None and count:
                    principal.take_request()  # the call itself has taken the first
                async with aclosing(self._answers(request, context, count)) as answers:
                    async for answer in answers:
                        yield answer
            except LegatoError as error:
                yield _failed(request, error)
            count += 1

    async def _answers(
        self, request: pb.ModelInferRequest, context: Context, number: int
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        asked = tensors.infer_task(request)
        key = self._dispatcher.key("")
        with self._dispatcher.admit(key, context.time_remaining(), self._deadline) as active:
            part = key.with_part(str(number)) if number else key
            model, stream = await self._submit(asked, part, active)
            async with aclosing(follow(stream)) as outputs:
                async for output in outputs:
                    match output:
                        case OutputDelta(events=events) if (
                            asked.streams_text and "text" in asked.outputs
                        ):
                            for event in events:
                                if isinstance(event, TextEvent):
                                    yield _piece(request, model, event.text)
                        case Done():
                            yield _streamed(_response(request, asked, model, output), final=True)

    def _model(self, name: str, wanted: str) -> ServedModel:
        tensors.check_version(name, wanted, "version")
        options = tensors.options(name)
        if not options.model:
            raise ModelNotFound("Request for unknown model: '' is not found", resource="")
        return self._dispatcher.model(options.model, options.adapter)

    async def _submit(
        self, asked: tensors.InferTask, key: RequestKey, active: ActiveRequest
    ) -> tuple[ServedModel, RequestStream]:
        message = asked.request
        _TASK.check(inference_pb2.GenerateRequest(task=message.task).SerializeToString())
        task = requests.task(message.task, "task")
        has_image = requests.check_image(message.image, task, "task.query.")
        converted = requests.request(
            key,
            task,
            requests.sampling(message.task.sampling, "task."),
            message.options,
            deltas=asked.streams_text,
            progress=False,
        )
        model = self._dispatcher.check(converted, "task.")
        images = [await self._dispatcher.images.check(message.image)] if has_image else []
        return model, self._dispatcher.submit(converted, images, active)


def _response(
    request: pb.ModelInferRequest, asked: tensors.InferTask, model: ServedModel, done: Done
) -> pb.ModelInferResponse:
    result = responses.task_result(asked.request.task.task_id, done)
    found = tensors.output_tensors(result, asked.outputs)
    return tensors.infer_response(request, request.model_name or model.name, found)


def _piece(
    request: pb.ModelInferRequest, model: ServedModel, text: str
) -> pb.ModelStreamInferResponse:
    piece = {"text": tensors.text_tensor(text)}
    response = tensors.infer_response(request, request.model_name or model.name, piece)
    return _streamed(response, final=False)


def _streamed(response: pb.ModelInferResponse, *, final: bool) -> pb.ModelStreamInferResponse:
    response.parameters[_FINAL].bool_param = final
    return pb.ModelStreamInferResponse(infer_response=response)


def _failed(request: pb.ModelInferRequest, error: LegatoError) -> pb.ModelStreamInferResponse:
    """Return the failure as a status of its own would tell it."""
    request_id = call.current().request_id
    if isinstance(error, InternalError):
        log.error("internal_error", request_id=request_id, exc_info=error)
    known = failure(error, request_id)
    return pb.ModelStreamInferResponse(
        error_message=f"{known.code.name} {known.reason}: {known.message}",
        infer_response=pb.ModelInferResponse(id=request.id),
    )
