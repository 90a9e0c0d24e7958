"""Uncompressed images: layout checks, and conversion to 8-bit RGB.

YUV is BT.601 in limited range (Y 16..235, U and V 16..240 around 128), as of UVC cameras, V4L2 and
OpenCV.

Shape legend: H and W pixels, C channels; h and w chroma samples, V values of a sample.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from legato_engine.errors import InvalidField
from legato_engine.images.headers import too_large
from legato_engine.images.memory import Allocate, Pixels, new_pixels
from legato_engine.types import PixelFormat, RawImage

_Samples = npt.NDArray[np.int16]

_CHANNELS = {  # bytes of a pixel, and indices of red, green and blue
    PixelFormat.RGB8: (3, (0, 1, 2)),
    PixelFormat.BGR8: (3, (2, 1, 0)),
    PixelFormat.RGBA8: (4, (0, 1, 2)),
    PixelFormat.BGRA8: (4, (2, 1, 0)),
    PixelFormat.MONO8: (1, (0, 0, 0)),
}
_EVEN_SIDES = {PixelFormat.YUYV: ("width",), PixelFormat.NV12: ("width", "height")}
_FRACTION_BITS = 5  # maximum that keeps every channel's sum within int16
_ROWS_AT_A_TIME = 64  # even, and few enough that the sums stay in the CPU cache


def row_bytes(form: PixelFormat, width: int) -> int:
    """Return the bytes of a row without padding; for NV12, of a row of either plane."""
    if form is PixelFormat.NV12:
        return width
    return width * (2 if form is PixelFormat.YUYV else _CHANNELS[form][0])


def num_bytes(form: PixelFormat, width: int, height: int, row_stride: int) -> int:
    """Return the bytes of the image, its last row without padding."""
    rows = height + height // 2 if form is PixelFormat.NV12 else height
    return (rows - 1) * row_stride + row_bytes(form, width)


def check_layout(form: PixelFormat, width: int, height: int, row_stride: int) -> None:
    """Check sides and stride.

    Raises:
        InvalidField: a value does not fit the format.
    """
    even = _EVEN_SIDES.get(form, ())
    for name, value in (("width", width), ("height", height)):
        if value < 1:
            raise InvalidField("must be at least 1", field=name)
        if name in even and value % 2:
            raise InvalidField(f"must be even in {form.name}", field=name, actual=value)
    least = row_bytes(form, width)
    if row_stride < least:
        raise InvalidField(
            f"a row has {least} bytes", field="row_stride_bytes", limit=least, actual=row_stride
        )


def check_raw(raw: RawImage, *, max_pixels: int) -> None:
    """Check the layout of a raw image.

    Raises:
        InvalidField: it does not fit the format or the blob.
        ImageTooLarge: it has more than `max_pixels`.
    """
    check_layout(raw.format, raw.width, raw.height, raw.row_stride)
    if raw.width * raw.height > max_pixels:
        raise too_large(raw.width * raw.height, max_pixels, "pixels")
    needed = num_bytes(raw.format, raw.width, raw.height, raw.row_stride)
    if raw.blob.size < needed:
        raise InvalidField(f"{needed} bytes of pixels needed, {raw.blob.size} given", field="image")


def decode_raw(view: bytes | memoryview, raw: RawImage, allocate: Allocate = new_pixels) -> Pixels:
    """Return the pixels [H, W, C] in memory of `allocate`, independent of `view`.

    Raises:
        InvalidField: the layout does not fit the bytes.
    """
    check_raw(raw, max_pixels=raw.width * raw.height)
    bytes_N = np.frombuffer(view, np.uint8, count=raw.blob.size)
    pixels_HWC = allocate((raw.height, raw.width, 3))
    if raw.format is PixelFormat.NV12:
        _decode_nv12(bytes_N, raw, pixels_HWC)
    elif raw.format is PixelFormat.YUYV:
        _decode_yuyv(bytes_N, raw, pixels_HWC)
    else:
        _reorder(bytes_N, raw, pixels_HWC)
    return pixels_HWC


def _reorder(bytes_N: Pixels, raw: RawImage, pixels_HWC: Pixels) -> None:
    channels, order = _CHANNELS[raw.format]
    stored_HWC = _rows(bytes_N, (raw.height, raw.width, channels), raw.row_stride)
    if order == (0, 1, 2) and channels == 3:
        pixels_HWC[:] = stored_HWC
        return
    # Several times as fast as indexing all channels at once.
    for channel, stored in enumerate(order):
        pixels_HWC[:, :, channel] = stored_HWC[:, :, stored]


def _rows(bytes_N: Pixels, shape: tuple[int, int, int], row_stride: int) -> Pixels:
    return np.lib.stride_tricks.as_strided(bytes_N, shape, (row_stride, shape[2], 1))


# ---------------------------------------------------------------- YUV


def _level_table(scale: float, zero: int) -> _Samples:
    """Return each sample value's contribution to a channel, scaled by `2 ** _FRACTION_BITS`."""
    levels_V = (np.arange(256) - zero) * scale * (1 << _FRACTION_BITS)
    table_V: _Samples = np.rint(levels_V).astype(np.int16)
    return table_V


_RED, _GREEN, _BLUE = 0.299, 0.587, 0.114  # BT.601 weights of luma
_CHROMA = 255 / 224 * 2
_HALF = np.int16(1 << (_FRACTION_BITS - 1))  # rounds
_LUMA = _level_table(255 / 219, 16) + _HALF
_RED_OF_V = _level_table(_CHROMA * (1 - _RED), 128)
_BLUE_OF_U = _level_table(_CHROMA * (1 - _BLUE), 128)
_GREEN_OF_U = _level_table(-_CHROMA * (1 - _BLUE) * _BLUE / _GREEN, 128)
_GREEN_OF_V = _level_table(-_CHROMA * (1 - _RED) * _RED / _GREEN, 128)


def _decode_nv12(bytes_N: Pixels, raw: RawImage, pixels_HWC: Pixels) -> None:
    """Decode planes of Y and of U V pairs, one pair per 2 by 2 pixels."""
    height, width = raw.height, raw.width
    luma_HW = _rows(bytes_N, (height, width, 1), raw.row_stride)[:, :, 0]
    chroma_N = bytes_N[height * raw.row_stride :]
    chroma_hwC = _rows(chroma_N, (height // 2, width // 2, 2), raw.row_stride)
    _to_rgb(luma_HW, chroma_hwC[:, :, 0], chroma_hwC[:, :, 1], pixels_HWC)


def _decode_yuyv(bytes_N: Pixels, raw: RawImage, pixels_HWC: Pixels) -> None:
    """Decode Y U Y V for each pair of pixels in a row."""
    pairs_HwC = _rows(bytes_N, (raw.height, raw.width // 2, 4), raw.row_stride)
    luma_HW = _rows(bytes_N, (raw.height, raw.width, 2), raw.row_stride)[:, :, 0]
    _to_rgb(luma_HW, pairs_HwC[:, :, 1], pairs_HwC[:, :, 3], pixels_HWC)


def _to_rgb(luma_HW: Pixels, u_hw: Pixels, v_hw: Pixels, pixels_HWC: Pixels) -> None:
    """Convert to RGB; a chroma sample covers two columns and one or two rows."""
    height = luma_HW.shape[0]
    rows_per_sample = height // u_hw.shape[0]
    for top in range(0, height, _ROWS_AT_A_TIME):
        rows = slice(top, top + _ROWS_AT_A_TIME)
        chroma_rows = slice(top // rows_per_sample, (top + _ROWS_AT_A_TIME) // rows_per_sample)
        u, v = u_hw[chroma_rows], v_hw[chroma_rows]
        chroma = (
            _RED_OF_V.take(v),
            _GREEN_OF_U.take(u) + _GREEN_OF_V.take(v),
            _BLUE_OF_U.take(u),
        )
        luma_sums = _LUMA.take(luma_HW[rows])
        for channel, chroma_sums in enumerate(chroma):
            level = np.repeat(np.repeat(chroma_sums, 2, axis=1), rows_per_sample, axis=0)
            level += luma_sums
            level >>= _FRACTION_BITS
            np.clip(level, 0, 255, out=level)
            pixels_HWC[rows, :, channel] = level
