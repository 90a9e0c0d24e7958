"""The quota of pixels of the current call."""

from __future__ import annotations

from legato_service.rpc.call import CURRENT


def take_pixels(width: int, height: int) -> None:
    """Count a new image, once its size is known and before it is read further.

    Raises:
        QuotaExceeded: the call's credential has sent too many pixels.
    """
    rpc = CURRENT.get(None)
    if rpc is not None and rpc.principal is not None:
        rpc.principal.take_pixels(width * height)
