"""A clip of a camera that moves among things that move, with exact truth at any time.

MuJoCo casts a ray for each pixel, so that no display and no GPU is needed. Colours and shapes are
such as legato-tiny was trained on: two red spheres that look alike, a star and a triangle on
stands that cannot be seen, a pillar that hides them, a floor and a wall. All ways repeat after
`PERIOD` seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt
from legato_client import RawFrame

from benchmarks import lift
from benchmarks.lift import HEIGHT, WIDTH, Array

FPS = 30
PERIOD = 8.0  # seconds
UNIQUE = 12
"""Bytes at a frame's begin that differ each time it is shown."""
MISSING = 0.05  # fraction of pixels without depth, more at edges
VISIBLE = 0.5  # of a thing's pixels; with less it does not count

_PITCH = math.radians(8)
_TURN = 2 * math.pi / PERIOD
_LIGHT = np.array([-0.3, -0.8, 0.52])
_AMBIENT = 0.8
_SIGN_DEPTH = 0.04
_RADIUS = 0.16


@dataclasses.dataclass(frozen=True)
class Thing:
    """A thing on its way: centre, reach and turns in a period for x (right) and y (forward).

    `height` is that of its middle, in metres as all lengths.
    """

    noun: str
    shape: str
    colour: tuple[float, float, float]
    x: tuple[float, float, int, float]
    y: tuple[float, float, int, float]
    height: float

    def place(self, t: float) -> Array:
        return np.array([_swing(self.x, t), _swing(self.y, t), self.height])


def _swing(way: tuple[float, float, int, float], t: float) -> float:
    middle, reach, turns, phase = way
    return middle + reach * math.sin(_TURN * turns * t + phase)


_RED, _YELLOW, _GREEN = (0.88, 0.12, 0.12), (0.98, 0.86, 0.12), (0.13, 0.66, 0.22)
_GROUNDS = {"floor": (0.80, 0.82, 0.85), "wall": (0.90, 0.88, 0.82), "pillar": (0.6, 0.56, 0.5)}
THINGS = (
    Thing("red circle", "ball", _RED, (-0.1, 0.75, 1, 0.0), (2.0, 0.25, 2, 0.0), 0.45),
    Thing("red circle", "ball", _RED, (0.1, 0.75, 1, 2.6), (2.9, 0.2, 1, 1.0), 0.75),
    Thing("yellow star", "star", _YELLOW, (0, 0.8, 2, 1.2), (2.5, 0.3, 1, 2.0), 0.5),
    Thing("green triangle", "tri", _GREEN, (0.5, 0.4, 1, 4.0), (3.4, 0.2, 2, 0.5), 0.95),
)
NOUNS = tuple(dict.fromkeys(thing.noun for thing in THINGS))


# ---------------------------------------------------------------- world


def _sign(name: str, corners: list[tuple[float, float]]) -> str:
    """Return a flat prism with these corners, clockwise around a middle that sees them all."""
    count, half = len(corners), _SIGN_DEPTH / 2
    rings = [(x, y, z) for y in (-half, half) for x, z in corners]
    vertices = [*rings, (0.0, -half, 0.0), (0.0, half, 0.0)]
    faces = []
    for i in range(count):
        j = (i + 1) % count
        faces += [(2 * count, j, i), (2 * count + 1, count + i, count + j)]
        faces += [(i, j, count + i), (j, count + j, count + i)]
    flat = (" ".join(f"{each:g}" for row in rows for each in row) for rows in (vertices, faces))
    return '<mesh name="{}" inertia="shell" vertex="{}" face="{}"/>'.format(name, *flat)


def _corners(radii: tuple[float, ...], count: int) -> list[tuple[float, float]]:
    turns = [2 * math.pi * k / count for k in range(count)]
    return [
        (radii[k % len(radii)] * math.sin(turn), radii[k % len(radii)] * math.cos(turn))
        for k, turn in enumerate(turns)
    ]


class World:
    """The simulated room; `set_time` moves everything to its place."""

    def __init__(self) -> None:
        import mujoco

        bodies = "".join(
            f'<body name="{number}" mocap="true"><geom name="{number}" group="{number + 1}" '
            + (f'type="sphere" size="{_RADIUS}"' if thing.shape == "ball" else "")
            + (f'type="mesh" mesh="{thing.shape}"' if thing.shape != "ball" else "")
            + "/></body>"
            for number, thing in enumerate(THINGS)
        )
        signs = _sign("star", _corners((0.22, 0.1), 10)) + _sign("tri", _corners((0.22,), 3))
        self._mujoco = mujoco
        self._model = mujoco.MjModel.from_xml_string(
            f"""<mujoco><asset>{signs}</asset><worldbody>{bodies}
            <geom name="floor" type="plane" size="20 20 .1"/>
            <geom name="wall" type="box" size="20 .1 5" pos="0 5.1 0"/>
            <geom name="pillar" type="box" size=".05 .05 .6" pos=".15 1.4 .6"/>
            </worldbody></mujoco>"""
        )
        self._data = mujoco.MjData(self._model)
        self._colours = np.full((self._model.ngeom + 1, 3), 0.9)  # the last one is of no geom
        things = {str(number): thing.colour for number, thing in enumerate(THINGS)}
        for name, colour in {**_GROUNDS, **things}.items():
            self._colours[self._model.geom(name).id] = colour
        self._geoms = [self._model.geom(str(number)).id for number in range(len(THINGS))]
        self._eye = np.zeros(3)
        self._axes = np.eye(3)  # the camera's x, y and z in the room

    def set_time(self, t: float) -> None:
        for number, thing in enumerate(THINGS):
            self._data.mocap_pos[number] = thing.place(t)
        self._mujoco.mj_kinematics(self._model, self._data)
        self._eye = np.array([0.25 * math.sin(_TURN * t), 0.1 * math.sin(2 * _TURN * t), 0.7])
        yaw = math.radians(6) * math.sin(_TURN * t + 2.0)
        sin, cos = math.sin(_PITCH), math.cos(_PITCH)
        level = np.array([[1, 0, 0], [0, -sin, -cos], [0, cos, -sin]])
        turn = np.array(
            [[math.cos(yaw), math.sin(yaw), 0], [-math.sin(yaw), math.cos(yaw), 0], [0, 0, 1]]
        )
        self._axes = level @ turn

    def edges(self, number: int) -> Array:
        """Return left, top, right and bottom of a whole thing, hidden or not, in pixels."""
        geom = self._geoms[number]
        points = _sphere() * _RADIUS
        if THINGS[number].shape != "ball":
            mesh = self._model.geom_dataid[geom]
            start, count = self._model.mesh_vertadr[mesh], self._model.mesh_vertnum[mesh]
            points = self._model.mesh_vert[start : start + count]
        turned = points @ self._data.geom_xmat[geom].reshape(3, 3).T + self._data.geom_xpos[geom]
        places = (turned - self._eye) @ self._axes.T
        fx, fy, cx, cy = lift.INTRINSICS
        u = places[:, 0] / places[:, 2] * fx + cx + 0.5
        v = places[:, 1] / places[:, 2] * fy + cy + 0.5
        return np.array([u.min(), v.min(), u.max(), v.max()])

    def shot(self, rng: np.random.Generator) -> Shot:
        """Render what the camera sees now."""
        ways = (lift.rays()[0].reshape(-1, 3) @ self._axes).astype(float)
        geoms, depth, normals = lift.cast(self._model, self._data, self._eye, ways)
        towards = sum(normals[:, axis] * part for axis, part in enumerate(_LIGHT))
        light = 255 * (_AMBIENT + (1 - _AMBIENT) * np.clip(towards, 0, 1))
        pixels = np.empty((len(geoms), 3), np.uint8)
        for channel in range(3):
            pixels[:, channel] = self._colours[geoms, channel] * light
        visible, surfaces = {}, {}
        for number, geom in enumerate(self._geoms):
            shown = geoms == geom
            if not shown.any():
                continue
            visible[number] = float(shown.sum() / max(self._alone(number, ways), shown.sum()))
            rays = lift.rays()[0].reshape(-1, 3)[shown]
            surfaces[number] = np.median(rays * depth[shown, None], axis=0)
        shape = HEIGHT, WIDTH
        exact = lift.Scene(depth.reshape(shape), np.zeros(shape, bool))
        measured = lift.sensed(exact, rng, MISSING)
        return Shot(pixels.reshape(*shape, 3), measured, visible, surfaces)

    def _alone(self, number: int, ways: Array) -> float:
        """Return how many pixels a thing would have with nothing before it, and none cut off."""
        left, top, right, bottom = self.edges(number)
        rows = slice(max(math.floor(top), 0), max(math.ceil(bottom), 0))
        columns = slice(max(math.floor(left), 0), max(math.ceil(right), 0))
        part = ways.reshape(HEIGHT, WIDTH, 3)[rows, columns]
        if not part.size:
            return 0.0
        groups = np.zeros(6, np.uint8)
        groups[number + 1] = 1
        geoms, _, _ = lift.cast(self._model, self._data, self._eye, part.reshape(-1, 3), groups)
        inside = part.shape[0] * part.shape[1] / ((right - left) * (bottom - top))
        return float(np.count_nonzero(geoms >= 0)) / min(float(inside), 1.0)


@functools.cache
def _sphere() -> Array:
    """Spread points on the unit sphere evenly."""
    count = 2000
    z = 1 - (2 * np.arange(count) + 1) / count
    angle = np.arange(count) * math.pi * (3 - math.sqrt(5))
    around = np.sqrt(1 - z**2)
    return np.stack([around * np.cos(angle), around * np.sin(angle), z], axis=-1)


# ---------------------------------------------------------------- clip


@dataclasses.dataclass(frozen=True, eq=False)
class Shot:
    """A frame, its measured depth in millimetres, and the truth about the things in it.

    By a thing's number: the visible fraction of it, and the middle of its visible surface in the
    camera's frame, as `benchmarks.lift` defines both.
    """

    pixels: npt.NDArray[np.uint8]
    depth: npt.NDArray[np.uint16]
    visible: dict[int, float]
    surfaces: dict[int, Array]

    def image(self) -> RawFrame:
        """Return the frame as no server has seen it: some pixels are random, so none is cached."""
        pixels = self.pixels.copy()
        pixels.reshape(-1)[:UNIQUE] = np.frombuffer(os.urandom(UNIQUE), np.uint8)
        return RawFrame.from_array(pixels)

    def counted(self) -> list[int]:
        """Return the things that a detector must find."""
        return [number for number, part in self.visible.items() if part >= VISIBLE]


def digest(pixels: Any) -> str:
    """Hash the pixels of a frame that are the same each time."""
    return hashlib.sha256(memoryview(pixels).cast("B")[UNIQUE:]).hexdigest()


class Clip:
    """Frames at `FPS` in memory, from the world's time `begin` on, played again and again."""

    def __init__(self, seconds: float = PERIOD, begin: float = 0.0) -> None:
        self._world = World()
        self._begin = begin
        rng = np.random.default_rng(0)
        self._shots: list[Shot] = []
        for k in range(round(min(seconds, PERIOD) * FPS)):
            self._world.set_time(begin + k / FPS)
            self._shots.append(self._world.shot(rng))

    def __len__(self) -> int:
        return len(self._shots)

    def shot(self, number: int) -> Shot:
        return self._shots[number % len(self)]

    def truth(self) -> dict[str, dict[str, list[list[float]]]]:
        """Return the edges of counted things by frame, a hash of its pixels, and by noun."""
        found: dict[str, dict[str, list[list[float]]]] = {}
        for number, shot in enumerate(self._shots):
            boxes = self.boxes(number / FPS)
            by_noun: dict[str, list[list[float]]] = {}
            for thing in shot.counted():
                low, high = boxes[thing][:2], boxes[thing][2:] / 2
                edges = np.concatenate([low - high, low + high]).tolist()
                by_noun.setdefault(THINGS[thing].noun, []).append(edges)
            found[digest(shot.pixels)] = by_noun
        return found

    def boxes(self, t: float) -> dict[int, Array]:
        """Return each thing's whole box in the image: centre x, centre y, width, height, 0..1."""
        self._world.set_time(self._begin + t % (len(self) / FPS))
        size = np.array([WIDTH, HEIGHT])
        found: dict[int, Array] = {}
        for number in range(len(THINGS)):
            edges = self._world.edges(number) / np.tile(size, 2)
            low, high = np.clip(edges[:2], 0, 1), np.clip(edges[2:], 0, 1)
            found[number] = np.concatenate([(low + high) / 2, high - low])
        return found
