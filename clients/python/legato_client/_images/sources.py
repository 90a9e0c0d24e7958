"""Images of every type, as protobuf: files, Pillow, NumPy, raw and shared frames."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import errno
import io
import os
import secrets
import stat
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from legato.v1 import media_pb2

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image as PILImage

PixelFormat = Literal["rgb8", "bgr8", "rgba8", "bgra8", "mono8", "nv12", "yuyv"]
Pixels: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any]"

_FORMATS: dict[str, tuple[media_pb2.PixelFormat.ValueType, int]] = {  # and bytes of a row's pixel
    "rgb8": (media_pb2.PIXEL_FORMAT_RGB8, 3),
    "bgr8": (media_pb2.PIXEL_FORMAT_BGR8, 3),
    "rgba8": (media_pb2.PIXEL_FORMAT_RGBA8, 4),
    "bgra8": (media_pb2.PIXEL_FORMAT_BGRA8, 4),
    "mono8": (media_pb2.PIXEL_FORMAT_MONO8, 1),
    "nv12": (media_pb2.PIXEL_FORMAT_NV12, 1),
    "yuyv": (media_pb2.PIXEL_FORMAT_YUYV, 2),
}
_MAX_SAMPLE = 0xFFFF
FORMAT_OF_CHANNELS: dict[int, PixelFormat] = {1: "mono8", 3: "rgb8", 4: "rgba8"}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RawFrame:
    """Pixels without a file format: any bytes-like `data`, an array included, and their shape.

    `width` and `height` are in pixels, `stride` in bytes from row to row; 0 means rows without
    padding. "bgr8" is OpenCV's order; "nv12" and "yuyv" are what cameras give, and the server must
    have the capability `pixel_format.nv12` or `pixel_format.yuyv`. Raises ValueError for a shape
    that cannot be, or more pixels than bytes.
    """

    data: Pixels
    width: int
    height: int
    format: PixelFormat
    stride: int = 0

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(f"format must be one of {sorted(_FORMATS)}, got {self.format!r}")
        if self.width < 1 or self.height < 1:
            raise ValueError(f"need at least one pixel, got {self.width} x {self.height}")
        if self.stride and self.stride < self._row_bytes:
            raise ValueError(f"a row has {self._row_bytes} bytes, the stride is {self.stride}")
        given, needed = _view(self.data).nbytes, self._least_bytes
        if given < needed:
            raise ValueError(
                f"{self.width} x {self.height} {self.format} need {needed} bytes, got {given}"
            )

    @classmethod
    def from_array(cls, array: np.ndarray[Any, Any], format: PixelFormat | None = None) -> RawFrame:
        """Convert a uint8 array of shape (height, width) or (height, width, channels).

        Without `format` one channel is mono8, three are rgb8 and four rgba8. An OpenCV image is
        "bgr8", or "bgra8". "nv12" has the shape (height * 3 / 2, width) and "yuyv" (height, width,
        2). Raises ValueError for another shape or type.
        """
        channels = array.shape[2] if array.ndim == 3 else 1
        if array.dtype.name != "uint8" or array.ndim not in (2, 3):
            raise ValueError(f"need a uint8 array of 2 or 3 axes, got {array.dtype} {array.shape}")
        name = format or FORMAT_OF_CHANNELS.get(channels)
        if name is None or array.size == 0:
            raise ValueError(f"need a non-empty array of 1, 3 or 4 channels, got {array.shape}")
        if name in _FORMATS and _FORMATS[name][1] != channels:
            raise ValueError(f"{name} needs {_FORMATS[name][1]} channels, got {array.shape}")
        rows, width = array.shape[:2]
        whole = array if array.flags.c_contiguous else array.copy(order="C")
        return cls(whole, width, rows * 2 // 3 if name == "nv12" else rows, name)

    def to_image(self) -> media_pb2.Image:
        """Return the protobuf image."""
        image = media_pb2.Image()
        image.raw.layout.CopyFrom(self.layout)
        image.raw.data = self.data if isinstance(self.data, bytes) else bytes(self.view)
        return image

    @property
    def layout(self) -> media_pb2.PixelLayout:
        """The protobuf shape."""
        return media_pb2.PixelLayout(
            width=self.width,
            height=self.height,
            row_stride_bytes=self.row_bytes,
            format=_FORMATS[self.format][0],
        )

    @property
    def view(self) -> memoryview:
        """The bytes, not copied."""
        return _view(self.data).cast("B")

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row."""
        return self.stride or self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.width * _FORMATS[self.format][1]

    @property
    def _least_bytes(self) -> int:
        """The last row need not be padded."""
        rows = self.height * 3 // 2 if self.format == "nv12" else self.height
        return (rows - 1) * self.row_bytes + self._row_bytes


def _view(pixels: Any) -> memoryview:  # an array is a buffer to Python, not yet to type checkers
    return memoryview(pixels)


# ---------------------------------------------------------------- shared frames

# Frames for a server on this host, through shared memory: the writer's side of `SharedImage`.
#
# A region is a ring of slots. Each has a generation that is odd while the slot is written, so that
# the server notices a frame that was overwritten while it was read. numpy is never imported here.

HEADER_SIZE = 64
_MAGIC = b"LEGATO01"
_GENERATION = struct.Struct("<Q")
_GENERATION_AT = len(_MAGIC)  # from the header's start
Frame: TypeAlias = "bytes | bytearray | memoryview | RawFrame | np.ndarray[Any, Any]"


class SlotsBusy(BufferError):
    """Raised when every slot holds a frame that was not released."""


def shm_namespace() -> str:
    """Return this host's shared memory namespace, as the server reports its own in `shm_namespace`.

    Frames are for a server whose own is the same. Empty where there is no shared memory.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}:{_folder().stat().st_dev}"
    except OSError:
        return ""


class SharedFrame:
    """A frame in its slot, until `release`; also a context manager that releases."""

    def __init__(self, ring: SharedFrames, slot: int, image: media_pb2.SharedImage) -> None:
        self._ring = ring
        self._slot = slot
        self._image = image
        self._released = False

    def to_image(self) -> media_pb2.Image:
        """Return the frame as a request carries it."""
        return media_pb2.Image(shared=self._image)

    def release(self) -> None:
        """Let the slot be written again, once the server answered. Idempotent."""
        if not self._released:
            self._released = True
            self._ring._give_back(self._slot)

    def __enter__(self) -> SharedFrame:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class SharedFrames:
    """`num_slots` slots of `slot_bytes` bytes each; safe to use from several threads.

        with SharedFrames(slot_bytes=1920 * 1080 * 3) as frames, frames.write(array) as frame:
            client.detect(frame, "cup")

    The region is this user's alone and leaves with `close`, or with the last reference; a process
    that is killed does not remove it.

    Raises:
        OSError: Shared memory has no room for the region.
    """

    def __init__(self, slot_bytes: int, num_slots: int = 4) -> None:
        if slot_bytes < 1 or num_slots < 1:
            raise ValueError("a ring has at least one slot of at least one byte")
        self.slot_bytes = slot_bytes
        self.region = f"legato-{os.geteuid()}-{secrets.token_hex(16)}"
        self._stride = HEADER_SIZE + -(-slot_bytes // HEADER_SIZE) * HEADER_SIZE
        self._generations = [0] * num_slots
        self._free = collections.deque(range(num_slots))
        self._changed = threading.Condition()
        path = _folder() / self.region
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._end = weakref.finalize(self, _remove, self._file, path, os.getpid())
        try:
            os.posix_fallocate(self._file, 0, self._stride * num_slots)
            for slot in range(num_slots):
                os.pwrite(self._file, _MAGIC, slot * self._stride)
        except OSError:
            self._end()
            raise

    @property
    def num_free(self) -> int:
        """Slots that may be written now."""
        return len(self._free)

    def write(
        self,
        frame: Frame,
        *,
        layout: media_pb2.PixelLayout | None = None,
        mime_type: str = "",
        timeout: float = 0.0,
    ) -> SharedFrame:
        """Copy a frame into a free slot, waiting up to `timeout` seconds for one.

        An array is uint8 of shape (height, width), (height, width, 3) RGB or (height, width, 4)
        RGBA; a `RawFrame` has a shape of its own. Bytes are pixels of `layout`, or without one an
        image file, of `mime_type` if that is given. Raises
        `SlotsBusy`, and ValueError for a frame that does not fit a slot or after `close`.
        """
        image = media_pb2.SharedImage(region=self.region)
        data, own_layout = _bytes_of(frame)
        layout = layout or own_layout
        if layout is not None:
            image.layout.CopyFrom(layout)
        else:
            image.mime_type = mime_type
        if not 1 <= len(data) <= self.slot_bytes:
            raise ValueError(f"a slot takes 1 to {self.slot_bytes} bytes, not {len(data)}")
        slot = self._take(timeout)
        try:
            image.generation = self._fill(slot, data)
        except BaseException:
            self._give_back(slot)
            raise
        image.offset = slot * self._stride + HEADER_SIZE
        image.size_bytes = len(data)
        return SharedFrame(self, slot, image)

    def close(self) -> None:
        """Remove the region; the server can read no frame of it any more. Idempotent."""
        with self._changed:
            self._end()
            self._changed.notify_all()

    def __enter__(self) -> SharedFrames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, timeout: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._free or not self._end.alive, timeout)
            self._check_open()
            if not self._free:
                raise SlotsBusy(f"all {len(self._generations)} slots hold frames to be released")
            return self._free.popleft()

    def _give_back(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def _fill(self, slot: int, data: memoryview) -> int:
        """Fill the slot. Every store is a system call, so that no store overtakes another."""
        with self._changed:  # `close` must not take the file away meanwhile
            self._check_open()
            header = slot * self._stride
            generation = self._generations[slot]
            self._store_generation(header, generation + 1)
            _write_all(self._file, data, header + HEADER_SIZE)
            self._store_generation(header, generation + 2)
            self._generations[slot] = generation + 2
            return generation + 2

    def _store_generation(self, header: int, generation: int) -> None:
        os.pwrite(self._file, _GENERATION.pack(generation), header + _GENERATION_AT)

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ValueError("the region is closed")


def _folder() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _remove(file: int, path: Path, owner: int) -> None:
    os.close(file)
    if os.getpid() == owner:  # not a process that was forked from it
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _bytes_of(frame: Frame) -> tuple[memoryview, media_pb2.PixelLayout | None]:
    if isinstance(frame, bytes | bytearray | memoryview):
        return memoryview(frame).cast("B"), None
    shaped = frame if isinstance(frame, RawFrame) else RawFrame.from_array(frame)
    return shaped.view, shaped.layout


# ---------------------------------------------------------------- sources

# This section never imports Pillow or numpy.


@dataclasses.dataclass(frozen=True, slots=True)
class CachedImage:
    """An image the server has seen, by the `image_id` of an earlier answer."""

    image_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class HeldImage(CachedImage):
    """An image uploaded by `put_image`: its size in pixels, and when the server forgets it.

    The server may forget it earlier if its memory runs short.
    """

    width: int
    height: int
    expire_time: datetime.datetime | None = None


ImageInput: TypeAlias = (
    "str | os.PathLike[str] | bytes | bytearray | CachedImage | RawFrame | SharedFrame"
    " | PILImage.Image | np.ndarray[Any, Any]"
)


def to_image(image: ImageInput) -> media_pb2.Image:
    """Convert an image to protobuf.

    A string or path names a file, and bytes are a JPEG, PNG or WebP file. Files and Pillow images
    are turned upright by their EXIF orientation and shown on white where they are transparent; 16
    bits become 8. A Pillow image is sent losslessly. An array is uint8 of shape (height, width),
    (height, width, 3) RGB or (height, width, 4) RGBA; alpha in arrays and frames is ignored.
    `RawFrame` is for pixels of other formats, and a `SharedFrame` lies in memory that the server
    reads itself.

    Raises:
        OSError: The file cannot be read.
        ValueError: The array has another shape or type, or the Pillow image has mode F.
        TypeError: `image` is none of these.
    """
    if isinstance(image, CachedImage):
        return media_pb2.Image(image_id=image.image_id)
    if isinstance(image, bytes | bytearray):
        return _encoded(bytes(image))
    if isinstance(image, str | os.PathLike):
        return _encoded(Path(image).read_bytes())
    if isinstance(image, RawFrame | SharedFrame):
        return image.to_image()
    array_or_image: Any = image  # the lookup by name narrows nothing
    if _is_instance(image, "numpy", "ndarray"):
        return RawFrame.from_array(array_or_image).to_image()
    if _is_instance(image, "PIL.Image", "Image"):
        return _encoded(_png(array_or_image))
    raise TypeError(f"not an image: {type(image).__name__}")


def is_ready(image: ImageInput) -> bool:
    """Return whether `to_image` has nothing to read, copy or encode."""
    return isinstance(image, CachedImage | SharedFrame | bytes)


def _is_instance(value: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _encoded(data: bytes) -> media_pb2.Image:
    # The server sniffs the type; a wrong claim would be an error.
    image = media_pb2.Image()  # in place: a message given to a constructor is copied slowly
    image.encoded.data = data
    return image


def _png(image: PILImage.Image) -> bytes:
    buffer = io.BytesIO()
    upright(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def upright(image: PILImage.Image) -> PILImage.Image:
    """Return an image of mode L or RGB: turned by its EXIF orientation, alpha composited on white.

    Samples of 16 bits (modes I;16 and I) keep their high byte. `legato_engine.images.decoding` does
    the same to a file.

    Raises:
        ValueError: The samples have no known range: mode F, or values that 16 bits cannot hold.
    """
    from PIL import Image, ImageOps

    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):
        return _high_bytes(turned)
    if turned.mode == "F":
        raise ValueError(
            "a Pillow image of mode F has no range of values that is black to white: "
            "scale it to 0..255 and convert it to mode L"
        )
    if turned.mode == "La":  # Pillow converts it to LA only
        turned = turned.convert("LA")
    if not turned.has_transparency_data:
        return turned if turned.mode in ("L", "RGB") else turned.convert("RGB")
    turned = turned.convert("RGBA")
    shown = Image.new("RGB", turned.size, "white")
    shown.paste(turned, mask=turned)
    return shown


def _high_bytes(image: PILImage.Image) -> PILImage.Image:
    from PIL import ImageMath

    samples = image.convert("I")
    low, high = cast(tuple[int, int], samples.getextrema())  # single channel
    if low < 0 or high > _MAX_SAMPLE:
        raise ValueError(
            f"a Pillow image of mode {image.mode} has values of 0 to {_MAX_SAMPLE}, "
            f"not {low} to {high}: scale it to 0..255 and convert it to mode L"
        )
    shown = samples.point(lambda sample: sample * (1 / 256)).convert("L")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        mask = ImageMath.lambda_eval(
            lambda names: (names["samples"] == transparent) * 255, samples=samples
        )
        shown.paste(255, mask=mask.convert("L"))
    return shown


class OutsideFoldersError(PermissionError):
    """A path leads out of the folders that may be read."""


class AllowedFolders:
    """Folders below which a caller may name files.

    Raises:
        ValueError: one of them does not exist.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [Path(each).resolve() for each in folders]
        for folder in self._folders:
            if not folder.is_dir():
                raise ValueError(f"--allow-path takes a folder, not {str(folder)!r}")

    def read(self, name: str, max_bytes: int) -> bytes:
        """Read a file; a relative name is below the first folder.

        Raises:
            OutsideFoldersError: it is not below one of the folders.
            OSError: it cannot be read, is no file, or has more bytes (EFBIG).
        """
        base = self._folders[0] if self._folders else Path()
        try:
            path = (base / name).resolve()
        except (ValueError, RuntimeError) as error:
            raise OSError(errno.EINVAL, f"no path: {error}") from None
        self._check_inside(path)
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise OSError(errno.EINVAL, "is not a file")
            with contextlib.suppress(FileNotFoundError):
                # A folder of the path may have become a link since it was checked.
                self._check_inside(Path(f"/proc/self/fd/{opened}").readlink())
            with open(opened, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(opened)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes")
        return data

    def _check_inside(self, path: Path) -> None:
        if not any(path.is_relative_to(folder) for folder in self._folders):
            raise OutsideFoldersError(errno.EACCES, "outside of the folders that may be read")
