"""A picture on its way from a camera to the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from legato_client._images.sources import ImageInput

if TYPE_CHECKING:
    from PIL import Image


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shot:
    """A picture that is not converted yet, because most of an overloaded camera never are.

    `number` counts the camera's pictures from 0. `time` is in seconds from the first,
    `captured_ns` counts from the Unix epoch. `origin` is whatever
    its receiver wants to know of it. `read` gives what is sent and `picture` what is drawn
    on; both raise OSError or ValueError for a picture that is none.
    """

    number: int
    time: float
    captured_ns: int
    read: Callable[[], ImageInput]
    picture: Callable[[], Image.Image]
    frame_id: str = ""
    origin: object = None
