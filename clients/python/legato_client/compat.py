"""A foreign gRPC service, answered by a Legato server as a mapping file says.

The mapping names a .proto, its service and, for each method, a skill, the request's part of each
argument and the response's fields. These parts are JMESPath expressions, or constants.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import contextvars
import dataclasses
import subprocess
import sys
import tempfile
import tomllib
import types
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import jmespath
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import (
    Descriptor,
    FieldDescriptor,
    MethodDescriptor,
    ServiceDescriptor,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from grpc import aio
from jmespath.exceptions import JMESPathError
from jmespath.visitor import TreeInterpreter

from legato_client._async_client import AsyncClient
from legato_client._errors import FieldViolation, InvalidArgument, LegatoError, Unauthenticated
from legato_client._grpc.channel import MAX_MESSAGE_BYTES, OF_SKILLS
from legato_client._images.sources import AllowedFolders, CachedImage
from legato_client._proto import skills
from legato_client._types import results, tasks

ENCODE = "encode_image"
"""Method of the client that uploads an image, for services that pass an encoded one around."""

_SKILLS = (*skills.BY_NAME, ENCODE)
_FORMS = ("file", "base64", "path", "id")
_SAMPLING = tuple(each.name for each in dataclasses.fields(tasks.Sampling))
_SUBJECTS = ("question", "object")
_OPTIONS = ("model", "adapter")
_NOT_MAPPED = {"task_id", "sampling", "messages", "response_format", "tracking"}
Field: TypeAlias = Any
"""A field's descriptor; protobuf has two classes for it, which its types do not relate."""

_MAX_DEPTH = 6  # levels of a sample message; a message may hold itself
_REQUEST_BYTES = MAX_MESSAGE_BYTES // 3 * 4 + 1024 * 1024  # the largest image in base64
_MAX_CALLS = 128  # at once, each with a message in memory; more are RESOURCE_EXHAUSTED
_GRACE = 5.0  # seconds

_token = contextvars.ContextVar("token", default="")


def token() -> str:
    """Return the token of the call that is being answered; empty if it brought none."""
    return _token.get()


class MappingError(ValueError):
    """A mapping file has a mistake."""


# ---------------------------------------------------------------- values


def _plain(value: Any, image: results.ImageInfo | None = None) -> Any:
    """Convert a client's value to JSON's types; places get `center` and `pixels`, too."""
    if isinstance(value, list | tuple):
        return [_plain(each, image) for each in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    if isinstance(value, results.Result):
        image = value.info.image
    names = (each.name for each in dataclasses.fields(value))
    document = {name: _plain(getattr(value, name), image) for name in names}
    if isinstance(value, results.Detection | results.Outline):
        box = value.box
        document["center"] = {"x": (box.x_min + box.x_max) / 2, "y": (box.y_min + box.y_max) / 2}
        document["pixels"] = _pixels(box, image)
    elif isinstance(value, results.PointedObject):
        document["pixels"] = _pixels(value.point, image)
    return document


def _pixels(place: results.Box | results.Point, image: results.ImageInfo | None) -> Any:
    names = [each.name for each in dataclasses.fields(place)]
    if image is None:
        return None
    return dict(zip(names, place.to_pixels(image.width, image.height), strict=True))


def _sample_results(skill: str, *, streams: bool) -> list[dict[str, Any]]:
    """Return what the responses' expressions may be about; the first has every name."""
    if skill == ENCODE:
        return [{"image_id": "text", "width": 1, "height": 1}]
    method = OF_SKILLS[skill]
    full = _sample_message(method.response.DESCRIPTOR)
    documents = [
        _plain(method.parse(each)) for each in (method.response(**full), method.response())
    ]
    if not streams:
        return documents
    first = documents[0]
    objects = first.get("objects") or first.get("points")
    found = {"object": objects[0] if objects else None}
    nothing = dict.fromkeys((*first, "delta", "object"))
    return [
        {**first, "delta": "text", **found, "done": True},
        {**nothing, **documents[1], "done": True},
        {**nothing, "delta": "text", "done": False},
        {**nothing, **found, "done": False},
    ]


def _document(message: Message) -> dict[str, Any]:
    """Return a request's fields; None for one that is not set, which proto3 sends as zero."""
    document: dict[str, Any] = {}
    field: Field
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            of_message = field.message_type.fields_by_name["value"].message_type
            document[field.name] = {
                str(key): _document(each) if of_message else each for key, each in value.items()
            }
        elif field.is_repeated:
            document[field.name] = [_value(each, field) for each in value]
        elif field.has_presence:
            document[field.name] = _value(value, field) if message.HasField(field.name) else None
        else:
            document[field.name] = _value(value, field) if value != field.default_value else None
    return document


def _value(value: Any, field: Field) -> Any:
    if field.message_type is not None:
        return _document(value)
    if field.enum_type is not None:
        name = field.enum_type.values_by_number.get(value)
        return name.name if name else None
    return value


def _sample_message(descriptor: Descriptor, depth: int = 0) -> dict[str, Any]:
    return {each.name: _sample_field(each, depth) for each in descriptor.fields}


def _sample_field(field: Field, depth: int) -> Any:
    if _is_map(field):
        value_field = field.message_type.fields_by_name["value"]
        return _AnyKey(key=_sample_field(value_field, depth))
    value: Any
    if field.message_type is not None:
        value = _sample_message(field.message_type, depth + 1) if depth < _MAX_DEPTH else None
    elif field.enum_type is not None:
        value = field.enum_type.values[-1].name
    else:
        value = {str: "text", bytes: b"bytes", bool: True, float: 0.5}.get(
            bytes if field.type == FieldDescriptor.TYPE_BYTES else type(field.default_value), 1
        )
    return [value] if field.is_repeated else value


class _AnyKey(dict[str, Any]):
    """Sample of a map, whose keys are a caller's own."""


def _is_map(field: Field) -> bool:
    kind = field.message_type
    return bool(field.is_repeated and kind is not None and kind.GetOptions().map_entry)


# ---------------------------------------------------------------- expressions


class _NameCheck(TreeInterpreter):
    """Interpreter that refuses names which the document lacks, in both sides of && and ||."""

    def visit_field(self, node: Any, value: Any) -> Any:
        name = node["value"]
        if isinstance(value, _AnyKey):
            return value["key"]
        if isinstance(value, dict) and name not in value:
            raise MappingError(f"there is no {name!r} among {', '.join(sorted(value))}")
        return super().visit_field(node, value)

    def visit_and_expression(self, node: Any, value: Any) -> Any:
        self.visit(node["children"][1], value)
        return super().visit_and_expression(node, value)

    def visit_or_expression(self, node: Any, value: Any) -> Any:
        self.visit(node["children"][1], value)
        return super().visit_or_expression(node, value)


class Expression:
    """A JMESPath expression, or a constant: any value of TOML but a string."""

    def __init__(self, given: Any, entry: str) -> None:
        self.text = given if isinstance(given, str) else str(given)
        self.entry = entry
        self._constant = None if isinstance(given, str) else given
        self._compiled = None
        if isinstance(given, str):
            with self._located():
                self._compiled = jmespath.compile(given)

    def of(self, document: Any) -> Any:
        """Return its value. Raises MappingError if it cannot be computed."""
        if self._compiled is None:
            return self._constant
        with self._located():
            return self._compiled.search(document)

    def check(self, document: Any) -> None:
        """Raise MappingError unless the document has every name in it."""
        if self._compiled is not None:
            with self._located():
                _NameCheck().visit(self._compiled.parsed, document)

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except (JMESPathError, MappingError) as error:
            problem = str(error).splitlines()[0]
            raise MappingError(f"{self.entry}: {self.text!r}: {problem}") from None


def _fitting(value: Any, field: Field, entry: str) -> Any:
    """Return the value as a message's constructor takes it. Raises MappingError."""
    if field.is_repeated and not _is_map(field):
        if not isinstance(value, list):
            raise MappingError(f"{entry}: takes a list, not {_kind(value)}")
        return [_fitting_one(each, field, f"{entry}[]") for each in value if each is not None]
    return _fitting_one(value, field, entry)


def _fitting_one(value: Any, field: Field, entry: str) -> Any:
    if field.message_type is not None and not _is_map(field):
        if not isinstance(value, dict):
            kind = field.message_type.name
            raise MappingError(f"{entry}: takes the fields of {kind}, not {_kind(value)}")
        return _filled(value, field.message_type, entry)
    if field.type == FieldDescriptor.TYPE_BYTES and isinstance(value, str):
        return value.encode()
    return value


def _filled(values: Mapping[str, Any], kind: Descriptor, entry: str) -> Message:
    """Return a message with these fields. Raises MappingError."""
    fitted = {}
    for name, value in values.items():
        field = kind.fields_by_name.get(name)
        if field is None:
            known = ", ".join(kind.fields_by_name) or "no field"
            raise MappingError(f"{entry}.{name}: {kind.name} has {known}")
        if value is not None:
            fitted[name] = _fitting(value, field, f"{entry}.{name}")
    try:
        return message_factory.GetMessageClass(kind)(**fitted)
    except (TypeError, ValueError) as error:
        raise MappingError(f"{entry}: {kind.name}: {error}") from None


def _kind(value: Any) -> str:
    names = {str: "a text", bool: "a bool", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")


# ---------------------------------------------------------------- mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """A method of the foreign service and what answers it."""

    descriptor: MethodDescriptor
    skill: str
    image_form: str
    request: Mapping[str, Expression]
    response: Mapping[str, Expression]

    @property
    def entry(self) -> str:
        return f"methods.{self.descriptor.name}"

    def answer(self, document: Mapping[str, Any]) -> Message:
        """Return the response of a result's document. Raises MappingError."""
        values = {name: each.of(document) for name, each in self.response.items()}
        return _filled(values, self.descriptor.output_type, f"{self.entry}.response")

    def check(self) -> None:
        """Evaluate everything once, on samples. Raises MappingError."""
        sample = _sample_message(self.descriptor.input_type)
        for each in self.request.values():
            each.check(sample)
        self._check_image(sample)
        for name in _SUBJECTS:
            if name in _arguments(self.skill) and name not in self.request:
                raise MappingError(f"{self.entry}.request: {self.skill} needs {name!r}")
        streams = self.descriptor.server_streaming and not self.descriptor.client_streaming
        full, *others = _sample_results(self.skill, streams=streams)
        for each in self.response.values():
            each.check(full)
        for document in (full, *others):
            self.answer(document)

    def _check_image(self, sample: Mapping[str, Any]) -> None:
        image = self.request.get("image")
        if image is None:
            if self.skill != "query":
                raise MappingError(f"{self.entry}.request: {self.skill} needs an image")
            return
        value, entry = image.of(sample), f"{self.entry}.image_form"
        if isinstance(value, str) and self.image_form == "file":
            raise MappingError(f"{entry}: {image.text!r} is a text, so it is base64, path or id")
        if isinstance(value, bytes) and self.image_form == "path":
            raise MappingError(f"{entry}: {image.text!r} is bytes, so it is file, base64 or id")
        if not isinstance(value, bytes | str):
            raise MappingError(f"{image.entry}: {image.text!r} is {_kind(value)}, and no image")


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignService:
    """A foreign service, and those of its methods that are answered."""

    descriptor: ServiceDescriptor
    methods: tuple[Method, ...]

    @classmethod
    def read(cls, path: Path) -> ForeignService:
        """Read a mapping file and the .proto or descriptor set that it names, and check both.

        Raises:
            MappingError: one of them cannot be read, or has a mistake.
        """
        try:
            given = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise MappingError(f"{path}: {_reason(error)}") from None
        try:
            return cls._of(given, path.parent)
        except MappingError as error:
            raise MappingError(f"{path}: {error}") from None

    @classmethod
    def _of(cls, given: Mapping[str, Any], folder: Path) -> ForeignService:
        _check_keys(given, "", {"proto": str, "service": str, "methods": dict})
        services = _services(folder / given["proto"])
        service = _one_of(given["service"], services, "service")
        methods = {each.name: each for each in service.methods}
        made = []
        for name, table in given["methods"].items():
            method = _one_of(name, methods, "methods")
            if method.client_streaming and not method.server_streaming:
                raise MappingError(f"methods.{name}: a stream of requests needs one of responses")
            made.append(_method(method, table))
        for each in made:
            each.check()
        return cls(service, tuple(made))

    @property
    def reads_paths(self) -> bool:
        return any(each.image_form == "path" for each in self.methods)

    @property
    def unmapped(self) -> tuple[str, ...]:
        mapped = {each.descriptor.name for each in self.methods}
        return tuple(each.name for each in self.descriptor.methods if each.name not in mapped)


def _method(method: MethodDescriptor, table: Any) -> Method:
    entry = f"methods.{method.name}"
    if not isinstance(table, dict):
        raise MappingError(f"{entry}: must be a table, not {_kind(table)}")
    _check_keys(
        table, entry, {"skill": str, "request": dict, "response": dict}, {"image_form": str}
    )
    skill = table["skill"]
    _one_of(skill, dict.fromkeys(_SKILLS), f"{entry}.skill")
    form = table.get("image_form", "file")
    _one_of(form, dict.fromkeys(_FORMS), f"{entry}.image_form")

    def expressions(part: str, known: Mapping[str, Any]) -> dict[str, Expression]:
        for name in table[part]:
            _one_of(name, known, f"{entry}.{part}")
        return {
            name: Expression(each, f"{entry}.{part}.{name}") for name, each in table[part].items()
        }

    request = expressions("request", dict.fromkeys(_arguments(skill)))
    response = expressions("response", method.output_type.fields_by_name)
    return Method(method, skill, form, request, response)


def _arguments(skill: str) -> tuple[str, ...]:
    if skill == ENCODE:
        return ("image", "ttl")
    fields = dataclasses.fields(skills.BY_NAME[skill].task)
    own = (each.name for each in fields if each.name not in _NOT_MAPPED)
    return ("image", *own, *_SAMPLING, *_OPTIONS)


def _check_keys(
    table: Mapping[str, Any],
    entry: str,
    needed: Mapping[str, type],
    more: Mapping[str, type] = types.MappingProxyType({}),
) -> None:
    known, prefix = {**needed, **more}, f"{entry}." if entry else ""
    for name, value in table.items():
        kind = _one_of(name, known, entry)
        if not isinstance(value, kind):
            raise MappingError(f"{prefix}{name}: must be {_kind(kind())}, not {_kind(value)}")
    for name in needed:
        if name not in table:
            raise MappingError(f"{prefix}{name}: is missing")


def _one_of(name: str, known: Mapping[str, Any], entry: str) -> Any:
    if name not in known:
        where = f"{entry}: " if entry else ""
        raise MappingError(f"{where}{name!r} is none of {', '.join(known)}")
    return known[name]


def _services(path: Path) -> dict[str, ServiceDescriptor]:
    """Return the services of a .proto or a descriptor set, by full and by short name."""
    try:
        data = _compiled(path) if path.suffix == ".proto" else path.read_bytes()
        files = descriptor_pb2.FileDescriptorSet.FromString(data).file
        pool = DescriptorPool()
        for each in files:
            pool.Add(each)
        found = [pool.FindFileByName(each.name) for each in files]
    except (OSError, DecodeError, TypeError, KeyError) as error:
        raise MappingError(f"proto: {path}: {_reason(error)}") from None
    services = {each.name: each for file in found for each in file.services_by_name.values()}
    if not services:
        raise MappingError(f"proto: {path} has no service")
    return {**services, **{each.full_name: each for each in services.values()}}


def _compiled(path: Path) -> bytes:
    path.read_bytes()  # a missing file is an OSError
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "set"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={path.parent}"]
        command += ["--include_imports", f"--descriptor_set_out={output}", path.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["protoc failed"]
            said = next((each for each in lines if f"{path.name}:" in each), lines[-1])
            raise MappingError(f"proto: {said}")
        return output.read_bytes()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return f"is not readable: {error}"


# ---------------------------------------------------------------- calls


class CompatServer:
    """A gRPC server of a foreign service, in front of a Legato server."""

    def __init__(
        self,
        service: ForeignService,
        client: AsyncClient,
        *,
        timeout: float,
        folders: AllowedFolders,
        require_token: bool = False,
    ) -> None:
        """`folders` are those below which images are named by their paths."""
        self._client = client
        self._timeout = timeout
        self._folders = folders
        self._require_token = require_token
        self._server = aio.server(
            options=(("grpc.max_receive_message_length", _REQUEST_BYTES), ("grpc.so_reuseport", 0)),
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        handlers = {each.descriptor.name: self._handler(each) for each in service.methods}
        self._server.add_registered_method_handlers(service.descriptor.full_name, handlers)

    async def start(self, address: str, certificate: tuple[bytes, bytes] | None = None) -> int:
        """Listen, with a key and a chain in PEM if given; return the port.

        Raises:
            RuntimeError: the address cannot be bound.
        """
        if certificate is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, grpc.ssl_server_credentials([certificate]))
        await self._server.start()
        return port

    async def stop(self) -> None:
        """End once the calls have ended, or after some seconds."""
        await self._server.stop(_GRACE)

    def _handler(self, method: Method) -> Any:
        kinds = method.descriptor.input_type, method.descriptor.output_type
        request, response = map(message_factory.GetMessageClass, kinds)
        coders: dict[str, Any] = {
            "request_deserializer": request.FromString,
            "response_serializer": response.SerializeToString,
        }

        async def unary(message: Message, context: Any) -> Message:
            async with self._call(method, context) as left:
                return await self._answer(method, _document(message), left)
            raise AssertionError("the call was aborted")

        async def stream(message: Message, context: Any) -> AsyncIterator[Message]:
            async with (
                self._call(method, context) as left,
                contextlib.aclosing(self._events(method, _document(message), left)) as events,
            ):
                async for each in events:
                    yield each

        async def conversation(messages: Any, context: Any) -> AsyncIterator[Message]:
            async with self._call(method, context) as left:
                async for message in messages:
                    yield await self._answer(method, _document(message), left)

        if method.descriptor.client_streaming:
            return grpc.stream_stream_rpc_method_handler(conversation, **coders)
        if method.descriptor.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, **coders)
        return grpc.unary_unary_rpc_method_handler(unary, **coders)

    @contextlib.asynccontextmanager
    async def _call(self, method: Method, context: Any) -> AsyncIterator[float]:
        """Yield the seconds that the call may take; its failures become gRPC's."""
        metadata = dict(context.invocation_metadata())
        _token.set(metadata.get("authorization", "").removeprefix("Bearer "))
        try:
            if self._require_token and not token():
                raise Unauthenticated("the call needs a token: authorization: Bearer TOKEN")
            left = context.time_remaining()
            yield self._timeout if left is None else min(left, self._timeout)
        except MappingError as error:  # an expression that the samples did not show to fail
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        except LegatoError as error:
            if error.request_id:
                context.set_trailing_metadata((("x-request-id", error.request_id),))
            code = grpc.StatusCode[error.code]
            await context.abort(code, _in_their_words(error, method))
        except (TypeError, ValueError) as error:  # an argument that the client does not take
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _answer(self, method: Method, document: Mapping[str, Any], left: float) -> Message:
        image, fields, sampling, options = await self._asked(method, document)
        if method.skill == ENCODE:
            held = await self._client.put_image(image, **fields, timeout=left)
            size = {"width": held.width, "height": held.height}
            return method.answer({"image_id": held.image_id, **size})
        call = getattr(self._client, method.skill)
        result = await call(image, **fields, sampling=sampling, options=options, timeout=left)
        return method.answer(_plain(result))

    async def _events(
        self, method: Method, document: Mapping[str, Any], left: float
    ) -> AsyncGenerator[Message, None]:
        """Yield a message for each text, object and result, unless it would be empty."""
        if method.skill == ENCODE:
            yield await self._answer(method, document, left)
            return
        image, fields, sampling, options = await self._asked(method, document)
        task = skills.BY_NAME[method.skill].task(**fields, sampling=sampling)
        nothing = _sample_results(method.skill, streams=True)[0]
        events = self._client.generate(image, task, options=options, timeout=left)
        async with contextlib.aclosing(events):
            async for event in events:
                told: dict[str, Any]
                match event:
                    case results.TextDelta():
                        told = {"delta": event.text, "done": False}
                    case results.Detection() | results.PointedObject():
                        told = {"object": _plain(event), "done": False}
                    case results.Finished():
                        told = {**_plain(event.result), "done": True}
                    case _:
                        continue
                message = method.answer({**dict.fromkeys(nothing), **told})
                if message.ByteSize():
                    yield message

    async def _asked(
        self, method: Method, document: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any], tasks.Sampling, tasks.Options]:
        """Return the image and the arguments, without those that the request leaves out."""
        given = {name: each.of(document) for name, each in method.request.items()}
        fields = {name: value for name, value in given.items() if value is not None}
        image = fields.pop("image", None)
        if image is None and method.skill != "query":
            raise _refused(method, "image", "is required")
        if image is not None:
            image = await self._image(method, image)
        sampling = {name: fields.pop(name) for name in _SAMPLING if name in fields}
        options = {name: fields.pop(name) for name in _OPTIONS if name in fields}
        for name in _SUBJECTS:
            if name in method.request and name not in fields:
                raise _refused(method, name, "is required")
        if "stop" in sampling:
            stop = sampling["stop"]
            sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if "spatial_refs" in fields:
            fields["spatial_refs"] = tuple(
                (results.Point if len(each) == 2 else results.Box)(*each)
                for each in fields["spatial_refs"]
            )
        return image, fields, tasks.Sampling(**sampling), tasks.Options(**options)

    async def _image(self, method: Method, given: bytes | str) -> Any:
        try:
            match method.image_form:
                case "id":
                    return CachedImage(given if isinstance(given, str) else given.decode())
                case "base64":
                    text = given if isinstance(given, str) else given.decode("ascii")
                    data = text.partition(",")[2] if text.startswith("data:") else text
                    return base64.b64decode(data, validate=True)
                case "path":
                    return await asyncio.to_thread(
                        self._folders.read, str(given), MAX_MESSAGE_BYTES
                    )
                case _:
                    return given
        except UnicodeDecodeError:
            raise _refused(method, "image", f"is no {method.image_form}") from None
        except binascii.Error:
            raise _refused(method, "image", "is not valid base64") from None
        except OSError as error:
            raise _refused(method, "image", f"cannot be read: {error.strerror}") from None


def _refused(method: Method, argument: str, problem: str) -> InvalidArgument:
    violation = FieldViolation(argument, problem)
    return InvalidArgument(f"{argument} {problem}", field_violations=(violation,))


def _in_their_words(error: LegatoError, method: Method) -> str:
    """Return the message about the foreign request's part instead of the contract's field."""
    for violation in error.field_violations[:1]:
        parts = violation.field.replace("chunk", "image").split(".")  # PutImage's own
        for name, expression in method.request.items():
            if name in parts:
                return f"{expression.text}: {violation.description} [{error.reason or error.code}]"
    return str(error)
