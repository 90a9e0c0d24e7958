"""Model Context Protocol: the skills as tools, over standard input or streamable HTTP.

A caller chooses the image, so a folder or URL is read only if the operator allowed it.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import io
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

import httpx2
import msgspec
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato_client import draw
from legato_client._async_client import ask
from legato_client._errors import LegatoError
from legato_client._grpc.channel import MAX_MESSAGE_BYTES
from legato_client._images.sources import AllowedFolders, OutsideFoldersError
from legato_client._proto import skills
from legato_client._types.results import Result
from legato_client._types.tasks import Options, Task
from legato_client._version import version
from legato_client.web import bodies, moondream_api, operations
from legato_client.web.errors import RejectedRequest, document_of
from legato_client.web.listen import Listen
from legato_client.web.server import Backend

PATH = "/mcp"
MAX_SIDE = 1568
"""Longest side of a drawing in pixels; models that read it scale it to less."""

_FETCH_TIMEOUT = 10.0  # seconds
_MAX_CALLS = 8  # at a time, as each holds an image and its drawing
_INSTRUCTIONS = (
    "Tools that look at one image: give exactly one of image_path, image_url and image_base64. "
    "Coordinates are fractions of the image's width and height, from its top left corner."
)


# ---------------------------------------------------------------- arguments

Count = Annotated[int, Meta(ge=1, le=operations.MAX_COUNT)]
Noun = Annotated[str, Meta(description="what to look for, as a noun phrase: red cup")]


class ToolArguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """Arguments of all tools."""

    image_path: Annotated[str, Meta(description="a file in an allowed folder")] | None = None
    image_url: Annotated[str, Meta(description="an allowed URL")] | None = None
    image_base64: Annotated[str, Meta(description="a file's bytes, or a data URL")] | None = None

    def task(self) -> Task:
        """Build the task of the skill that the tool is named after."""
        skill = skills.BY_NAME[type(self).__name__.lower()]
        names = filter(skill.takes, self.__struct_fields__)
        task: Task = skill.task(**{name: getattr(self, name) for name in names})
        return task


class DrawnArguments(ToolArguments, kw_only=True):
    """Arguments of tools whose result can be drawn."""

    object: Noun
    annotate: Annotated[bool, Meta(description="return the image with the result drawn")] = True


class ListArguments(DrawnArguments, kw_only=True):
    """Arguments of tools that find every instance."""

    max_objects: Count | None = None
    min_confidence: Annotated[float, Meta(ge=0, le=1)] | None = None


class Detect(ListArguments, kw_only=True):
    """Box every instance of an object in an image."""


class Point(ListArguments, kw_only=True):
    """Point at every instance of an object in an image."""


class Segment(DrawnArguments, kw_only=True):
    """Outline an object in an image: an SVG path within its box."""


class Caption(ToolArguments, kw_only=True):
    """Describe an image."""

    length: Literal["short", "normal", "long"] = "normal"


class Query(ToolArguments, kw_only=True):
    """Answer a question, about an image if one is given."""

    question: str
    reasoning: Annotated[bool, Meta(description="think first")] = False


TOOLS: Mapping[str, type[ToolArguments]] = {
    kind.__name__.lower(): kind for kind in (Detect, Point, Segment, Caption, Query)
}


def _schema(kind: type[Struct]) -> dict[str, Any]:
    """Return a JSON schema whose root is the object itself, as the protocol asks."""
    _, components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    root: dict[str, Any] = components.pop(kind.__name__)
    return {**root, "$defs": components} if components else root


def _tool(name: str, kind: type[ToolArguments]) -> types.Tool:
    return types.Tool(
        name=name,
        description=(kind.__doc__ or "").strip(),
        input_schema=_schema(kind),
        output_schema=_schema(moondream_api.ANSWERS[name]),
        annotations=types.ToolAnnotations(read_only_hint=True, idempotent_hint=True),
    )


# ---------------------------------------------------------------- images


class ImageSources:
    """Images by path, URL or base64, below allowed folders and URLs only.

    Raises:
        ValueError: a folder does not exist, or a URL is none of HTTP or names no host.
    """

    def __init__(self, folders: Sequence[str], urls: Sequence[str]) -> None:
        self._folders = AllowedFolders(folders)
        for url in urls:
            found = urlsplit(url)
            if found.scheme not in ("http", "https") or not found.hostname or found.query:
                raise ValueError(f"--allow-url takes http(s)://HOST[:PORT][/PATH], not {url!r}")
        self._urls = [urlsplit(each) for each in urls]

    async def load(self, arguments: ToolArguments) -> tuple[bytes | None, str]:
        """Return the image, if one is named, and the argument that names it."""
        named = [
            name
            for name in ("image_path", "image_url", "image_base64")
            if getattr(arguments, name) is not None
        ]
        if not named and isinstance(arguments, Query):
            return None, "image_path"
        if len(named) != 1:
            raise RejectedRequest(
                "give exactly one of image_path, image_url and image_base64",
                field=named[1] if named else "image_path",
            )
        (name,) = named
        given: str = getattr(arguments, name)
        if name == "image_path":
            return await asyncio.to_thread(self._read, given), name
        if name == "image_url":
            return await self._fetch(given), name
        if len(given) > bodies.MAX_BODY_BYTES:
            raise _too_large(name)
        url = given if given.startswith("data:") else f"data:;base64,{given}"
        return await bodies.decoded(url, name), name

    def _read(self, given: str) -> bytes:
        try:
            return self._folders.read(given, MAX_MESSAGE_BYTES)
        except OutsideFoldersError:
            raise RejectedRequest(
                "outside of the folders that `legato mcp --allow-path` names",
                field="image_path",
                code="forbidden",
            ) from None
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise _too_large("image_path") from None
            problem = f"cannot be read: {error.strerror}"
            raise RejectedRequest(problem, field="image_path") from None

    def _is_allowed(self, url: str) -> bool:
        try:
            asked = urlsplit(url)
            origin = (asked.scheme, asked.hostname, asked.port)
        except ValueError:
            return False
        path = unquote(asked.path)
        if asked.username is not None or "\\" in url or ".." in path.split("/"):
            return False
        return any(
            origin == (each.scheme, each.hostname, each.port)
            and (path.startswith(each.path.rstrip("/") + "/") or path == each.path)
            for each in self._urls
        )

    async def _fetch(self, url: str) -> bytes:
        """Fetch an allowed URL; a redirection could lead elsewhere and is refused."""
        if not self._is_allowed(url):
            raise RejectedRequest(
                "not below a URL that `legato mcp --allow-url` names",
                field="image_url",
                code="forbidden",
            )
        data = bytearray()
        try:
            async with (
                asyncio.timeout(_FETCH_TIMEOUT),
                httpx2.AsyncClient(follow_redirects=False, trust_env=False) as client,
                client.stream("GET", url) as response,
            ):
                if response.status_code != httpx2.codes.OK:
                    problem = f"answered with HTTP status {response.status_code}"
                    raise RejectedRequest(problem, field="image_url")
                async for piece in response.aiter_raw():
                    data += piece
                    if len(data) > MAX_MESSAGE_BYTES:
                        raise _too_large("image_url")
        except TimeoutError:
            problem = f"did not arrive within {_FETCH_TIMEOUT:g} s"
            raise RejectedRequest(problem, field="image_url") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            problem = f"cannot be fetched: {type(error).__name__} {error}"
            raise RejectedRequest(problem, field="image_url") from None
        return bytes(data)


def _too_large(field: str) -> RejectedRequest:
    return RejectedRequest(
        f"has more than {MAX_MESSAGE_BYTES} bytes", field=field, code="image_too_large"
    )


# ---------------------------------------------------------------- tools


class ToolServer:
    """The tools in front of a Legato server."""

    def __init__(self, backend: Backend, sources: ImageSources) -> None:
        self._backend = backend
        self._sources = sources
        self._calls = asyncio.Semaphore(_MAX_CALLS)
        self._tools = [_tool(name, kind) for name, kind in TOOLS.items()]
        self.server: Server[Any] = Server(
            "legato",
            version=version(),
            instructions=_INSTRUCTIONS,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )

    async def serve_standard_input(self) -> None:
        """Serve one client until it closes standard input."""
        async with (
            self._backend.client,
            self._backend.probe,
            stdio_server() as (received, sent),
        ):
            await self.server.run(received, sent, self.server.create_initialization_options())

    async def _list(
        self, _context: ServerRequestContext[Any], _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=self._tools)

    async def _call(
        self, _context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        """Run a tool. What is wrong with its arguments is a result, which a model can read."""
        kind = TOOLS.get(params.name)
        if kind is None:
            names = ", ".join(TOOLS)
            raise MCPError(
                types.INVALID_PARAMS, f"no tool is called {params.name!r}; there are {names}"
            )
        try:
            arguments = msgspec.convert(params.arguments or {}, kind)
        except msgspec.ValidationError as error:
            message, field = bodies.explained(str(error))
            return _failed(RejectedRequest(message, field=field), {})
        async with self._calls:
            return await self._run(arguments)

    async def _run(self, arguments: ToolArguments) -> types.CallToolResult:
        name = "image_path"
        try:
            image, name = await self._sources.load(arguments)
            result = await ask(
                self._backend.client, image, arguments.task(), Options(), self._backend.timeout
            )
        except (RejectedRequest, LegatoError) as error:
            return _failed(error, {"image": name})
        answer = moondream_api.answer_of(result)
        text = msgspec.json.encode(answer).decode()
        content: list[types.ContentBlock] = [types.TextContent(type="text", text=text)]
        if isinstance(arguments, DrawnArguments) and arguments.annotate and image is not None:
            content.append(await asyncio.to_thread(_drawing, image, result))
        return types.CallToolResult(content=content, structured_content=msgspec.to_builtins(answer))


def _failed(
    error: RejectedRequest | LegatoError, members: Mapping[str, str]
) -> types.CallToolResult:
    told = document_of(error, members).error
    place = f"{told.param}: " if told.param else ""
    text = f"{told.code}: {place}{told.message}"
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)


def _drawing(image: bytes, result: Result) -> types.ImageContent:
    """Draw the result; the Legato server has checked the image's size."""
    drawn = draw.annotate(image, draw.marks_of(result))
    drawn.thumbnail((MAX_SIDE, MAX_SIDE))
    written = io.BytesIO()
    drawn.save(written, "JPEG", quality=85)
    data = base64.b64encode(written.getvalue()).decode()
    return types.ImageContent(type="image", data=data, mime_type="image/jpeg")


# ---------------------------------------------------------------- HTTP


def _replayed(body: bytes, receive: Receive) -> Receive:
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return rest.pop() if rest else await receive()

    return replay


def route(tools: ToolServer, backend: Backend, listen: Listen) -> Route:
    """Return the route of streamable HTTP, without sessions: each request has its caller's token.

    On loopback foreign names in Host and Origin are refused, so that no page in a browser that
    calls itself by another name reaches the tools.
    """
    names = ["localhost:*", "127.0.0.1:*", "[::1]:*"] if listen.is_local else []
    manager = StreamableHTTPSessionManager(
        tools.server,
        json_response=True,
        stateless=True,
        max_request_body_size=bodies.MAX_BODY_BYTES,
        security_settings=TransportSecuritySettings(
            enable_dns_rebinding_protection=listen.is_local,
            allowed_hosts=names,
            allowed_origins=[f"http://{each}" for each in names],
        ),
    )
    backend.background.append(manager.run)

    async def answer(request: Request) -> ASGIApp:
        """Answer a request, whose body is bounded and read after its token was accepted."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            limit = bodies.MAX_BODY_BYTES
            async with backend.bodies.holding(request, limit, is_json=True) as data:
                await manager.handle_request(scope, _replayed(bytes(data), receive), send)

        return serve

    return Route(PATH, answer, methods=["POST"])
