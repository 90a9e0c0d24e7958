"""Results in 3D, from an aligned depth image and the camera's intrinsics. Needs numpy.

    from legato_client.depth import lift

    for each in lift(client.detect(image, "cup"), depth, (fx, fy, cx, cy)):
        print(each.mark.label, each.center or each.reason)

Coordinates are in metres in the camera's optical frame: x to the right, y down, z forward. The
middle of pixel (0, 0) is at u = v = 0, as in OpenCV and ROS.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from legato_client._errors import LegatoError
from legato_client._types.results import (
    BoxAxes,
    Detection,
    ImageInfo,
    Mark,
    Outline,
    Point,
    PointedObject,
    Result,
    TrackNow,
    rings_of,
)
from legato_client._types.server import FrameResult

Array = npt.NDArray[np.float64]
Vector = tuple[float, float, float]

MIN_PIXELS = 5
"""Pixels with depth that an estimate needs."""
MIN_VALID = 0.05
"""Fraction of a mark's pixels that must have depth."""
MAX_DEPTH = 1000.0
"""Metres; a larger median means another unit."""

_MAX_SAMPLES = 20_000  # of a mark's pixels; more make no estimate better
_POINT_RADIUS = 3  # pixels of an image of 480 rows
_POINT_REACH = 0.02  # relative depth; the surface around a point may be steep
_MIN_REACH, _MAX_REACH = 0.02, 0.3  # relative; below the first is a sensor's noise
_OUTLIER = 3.0  # standard deviations
_POINT_DEVIATION = 2.0  # pixels of an image of 480 rows
_PIXEL_DEVIATION = 1.0  # pixels, of any other mark's middle
_BOX_DEVIATION = 0.03  # of a mark's middle, in its sizes, where no track says better
_OFF_CENTER = 0.1  # of the sides: how far from the middle a lens may be
_SAME_SCALE = 0.03  # of the sides: a middle that is off by the same on both is one of another size
_MAD = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution


@dataclasses.dataclass(frozen=True, slots=True)
class Lifted:
    """A mark in 3D, or the `reason` why it has none.

    `center` is the middle of the surface that the camera sees; the object's own is farther by about
    half its thickness. `size` is its width, height and the depth range of that surface; None for a
    point. `covariance` is that of `center`, in square metres. `valid` is the fraction of the mark's
    pixels that have depth.
    """

    mark: Mark | TrackNow
    center: Vector | None
    size: Vector | None
    covariance: tuple[Vector, Vector, Vector] | None
    valid: float
    reason: str = ""


def lift(
    result: Result | FrameResult | Iterable[Mark | TrackNow], depth: Any, intrinsics: Any
) -> tuple[Lifted, ...]:
    """Estimate where the marks of a result are in 3D, in their order.

    `result` may also be a session's result, its tracks (`session.now()`), or marks. `depth` is an
    array of the image's height and width: floats in metres or uint16 in millimetres. Values that
    are not finite or not above 0 are missing. `intrinsics` are (fx, fy, cx, cy), a 3x3 matrix, or
    a sensor_msgs/CameraInfo. The image must be rectified.

    Raises ValueError for depth or intrinsics that cannot belong to the image.
    """
    metres = _metres(depth)
    camera = _camera(intrinsics, metres.shape)
    marks, image = _marks(result)
    if image is not None and (image.height, image.width) != metres.shape:
        raise ValueError(
            f"depth is {_size(metres.shape)}, but the image is {image.width}x{image.height}: align "
            "the depth image to the camera's"
        )
    return tuple(_lifted(mark, metres, camera) for mark in marks)


def _marks(
    result: Result | FrameResult | Iterable[Mark | TrackNow],
) -> tuple[tuple[Mark | TrackNow, ...], ImageInfo | None]:
    """Return the marks, and the image's size where the result tells it."""
    if isinstance(result, Iterable):
        return tuple(result), None
    outcome = result.outcome if isinstance(result, FrameResult) else result
    image = result.image if isinstance(result, FrameResult) else result.info.image
    if isinstance(outcome, LegatoError):
        return (), image
    return outcome.marks, image or outcome.info.image


# ---------------------------------------------------------------- inputs


def _metres(depth: Any) -> npt.NDArray[np.float32]:
    """Convert to metres, NaN where depth is missing."""
    array = np.asarray(depth)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"depth has shape {array.shape}: it must be (height, width)")
    if array.dtype != np.uint16 and array.dtype.kind != "f":
        raise ValueError(
            f"depth has type {array.dtype}, whose unit is not known: it must be uint16 in "
            "millimetres or float in metres"
        )
    metres = array.astype(np.float32)
    if array.dtype == np.uint16:
        metres /= 1000
    known = (metres > 0) & (metres < np.inf)
    metres[~known] = np.nan
    values = metres[known]
    if not values.size:
        raise ValueError(f"depth has no value in {_size(array.shape)} pixels: all are NaN or 0")
    median = float(np.median(values[:: math.ceil(values.size / _MAX_SAMPLES)]))
    if median > MAX_DEPTH:
        raise ValueError(
            f"depth has a median of {median:g} m, above {MAX_DEPTH:g}: floats must be in metres"
        )
    return metres


@dataclasses.dataclass(frozen=True, slots=True)
class _Camera:
    """A pinhole camera, in pixels."""

    fx: float
    fy: float
    cx: float
    cy: float

    def at(self, u: float, v: float, z: float) -> Vector:
        return (u - self.cx) / self.fx * z, (v - self.cy) / self.fy * z, z

    def covariance(
        self, place: Vector, deviations: tuple[float, float, float]
    ) -> tuple[Vector, Vector, Vector]:
        """Project the deviations of u, v (pixels) and z (metres) at a place."""
        x, y, z = place
        jacobian = np.array([[z / self.fx, 0, x / z], [0, z / self.fy, y / z], [0, 0, 1]])
        matrix = jacobian @ np.diag(np.square(deviations)) @ jacobian.T
        rows = [(float(a), float(b), float(c)) for a, b, c in matrix]
        return rows[0], rows[1], rows[2]


def _camera(intrinsics: Any, shape: tuple[int, ...]) -> _Camera:
    """Read the intrinsics; `shape` is that of the depth image that they must fit."""
    matrix, has_size = intrinsics, False
    if hasattr(intrinsics, "k") and hasattr(intrinsics, "d"):
        matrix, has_size = intrinsics.k, bool(getattr(intrinsics, "width", 0))
        _check_info(intrinsics, shape)
    try:
        values = np.asarray(matrix, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"intrinsics are {intrinsics!r}, which are no numbers") from error
    if values.size == 9:
        values = values.reshape(3, 3)
        if np.any(values[[0, 1, 2, 2, 2], [1, 0, 0, 1, 2]] != (0, 0, 0, 0, 1)):
            raise ValueError(
                f"intrinsics are {values.tolist()}: a matrix must be "
                "[[fx, 0, cx], [0, fy, cy], [0, 0, 1]]"
            )
        values = values[[0, 1, 0, 1], [0, 1, 2, 2]]
    if values.shape != (4,):
        raise ValueError(
            f"intrinsics have shape {values.shape}: they must be (fx, fy, cx, cy), a 3x3 matrix or "
            "a CameraInfo"
        )
    camera = _Camera(*map(float, values))
    _check_range(camera, shape)
    if not has_size:
        _check_scale(camera.cx + 0.5, camera.cy + 0.5, shape)
    return camera


def _check_range(camera: _Camera, shape: tuple[int, ...]) -> None:
    for name, value in (("fx", camera.fx), ("fy", camera.fy)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"intrinsics have {name} = {value:g}: it must be above 0")
    for name, value, limit in (("cx", camera.cx, shape[1]), ("cy", camera.cy, shape[0])):
        if not 0 <= value <= limit:
            raise ValueError(
                f"intrinsics have {name} = {value:g}, outside the depth image of {_size(shape)}: "
                f"it must be in 0..{limit}; are they those of another size?"
            )


def _check_scale(center_x: float, center_y: float, shape: tuple[int, ...]) -> None:
    """Check that the camera's middle is not where that of a larger or smaller image would be."""
    across, down = center_x / shape[1], center_y / shape[0]
    if abs(across - down) < _SAME_SCALE and abs(across - 0.5) > _OFF_CENTER:
        size = f"{2 * center_x:.0f}x{2 * center_y:.0f}"
        raise ValueError(
            f"intrinsics have (cx, cy) = ({center_x - 0.5:g}, {center_y - 0.5:g}), as of an image "
            f"of about {size}, but depth is {_size(shape)}: scale them to the depth image, or pass "
            "a CameraInfo with its width and height if the image is a crop"
        )


def _check_info(info: Any, shape: tuple[int, ...]) -> None:
    """Check what only a CameraInfo tells."""
    distortion = [float(each) for each in info.d]
    if any(distortion):
        raise ValueError(
            f"intrinsics have the distortion d = {distortion}, which must be zero: rectify image "
            "and depth, and pass the first three columns of the CameraInfo's p"
        )
    if getattr(info, "width", 0) and (info.height, info.width) != shape:
        raise ValueError(
            f"intrinsics are of {info.width}x{info.height} pixels, but depth is {_size(shape)}"
        )


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]}"


# ---------------------------------------------------------------- regions


@dataclasses.dataclass(frozen=True, slots=True)
class _Region:
    """The pixels of a mark; all lengths are in pixels."""

    columns: Array
    rows: Array
    weights: Array  # (rows, columns); 0 is outside
    middle: tuple[float, float]
    size: tuple[float, float] | None
    deviation: tuple[float, float]  # of the middle
    is_box: bool
    reach: float  # relative depth, from a surface's median to its ends


def _region(mark: Mark | TrackNow, shape: tuple[int, ...], camera: _Camera) -> _Region:
    height, width = shape
    if isinstance(mark, PointedObject):
        radius = max(_POINT_RADIUS * height / 480, 2) + 0.5
        x, y = mark.point.x * width, mark.point.y * height
        edges, size, reach = (x - radius, y - radius, x + radius, y + radius), None, _POINT_REACH
        deviation = (_POINT_DEVIATION * height / 480,) * 2
    else:
        box = mark.box
        edges = (box.x_min * width, box.y_min * height, box.x_max * width, box.y_max * height)
        size = edges[2] - edges[0], edges[3] - edges[1]
        angle = min(size[0] / camera.fx, size[1] / camera.fy)
        reach = min(max(angle / 2, _MIN_REACH), _MAX_REACH)  # as thick as it is wide
        deviation = _deviation(mark, size, shape)
    if not all(map(math.isfinite, edges)):
        edges = (-1.0, -1.0, -1.0, -1.0)  # outside, as it is nowhere
    columns, rows = _samples(edges, shape)
    is_box = size is not None
    middle = (edges[0] + edges[2]) / 2, (edges[1] + edges[3]) / 2
    weights = np.outer(_tent(rows, edges[1], edges[3]), _tent(columns, edges[0], edges[2]))
    if isinstance(mark, Outline) and (rings := rings_of(mark)):
        is_box = False
        weights = _inside(rings, shape, columns, rows)
        if weights.any():
            middle = (
                float(np.average(columns, weights=weights.sum(axis=0))),
                float(np.average(rows, weights=weights.sum(axis=1))),
            )
    return _Region(columns, rows, weights, middle, size, deviation, is_box, reach)


def _samples(
    edges: tuple[float, float, float, float], shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Return the middles of columns and rows between the edges, every few for a large area."""
    left, right = (min(max(math.ceil(each - 0.5), 0), shape[1]) for each in edges[0::2])
    top, bottom = (min(max(math.ceil(each - 0.5), 0), shape[0]) for each in edges[1::2])
    area = max(right - left, 0) * max(bottom - top, 0)
    step = max(math.ceil(math.sqrt(area / _MAX_SAMPLES)), 1)
    columns, rows = (
        np.arange(start + (end - start - 1) % step // 2, end, step, dtype=float)
        for start, end in ((left, right), (top, bottom))
    )
    return columns + 0.5, rows + 0.5


def _tent(places: Array, start: float, end: float) -> Array:
    """Weigh places between start and end by how central they are: a box's corners are not it."""
    return 1 - np.abs(2 * places - start - end) / max(end - start, 1e-9)


def _deviation(
    mark: Detection | Outline | TrackNow, size: tuple[float, float], shape: tuple[int, ...]
) -> tuple[float, float]:
    known: BoxAxes | None = None
    if isinstance(mark, TrackNow):
        known = mark.deviation
    elif isinstance(mark, Detection) and mark.motion is not None:
        known = mark.motion.position_deviation
    across, down = (known.center_x * shape[1], known.center_y * shape[0]) if known else (0.0, 0.0)
    return (
        math.hypot(_PIXEL_DEVIATION, _BOX_DEVIATION * size[0], across),
        math.hypot(_PIXEL_DEVIATION, _BOX_DEVIATION * size[1], down),
    )


def _inside(
    rings: Iterable[Iterable[Point]], shape: tuple[int, ...], columns: Array, rows: Array
) -> Array:
    """Return 1 for pixels inside the rings by SVG's nonzero rule, and 0 for others."""
    winding = np.zeros((len(rows), len(columns)), np.int32)
    for points in rings:
        ring = np.array([(point.x * shape[1], point.y * shape[0]) for point in points])
        for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
            low, high = sorted((y0, y1))
            crossed = np.flatnonzero((rows >= low) & (rows < high))
            if not crossed.size:
                continue
            x = x0 + (rows[crossed] - y0) * (x1 - x0) / (y1 - y0)
            winding[crossed] += np.where(columns[None, :] > x[:, None], 1 if y1 > y0 else -1, 0)
    return np.where(winding, 1.0, 0.0)


def mask(outline: Outline, width: int, height: int) -> npt.NDArray[np.bool_]:
    """Return which pixels of an image of that size are inside; its box if it cannot be read."""
    inside = np.zeros((height, width), np.bool_)
    box = outline.box
    edges = (box.x_min * width, box.y_min * height, box.x_max * width, box.y_max * height)
    left, top, right, bottom = (math.floor(each + 0.5) for each in edges)
    columns, rows = (
        np.arange(max(start, 0), min(max(end, 0), limit), dtype=float) + 0.5
        for start, end, limit in ((left, right, width), (top, bottom, height))
    )
    rings = rings_of(outline)
    area = _inside(rings, inside.shape, columns, rows) > 0 if rings else True
    inside[np.ix_(rows.astype(int), columns.astype(int))] = area
    return inside


# ---------------------------------------------------------------- estimates


def _lifted(mark: Mark | TrackNow, metres: npt.NDArray[np.float32], camera: _Camera) -> Lifted:
    region = _region(mark, metres.shape, camera)
    counted = region.weights > 0
    num_pixels = int(counted.sum())
    if not num_pixels:
        return Lifted(mark, None, None, None, 0.0, "no pixel of the image is inside")
    patch = metres[np.ix_(region.rows.astype(int), region.columns.astype(int))].astype(np.float64)
    counted &= ~np.isnan(patch)
    num_valid = int(counted.sum())
    valid = num_valid / num_pixels
    needed = max(MIN_PIXELS, math.ceil(MIN_VALID * num_pixels))
    if num_valid < needed:
        reason = f"{num_valid} of {num_pixels} pixels have depth, fewer than {needed}"
        return Lifted(mark, None, None, None, valid, reason)
    on_surface = _on_surface(patch[counted], region.weights[counted], region.reach)
    surface = patch[counted][on_surface]
    z = float(np.median(surface))
    u, v = region.middle[0] - 0.5, region.middle[1] - 0.5
    if region.is_box:  # half its middle, half where the surface is in it: better than either
        rows, columns = (each[on_surface] for each in np.nonzero(counted))
        u = (u + float(np.median(region.columns[columns])) - 0.5) / 2
        v = (v + float(np.median(region.rows[rows])) - 0.5) / 2
    center = camera.at(u, v, z)
    spread = _MAD * float(np.median(np.abs(surface - z)))
    covariance = camera.covariance(center, (*region.deviation, spread))
    size = None
    if region.size is not None:
        near, far = np.percentile(surface, (5, 95))
        size = region.size[0] / camera.fx * z, region.size[1] / camera.fy * z, float(far - near)
    return Lifted(mark, center, size, covariance, valid)


def _on_surface(depths: Array, weights: Array, reach: float) -> npt.NDArray[np.bool_]:
    """Return which depths are of the surface that most of the weight is on, without outliers.

    The window is of constant relative depth, so that the surface is as thick as its mark is wide.
    """
    order = np.argsort(depths)
    ordered, weight = depths[order], np.concatenate(([0.0], np.cumsum(weights[order])))
    ends = np.searchsorted(ordered, ordered * math.exp(2 * reach), side="right")
    start = int(np.argmax(weight[ends] - weight[:-1]))
    surface = ordered[start : ends[start]]
    middle = float(np.median(surface))
    limit = _OUTLIER * _MAD * float(np.median(np.abs(surface - middle)))
    low, high = max(middle - limit, surface[0]), min(middle + limit, surface[-1])
    on_surface: npt.NDArray[np.bool_] = (depths >= low) & (depths <= high)
    return on_surface
