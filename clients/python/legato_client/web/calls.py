"""One task as one call."""

from __future__ import annotations

from legato_client._async_client import AsyncClient
from legato_client._async_client import ask as call
from legato_client._errors import InvalidArgument
from legato_client._values.results import Result
from legato_client._values.tasks import Options, QueryTask, Task


async def ask(
    client: AsyncClient, image: bytes | None, task: Task, options: Options, seconds: float
) -> Result:
    """The skill's own call, which gRPC repeats where it may; fails as the client's call does.

    A question, not a conversation: that has its picture among its messages.
    """
    if image is None and not isinstance(task, QueryTask):
        raise InvalidArgument("this task needs a picture", reason="INVALID_FIELD")
    return await call(client, image, task, options, seconds)
