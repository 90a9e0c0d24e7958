"""Tensors of the Open Inference Protocol to tasks, and results to tensors.

Functions raise `InvalidField` with the path of the field and, as Triton does, the tensor's name and
what was expected.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf import json_format
from legato.kserve import open_inference_pb2 as pb
from legato.v1 import inference_pb2, limits, task_pb2
from legato_engine.errors import InvalidField, ModelNotFound

VERSION = "1"
"""The one version of each model."""

MAX_JSON_BYTES = 1_500_000
"""Maximum bytes of the tensor `task`: the longest conversation, with its JSON around it."""

_STREAM = "stream"
_IGNORED = ("triton_enable_empty_final_response",)


Metadata = pb.ModelMetadataResponse.TensorMetadata
INPUTS = {
    name: Metadata(name=name, datatype="BYTES", shape=[1]) for name in ("image", "task", "prompt")
}
OUTPUTS = {
    "result": Metadata(name="result", datatype="BYTES", shape=[1]),
    "text": Metadata(name="text", datatype="BYTES", shape=[1]),
    "boxes": Metadata(name="boxes", datatype="FP32", shape=[-1, 4]),
    "points": Metadata(name="points", datatype="FP32", shape=[-1, 2]),
    "scores": Metadata(name="scores", datatype="FP32", shape=[-1]),
}
"""Forms of the tensors by name; -1 is any number."""


def check_version(model: str, version: str, field: str) -> None:
    if version not in ("", VERSION):
        raise ModelNotFound(
            f"Request for unknown model: '{model}' version {version} is not found; "
            f"every model has version {VERSION}",
            resource=f"{model}/{version}",
            field=field,
        )


def options(name: str) -> inference_pb2.RequestOptions:
    """Return the options that name a model: NAME, or NAME/ADAPTER."""
    model, _, adapter = name.partition("/")
    return inference_pb2.RequestOptions(model=model, adapter=adapter)


# ---------------------------------------------------------------- request


class InferTask(NamedTuple):
    """A task with its image; `outputs` are the tensors that are asked for."""

    request: inference_pb2.GenerateRequest
    outputs: tuple[str, ...]
    streams_text: bool


def infer_task(message: pb.ModelInferRequest) -> InferTask:
    """Convert a request whose single fields are within their bounds."""
    check_version(message.model_name, message.model_version, "model_version")
    streams_text = _check_parameters(message)
    given = _elements(message)
    if ("task" in given) == ("prompt" in given):
        raise InvalidField(
            f"model '{message.model_name}' expects either input 'task' or input 'prompt', got "
            + ("both" if given.keys() >= {"task", "prompt"} else f"{sorted(given)}"),
            field="inputs",
        )
    request = inference_pb2.GenerateRequest(
        task=_task(given["task"]) if "task" in given else _question(given["prompt"]),
        options=options(message.model_name),
    )
    if "image" in given:
        request.image.encoded.data = given["image"]
    return InferTask(request, _asked_outputs(message), streams_text)


def _check_parameters(message: pb.ModelInferRequest) -> bool:
    """Return whether text is to be sent in pieces."""
    for name, value in message.parameters.items():
        if name == _STREAM and value.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidField(f"parameter '{name}' must be a boolean", field=f"parameters[{name}]")
        if name != _STREAM and name not in _IGNORED:
            raise InvalidField(
                f"parameter '{name}' is not supported: sampling is a part of the input 'task', a "
                "deadline or priority is the call's own",
                field=f"parameters[{name}]",
            )
    return _STREAM in message.parameters and message.parameters[_STREAM].bool_param


def _elements(message: pb.ModelInferRequest) -> dict[str, bytes]:
    """Return the one element of each input."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidField(
            f"expected {len(message.inputs)} raw contents, one for each input, got {len(raw)}",
            field="raw_input_contents",
        )
    given: dict[str, bytes] = {}
    for index, tensor in enumerate(message.inputs):
        _check_input(tensor, message.model_name, f"inputs[{index}]")
        if tensor.name in given:
            raise InvalidField(f"input '{tensor.name}' is given twice", field=f"inputs[{index}]")
        if raw:
            field = f"raw_input_contents[{index}]"
            given[tensor.name] = _raw_element(raw[index], tensor.name, field)
        else:
            contents = tensor.contents.bytes_contents
            if len(contents) != 1:
                raise InvalidField(
                    f"input '{tensor.name}' has {len(contents)} elements, its shape has 1",
                    field=f"inputs[{index}].contents.bytes_contents",
                )
            given[tensor.name] = contents[0]
    return given


def _check_input(tensor: pb.ModelInferRequest.InferInputTensor, model: str, field: str) -> None:
    expected = INPUTS.get(tensor.name)
    if expected is None:
        names = ", ".join(f"'{each}'" for each in INPUTS)
        raise InvalidField(
            f"unexpected inference input '{tensor.name}' for model '{model}'; it has {names}",
            field=f"{field}.name",
        )
    if tensor.datatype != expected.datatype:
        raise InvalidField(
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model "
            f"'{model}' expects '{expected.datatype}'",
            field=f"{field}.datatype",
        )
    if tensor.shape != expected.shape:
        raise InvalidField(
            f"unexpected shape for input '{tensor.name}' for model '{model}'. Expected "
            f"{_shape(expected.shape)}, got {_shape(tensor.shape)}",
            field=f"{field}.shape",
        )
    if tensor.parameters:
        name = min(tensor.parameters)
        raise InvalidField(
            f"parameter '{name}' of input '{tensor.name}' is not supported: send its contents",
            field=f"{field}.parameters[{name}]",
        )


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _raw_element(raw: bytes, name: str, field: str) -> bytes:
    size = int.from_bytes(raw[:4], "little")
    if len(raw) != size + 4 or len(raw) < 4:
        raise InvalidField(
            f"unexpected total byte size {len(raw)} for input '{name}': one element, its size in "
            "4 bytes before it",
            field=field,
        )
    return raw[4:]


def _asked_outputs(message: pb.ModelInferRequest) -> tuple[str, ...]:
    for index, asked in enumerate(message.outputs):
        field = f"outputs[{index}]"
        if asked.name not in OUTPUTS:
            names = ", ".join(f"'{each}'" for each in OUTPUTS)
            raise InvalidField(
                f"unexpected inference output '{asked.name}' for model '{message.model_name}'; "
                f"it has {names}",
                field=f"{field}.name",
            )
        if asked.parameters:
            name = min(asked.parameters)
            raise InvalidField(
                f"parameter '{name}' of output '{asked.name}' is not supported",
                field=f"{field}.parameters[{name}]",
            )
    return tuple(each.name for each in message.outputs) or tuple(OUTPUTS)


def _task(data: bytes) -> task_pb2.Task:
    """Parse the contract's Task in protobuf's JSON form."""
    if len(data) > MAX_JSON_BYTES:
        raise InvalidField(
            f"input 'task' has {len(data)} bytes, the limit is {MAX_JSON_BYTES}",
            field="inputs[task]",
            limit=MAX_JSON_BYTES,
            actual=len(data),
        )
    # A parser makes an object of each value.
    num_values = sum(map(data.count, (b"[", b"{", b",", b":")))
    if num_values > limits.MAX_FIELDS:
        raise InvalidField(
            f"input 'task' has {num_values} brackets, commas and colons, the limit is "
            f"{limits.MAX_FIELDS}: a long question is the input 'prompt'",
            field="inputs[task]",
            limit=limits.MAX_FIELDS,
            actual=num_values,
        )
    try:
        return json_format.Parse(data, task_pb2.Task())
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise InvalidField(
            f"input 'task' is not a Task of legato.v1 as JSON: {error}", field="inputs[task]"
        ) from None


def _question(data: bytes) -> task_pb2.Task:
    try:
        question = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(
            f"input 'prompt' is not UTF-8 at byte {error.start}", field="inputs[prompt]"
        ) from None
    return task_pb2.Task(query=task_pb2.QueryTask(question=question))


# ---------------------------------------------------------------- response


def infer_response(
    message: pb.ModelInferRequest, model: str, tensors: Mapping[str, tuple[tuple[int, ...], bytes]]
) -> pb.ModelInferResponse:
    """Build an answer of tensors, which are shapes and bytes by name."""
    response = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=message.id)
    for name, (shape, data) in tensors.items():
        response.outputs.add(name=name, datatype=OUTPUTS[name].datatype, shape=shape)
        response.raw_output_contents.append(data)
    return response


def output_tensors(
    result: task_pb2.TaskResult, names: Sequence[str]
) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {name: _MAKERS[name](result) for name in names}


def text_tensor(text: str) -> tuple[tuple[int, ...], bytes]:
    data = text.encode()
    return (1,), len(data).to_bytes(4, "little") + data


def _result(result: task_pb2.TaskResult) -> tuple[tuple[int, ...], bytes]:
    return text_tensor(
        json_format.MessageToJson(
            result, preserving_proto_field_name=True, indent=None, ensure_ascii=False
        )
    )


def _text(result: task_pb2.TaskResult) -> tuple[tuple[int, ...], bytes]:
    return text_tensor(result.query.answer or result.caption.caption)


def _boxes(result: task_pb2.TaskResult) -> tuple[tuple[int, ...], bytes]:
    boxes = [each.box for each in result.detect.objects]
    boxes += [each.box for each in result.segment.segments]
    return _floats([(each.x_min, each.y_min, each.x_max, each.y_max) for each in boxes], 4)


def _points(result: task_pb2.TaskResult) -> tuple[tuple[int, ...], bytes]:
    return _floats([(each.point.x, each.point.y) for each in result.point.points], 2)


def _scores(result: task_pb2.TaskResult) -> tuple[tuple[int, ...], bytes]:
    """Return the confidences of boxes or points, NaN where there is none."""
    regions: tuple[Any, ...] = (
        *result.detect.objects,
        *result.point.points,
        *result.segment.segments,
    )
    scores = [each.confidence if each.HasField("confidence") else math.nan for each in regions]
    return (len(scores),), struct.pack(f"<{len(scores)}f", *scores)


def _floats(rows: Sequence[tuple[float, ...]], width: int) -> tuple[tuple[int, ...], bytes]:
    flat = [value for row in rows for value in row]
    return (len(rows), width), struct.pack(f"<{len(flat)}f", *flat)


_MAKERS: Mapping[str, Callable[[task_pb2.TaskResult], tuple[tuple[int, ...], bytes]]] = {
    "result": _result,
    "text": _text,
    "boxes": _boxes,
    "points": _points,
    "scores": _scores,
}
