"""The asyncio client."""

from __future__ import annotations

from legato_client._client_methods import ClientMethods
from legato_client._grpc.settings import ClientSettings, ConfiguredClient
from legato_client._grpc.transport import AsyncTransport
from legato_client._images.sources import ImageInput
from legato_client._proto import skills
from legato_client._session.sessions import AsyncSession
from legato_client._session.state import plan, session_method
from legato_client._types.results import Result
from legato_client._types.tasks import Options, Task


class AsyncClient(ConfiguredClient, ClientMethods):
    """An asyncio client of one Legato server.

        async with AsyncClient("127.0.0.1:50051", timeout=10) as client:
            result = await client.detect("street.jpg", "bicycle")
            async for event in client.generate("street.jpg", CaptionTask()):
                ...

    The channel opens at the first call, in the loop that makes it.

    Args:
        target: Any gRPC name ("host:port", "dns:///name:port", "unix:/path"), port 50051 where a
            host has none; None takes `LEGATO_SERVER` from the environment, else this host.
        timeout: Seconds for a unary call that names none.
        stream_timeout: Seconds for `generate` that names none.
        tls: Encrypt the connection. Default: if `ca`, `cert` or `credentials` are given.
        ca: Certificates of the authorities that a server's certificate may be of, as the path of a
            PEM file or as its bytes; default: those that gRPC knows.
        cert, key: This client's certificate and its private key, likewise.
        token: Sent with every call: the text, the path of a file (`pathlib.Path`), which is read
            again when it changes, or a function that returns the current one. Default: the
            environment's `LEGATO_TOKEN`, if any; "" is none, also from a function.
        credentials: gRPC's own TLS credentials instead of `tls`, `ca`, `cert` and `key`.
        priority: -100 to 100, sent with every call; higher goes first.
        tenant: The tenant that calls are counted for, sent with every call.
        metadata: Further metadata sent with every call.
        max_message_bytes: The largest message that either side may send.

    Raises:
        UnencryptedToken: From the constructor, for a token without TLS unless the target is
            certain to be on this host.
        ValueError: From the constructor, for a target that is a URL of HTTP or has no valid port.
        LegatoError: From every call that fails; see `legato_client._errors`.
        TypeError, ValueError, OSError: From calls whose image cannot be read.
    """

    session = session_method(plan, AsyncSession)
    encode_image = ClientMethods.put_image  # the moondream SDK's word

    @property
    def _calls(self) -> ClientMethods:
        return self

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End running calls and the connection."""
        await self._connection.close()

    def _connect(self, settings: ClientSettings) -> None:
        self._connection = AsyncTransport(settings)
        ClientMethods.__init__(self, settings, self._connection)


async def ask(
    client: AsyncClient, image: ImageInput | None, task: Task, options: Options, seconds: float
) -> Result:
    """Run one task by its skill's own call; a conversation has its image among its messages."""
    result: Result = await client._ask(skills.of(task), image, task, options, seconds)
    return result
