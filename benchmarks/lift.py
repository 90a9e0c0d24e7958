"""Errors of `legato_client.depth.lift` in scenes of exact depth: `python -m benchmarks lift`.

Scenes are spheres and boxes on a floor before a wall, by formulas; with `mujoco` installed also
more shapes, tilted, in its simulator. Depth then gets a sensor's noise, flying pixels at edges and
holes. Truth is the middle of the surface that can be seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from legato_client import Box, Detection, Outline, Point, PointedObject
from legato_client.depth import Lifted, lift

from benchmarks import record

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

WIDTH, HEIGHT = 640, 480
FOCAL = 525.0  # pixels, as of a depth camera
INTRINSICS = (FOCAL, FOCAL, (WIDTH - 1) / 2, (HEIGHT - 1) / 2)
DISTANCES = (1.0, 2.0, 4.0)  # metres
OCCLUSIONS = (0.0, 0.2, 0.4)  # fraction of the object's pixels behind something nearer
MISSING = (0.0, 0.2, 0.4)  # fraction of pixels without depth
JITTER = 0.015  # deviation of a box's edge, in its sizes, as in `benchmarks.tracking`
_PITCH, _CAMERA_HEIGHT, _WALL = math.radians(20), 0.5, 6.0
_EDGE = 0.03  # relative step of depth between neighbours
_FARTHEST = 1e3  # metres
_CHI2_3 = 8.02  # squared Mahalanobis distance within which 95.4 % of normal errors in 3D lie


@dataclasses.dataclass(frozen=True)
class Scene:
    """Exact depth, and the pixels that show the object."""

    depth: Array
    target: Mask


# ---------------------------------------------------------------- scenes by formulas


@functools.cache
def rays() -> tuple[Array, Array]:
    """Return the rays of all pixels with z = 1, in the camera's frame and in that of the room.

    The room's axes are x to the right, y forward and z up; the camera looks down by the pitch.
    """
    fx, fy, cx, cy = INTRINSICS
    u, v = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    camera = np.stack([(u - cx) / fx, (v - cy) / fy, np.ones_like(u, float)], axis=-1)
    sin, cos = math.sin(_PITCH), math.cos(_PITCH)
    room = camera @ np.array([[1, 0, 0], [0, -sin, -cos], [0, cos, -sin]])
    return camera, room


def analytic(rng: np.random.Generator, distance: float) -> Scene:
    """Place a sphere or a box on the floor at this distance, and another one beside or behind."""
    room = rays()[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        floor = np.where(room[..., 2] < 0, -_CAMERA_HEIGHT / room[..., 2], np.inf)
        depth = np.minimum(floor, np.where(room[..., 1] > 0, _WALL / room[..., 1], np.inf))
        other = _thing(rng, distance + rng.uniform(0.4, 1.0), rng.uniform(-0.4, 0.4))
        depth = np.minimum(depth, other)
        thing = _thing(rng, distance, rng.uniform(-0.2, 0.2))
    return Scene(np.minimum(depth, thing), thing < depth)


def _thing(rng: np.random.Generator, distance: float, aside: float) -> Array:
    """Return the depth of a thing in every pixel; infinite beside it."""
    ways = rays()[1]
    half = rng.uniform(0.06, 0.2, 3)
    forward = math.sqrt(max(distance**2 - (_CAMERA_HEIGHT - half[2]) ** 2, 0.04))
    middle = np.array([aside, forward, half[2] - _CAMERA_HEIGHT])
    if rng.random() < 0.5:
        a, b = (ways**2).sum(-1), ways @ middle
        root = b**2 - a * (middle @ middle - half[2] ** 2)
        return np.where(root > 0, (b - np.sqrt(np.maximum(root, 0))) / a, np.inf)
    turn = rng.uniform(0, math.pi)
    sin, cos = math.sin(turn), math.cos(turn)
    turned = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    ways, start = ways @ turned, middle @ turned
    ends = np.sort(np.stack([(start - half) / ways, (start + half) / ways]), axis=0)
    enter, leave = ends[0].max(-1), ends[1].min(-1)
    return np.where((enter < leave) & (enter > 0), enter, np.inf)


# ---------------------------------------------------------------- simulated scenes

_SHAPES = ("sphere", "box", "cylinder", "capsule", "ellipsoid")


def simulated(rng: np.random.Generator, distance: float) -> Scene:
    """Have MuJoCo cast the rays at a shape on the floor among others; needs no display."""
    import mujoco

    half = rng.uniform(0.06, 0.2, 3)
    forward = math.sqrt(max(distance**2 - (_CAMERA_HEIGHT - half[2]) ** 2, 0.04))
    things = [_geom(rng, "target", rng.uniform(-0.2, 0.2), forward, half)]
    for number in range(3):
        behind = forward + rng.uniform(0.5, 1.2)
        things.append(
            _geom(rng, f"other{number}", rng.uniform(-1, 1), behind, rng.uniform(0.06, 0.2, 3))
        )
    model = mujoco.MjModel.from_xml_string(
        f"""<mujoco><worldbody>{"".join(things)}<geom type="plane" size="20 20 .1"/>
        <geom type="box" size="20 .1 5" pos="0 {_WALL + 0.1} 0"/></worldbody></mujoco>"""
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    eye = np.array([0, 0, _CAMERA_HEIGHT])
    numbers, depth, _ = cast(model, data, eye, rays()[1].reshape(-1, 3))
    shape = HEIGHT, WIDTH
    return Scene(depth.reshape(shape), numbers.reshape(shape) == model.geom("target").id)


def cast(
    model: Any,
    data: Any,
    eye: Array,
    ways: Array,
    groups: npt.NDArray[np.uint8] | None = None,
) -> tuple[npt.NDArray[np.int32], Array, Array]:
    """Return geom, distance in lengths of the ray, and normal where MuJoCo's rays end.

    The geom is -1 and the distance infinite where a ray meets none of those in `groups`.
    """
    import mujoco

    count = len(ways)
    numbers, depth, normals = (
        np.full(count, -1, np.int32),
        np.full(count, -1.0),
        np.zeros(3 * count),
    )
    flat = np.ascontiguousarray(ways).reshape(-1)
    mujoco.mj_multiRay(
        model, data, eye, flat, groups, 1, -1, numbers, depth, normals, count, _FARTHEST
    )
    depth[numbers < 0] = np.inf
    return numbers, depth, normals.reshape(-1, 3)


def _geom(rng: np.random.Generator, name: str, aside: float, forward: float, half: Array) -> str:
    """Return a shape; capsules and cylinders are rods, so their boxes are background mostly."""
    kind = rng.choice(_SHAPES)
    if kind in ("capsule", "cylinder"):
        half = half * (0.25, 1, 1)
    size = " ".join(map(str, half))
    tilt, roll, turn = rng.uniform(-60, 60), rng.uniform(-60, 60), rng.uniform(0, 180)
    place, turns = f"{aside} {forward} {half[2]}", f"{tilt} {roll} {turn}"
    return f'<geom name="{name}" type="{kind}" size="{size}" pos="{place}" euler="{turns}"/>'


# ---------------------------------------------------------------- sensor


def occluded(scene: Scene, rng: np.random.Generator, fraction: float) -> Scene:
    """Put a plate before this fraction of the object's pixels, at its left or right."""
    if not fraction:
        return scene
    columns = np.flatnonzero(scene.target.any(axis=0))
    counts = np.cumsum(scene.target.sum(axis=0)[columns]) / scene.target.sum()
    hidden = np.zeros(WIDTH, bool)
    if rng.random() < 0.5:
        hidden[: columns[np.searchsorted(counts, fraction)]] = True
    else:
        hidden[columns[np.searchsorted(counts, 1 - fraction)] :] = True
    plate = rng.uniform(0.5, 0.8) * scene.depth[scene.target].min()
    depth = np.where(hidden, np.minimum(plate, scene.depth), scene.depth)
    return Scene(depth, scene.target & ~hidden)


def sensed(scene: Scene, rng: np.random.Generator, missing: float) -> npt.NDArray[np.uint16]:
    """Return what a depth camera would measure, in millimetres."""
    true = scene.depth
    near = np.stack([np.roll(true, shift, axis) for shift in (-1, 1) for axis in (0, 1)])
    far = near.max(axis=0)
    edge = (far - near.min(axis=0)) > _EDGE * true
    mixed = rng.uniform(size=true.shape)
    flying = np.where(edge, near.min(axis=0) * mixed + far * (1 - mixed), true)
    noisy = flying + rng.normal(size=true.shape) * (0.001 + 0.0019 * true**2)
    holes = np.kron(rng.uniform(size=(HEIGHT // 4, WIDTH // 4)), np.ones((4, 4))) < missing
    holes |= edge & (rng.uniform(size=true.shape) < 0.5)
    return np.where(holes, 0, np.clip(noisy * 1000, 0, 65_535)).astype(np.uint16)


# ---------------------------------------------------------------- marks


def marks(scene: Scene, rng: np.random.Generator) -> tuple[Detection, Outline, PointedObject]:
    """Mark what can be seen of the object, as inexactly as a model does."""
    rows, columns = (np.flatnonzero(scene.target.any(axis=axis)) for axis in (1, 0))
    edges = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], float)
    size = np.tile(edges[2:] - edges[:2], 2)
    box = _box(edges + rng.normal(size=4) * JITTER * size)
    left, top, right, bottom = edges
    lines = rows[:: max(len(rows) // 12, 1)]
    ends = [np.flatnonzero(scene.target[row])[[0, -1]] for row in lines if scene.target[row].any()]
    ring = [(end[0], row + 0.5) for end, row in zip(ends, lines, strict=True)]
    ring += [(end[1] + 1, row + 0.5) for end, row in zip(ends[::-1], lines[::-1], strict=True)]
    corners = [
        ((x - left) / (right - left), (y - top) / (bottom - top)) + rng.normal(size=2) * JITTER
        for x, y in ring
    ]
    path = "M" + "L".join(f"{x:.4f},{y:.4f}" for x, y in corners) + "Z"
    u, v = point_of(scene)
    shift = rng.normal(size=2) * JITTER * size[:2]
    point = Point(float(u + 0.5 + shift[0]) / WIDTH, float(v + 0.5 + shift[1]) / HEIGHT)
    return (
        Detection(box, "thing"),
        Outline(path, _box(edges), "thing"),
        PointedObject(point, "thing"),
    )


def _box(edges: Array) -> Box:
    left, top, right, bottom = map(float, edges / (WIDTH, HEIGHT, WIDTH, HEIGHT))
    return Box(left, top, right, bottom)


def point_of(scene: Scene) -> tuple[int, int]:
    """Return column and row of the object's visible pixel that is nearest to their middle."""
    v, u = np.nonzero(scene.target)
    best = np.argmin((u - u.mean()) ** 2 + (v - v.mean()) ** 2)
    return int(u[best]), int(v[best])


def truth(scene: Scene) -> tuple[Array, Array]:
    """Return the middle of the visible surface, and the surface at `point_of`."""
    places = rays()[0] * scene.depth[..., None]
    u, v = point_of(scene)
    return np.median(places[scene.target], axis=0), places[v, u]


# ---------------------------------------------------------------- alternatives


def _whole_median(box: Array) -> float:
    return float(np.median(box[box > 0]))


def _central(box: Array) -> float:
    """Trim the central half around its median."""
    height, width = box.shape
    inner = box[height // 4 : -(height // 4) or None, width // 4 : -(width // 4) or None]
    inner = inner[inner > 0]
    middle = np.median(inner)
    near = np.abs(inner - middle) <= 3 * 1.4826 * np.median(np.abs(inner - middle))
    return float(np.median(inner[near]))


def _nearest_mode(box: Array) -> float:
    """Take the nearest peak of the histogram that has a tenth of the pixels."""
    logs = np.log(box[box > 0])
    counts, edges = np.histogram(logs, np.arange(logs.min(), logs.max() + 0.1, 0.05))
    first = int(np.argmax(counts >= 0.1 * len(logs)))
    inside = (logs >= edges[first]) & (logs < edges[first] + 0.1)
    return float(np.exp(np.median(logs[inside])))


ALTERNATIVES: dict[str, Callable[[Array], float]] = {
    "box: median of all": _whole_median,
    "box: central half, trimmed": _central,
    "box: nearest mode": _nearest_mode,
}


def _alternatives(box: Box, depth: Array) -> Iterable[tuple[str, Array]]:
    left, top, right, bottom = (
        min(max(each, 0), limit)
        for each, limit in zip(box.to_pixels(WIDTH, HEIGHT), (WIDTH, HEIGHT) * 2, strict=True)
    )
    fx, fy, cx, cy = INTRINSICS
    u, v = (box.x_min + box.x_max) / 2 * WIDTH - 0.5, (box.y_min + box.y_max) / 2 * HEIGHT - 0.5
    for name, estimate in ALTERNATIVES.items():
        z = estimate(depth[top:bottom, left:right])
        yield name, np.array([(u - cx) / fx, (v - cy) / fy, 1]) * z


# ---------------------------------------------------------------- measuring


@dataclasses.dataclass(frozen=True)
class Case:
    """One estimate of one object."""

    scenes: str
    method: str
    distance: float
    occlusion: float
    missing: float
    error: float | None  # metres; None: no estimate
    within: bool | None = None  # its own two deviations


def cases(
    name: str, make: Callable[[np.random.Generator, float], Scene], num_scenes: int
) -> list[Case]:
    """Estimate all marks of `num_scenes` scenes for each distance, occlusion and missing pixels."""
    found: list[Case] = []
    for distance, occlusion, missing in itertools.product(DISTANCES, OCCLUSIONS, MISSING):
        key = (distance, occlusion, missing)
        for seed in range(num_scenes):
            rng = np.random.default_rng([seed, *(round(10 * each) for each in key)])
            scene = occluded(make(rng, distance), rng, occlusion)
            if scene.target.sum() < 50:
                continue
            depth = sensed(scene, rng, missing)
            shown = marks(scene, rng)
            middle, spot = truth(scene)
            for one, wanted in zip(
                lift(shown, depth, INTRINSICS), (middle, middle, spot), strict=True
            ):
                kind = {Detection: "box", Outline: "outline", PointedObject: "point"}
                found.append(Case(name, kind[type(one.mark)], *key, *_scored(one, wanted)))
            for method, place in _alternatives(shown[0].box, depth / 1000):
                found.append(Case(name, method, *key, float(np.linalg.norm(place - middle))))
    return found


def _scored(lifted: Lifted, wanted: Array) -> tuple[float | None, bool | None]:
    if lifted.center is None:
        return None, None
    error = np.array(lifted.center) - wanted
    distance = error @ np.linalg.solve(np.array(lifted.covariance), error)
    return float(np.linalg.norm(error)), bool(distance <= _CHI2_3)


def summary(found: Iterable[Case]) -> dict[str, Any]:
    """Return the median and P95 error in metres, the fraction within, and how many have none."""
    found = list(found)
    errors = [each.error for each in found if each.error is not None]
    within = [each.within for each in found if each.within is not None]
    return {
        "count": len(found),
        "without": len(found) - len(errors),
        "median_m": float(np.median(errors)),
        "p95_m": float(np.percentile(errors, 95)),
        "within": float(np.mean(within)) if within else None,
    }


def main(argv: Sequence[str]) -> int:
    """Measure in all scenes that can be made here, and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks lift", description=__doc__)
    parser.add_argument("--scenes", type=int, default=20, help="of each kind; default %(default)d")
    arguments = parser.parse_args(argv)
    makers = {"analytic": analytic}
    if importlib.util.find_spec("mujoco"):
        makers["mujoco"] = simulated
    figures: dict[str, Any] = {}
    tables = []
    for name, make in makers.items():
        found = cases(name, make, arguments.scenes)
        methods = list(dict.fromkeys(each.method for each in found))
        figures[name] = [_figures(found, method) for method in methods]
        tables += [f"Scenes: {name}. Error of the centre, median / P95 in cm.", ""]
        tables += [_table(figures[name]), ""]
    record.write("lift", "Marks in 3D from noisy depth", figures, tables)
    return 0


def _figures(found: list[Case], method: str) -> dict[str, Any]:
    own = [each for each in found if each.method == method]
    parts = [
        {
            "distance_m": distance,
            "occlusion": occlusion,
            **summary(e for e in own if (e.distance, e.occlusion) == (distance, occlusion)),
        }
        for distance, occlusion in itertools.product(DISTANCES, OCCLUSIONS)
    ]
    missing = [
        {"missing": part, **summary(each for each in own if each.missing == part)}
        for part in MISSING
    ]
    return {"method": method, **summary(own), "parts": parts, "by_missing": missing}


def _table(figures: list[dict[str, Any]]) -> str:
    heads = ["method", "distance", *(f"{each:.0%} hidden" for each in OCCLUSIONS)]
    rows = []
    for one in figures:
        for distance in DISTANCES:
            parts = [each for each in one["parts"] if each["distance_m"] == distance]
            rows.append([one["method"], f"{distance:g} m", *map(_cell, parts)])
        rows.append([one["method"], "all", _cell(one), *_more(one)])
    return record.table(heads, rows)


def _more(one: dict[str, Any]) -> tuple[str, str]:
    within = "" if one["within"] is None else f"{one['within']:.0%} within two deviations"
    return within, f"{one['without']} of {one['count']} without"


def _cell(part: dict[str, Any]) -> str:
    return f"{100 * part['median_m']:.1f} / {100 * part['p95_m']:.1f}"
