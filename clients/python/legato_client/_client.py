"""The blocking client: the calls of `AsyncClient` over a blocking channel."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, TypeVar

from legato_client._client_methods import ClientMethods
from legato_client._grpc.settings import ClientSettings, ConfiguredClient
from legato_client._grpc.transport import BlockingTransport, run
from legato_client._session.sessions import Session
from legato_client._session.state import plan, session_method

P = ParamSpec("P")
ValueT = TypeVar("ValueT")


def _blocking(
    method: Callable[Concatenate[ClientMethods, P], Coroutine[Any, Any, ValueT]],
) -> Callable[Concatenate[Client, P], ValueT]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> ValueT:
        return run(method(self._calls, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[ClientMethods, P], AsyncGenerator[ValueT, None]],
) -> Callable[Concatenate[Client, P], Generator[ValueT, None, None]]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Generator[ValueT, None, None]:
        events = method(self._calls, *args, **kwargs)
        try:
            while (event := run(anext(events, None))) is not None:
                yield event
        finally:
            run(events.aclose())

    return call


class Client(ConfiguredClient):
    """A blocking client of one Legato server; safe to share between threads.

        with Client("127.0.0.1:50051", timeout=10) as client:
            result = client.detect("street.jpg", "bicycle")
            for event in client.generate("street.jpg", CaptionTask()):
                ...

    The arguments and errors are those of `AsyncClient`.
    """

    query = _blocking(ClientMethods.query)
    chat = _blocking(ClientMethods.chat)
    caption = _blocking(ClientMethods.caption)
    detect = _blocking(ClientMethods.detect)
    point = _blocking(ClientMethods.point)
    segment = _blocking(ClientMethods.segment)
    run_tasks = _blocking(ClientMethods.run_tasks)
    generate = _iterating(ClientMethods.generate)
    session = session_method(plan, Session)
    put_image = _blocking(ClientMethods.put_image)
    encode_image = put_image  # the moondream SDK's word
    delete_image = _blocking(ClientMethods.delete_image)
    server_info = _blocking(ClientMethods.server_info)
    models = _blocking(ClientMethods.models)
    load = _blocking(ClientMethods.load)
    abort = _blocking(ClientMethods.abort)
    drain = _blocking(ClientMethods.drain)
    metrics = _blocking(ClientMethods.metrics)
    set_pipeline_depth = _blocking(ClientMethods.set_pipeline_depth)
    watch_timeline = _iterating(ClientMethods.watch_timeline)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End running calls and the connection."""
        self._connection.close()

    def _connect(self, settings: ClientSettings) -> None:
        self._connection = BlockingTransport(settings)
        self._calls = ClientMethods(settings, self._connection)
