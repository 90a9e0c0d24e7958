"""The engines beside one, as its connection knows them."""

from __future__ import annotations

from typing import Protocol

from legato_engine.client.request_stream import RequestStream
from legato_engine.ipc.messages import Done, Started


class Siblings(Protocol):
    """Takes requests that an engine cannot run."""

    def take_over(self, stream: RequestStream) -> bool:
        """Have another engine run a request that is not sent; False: none serves."""
        ...

    def find_image(self, stream: RequestStream) -> bool:
        """Have another engine run a request whose image is not at those it `searched`.

        False: none is left.
        """
        ...

    def saw(self, stream: RequestStream, output: Started | Done, number: int) -> None:
        """Note what engine `number` said of a request's image."""
        ...
