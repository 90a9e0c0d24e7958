"""Marks in 3D: exact scenes with a sensor's faults, and input that cannot be right."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from legato_client import (
    Box,
    BoxAxes,
    Client,
    Detection,
    DetectResult,
    FrameResult,
    FrameStamp,
    ImageInfo,
    NotFound,
    Outline,
    Point,
    PointedObject,
    QueryResult,
    ResponseInfo,
    TrackNow,
)
from legato_client.depth import lift, mask

from benchmarks import lift as scenes

K = (500.0, 500.0, 319.5, 239.5)
SHAPE = (480, 640)
HALF_PIXEL = 0.5 / 500 * 2  # metres, at the distance of the plane
CUP = Detection(Box(0.25, 0.25, 0.75, 0.75), "cup")


def flat(metres: float = 2.0) -> np.ndarray:
    return np.full(SHAPE, metres, np.float32)


def info(width: int = 640, height: int = 480) -> ResponseInfo:
    return ResponseInfo("r", "m", "stop", image=ImageInfo("i", width, height, False))


# ---------------------------------------------------------------- scenes with known truth


@pytest.mark.parametrize("name", ["analytic", "simulated"])
@pytest.mark.parametrize("occlusion", scenes.OCCLUSIONS)
def test_centres_are_where_the_surfaces_are(name, occlusion):
    """Noise, flying pixels, an occluder and 20 % holes move no kind of mark by more than 5 cm."""
    if name == "simulated":
        pytest.importorskip("mujoco", reason='needs the extra "simulator"')
    for distance in scenes.DISTANCES:
        rng = np.random.default_rng([7, round(distance), round(10 * occlusion)])
        scene = scenes.occluded(getattr(scenes, name)(rng, distance), rng, occlusion)
        middle, spot = scenes.truth(scene)
        found = lift(scenes.marks(scene, rng), scenes.sensed(scene, rng, 0.2), scenes.INTRINSICS)
        for each, wanted in zip(found, (middle, middle, spot), strict=True):
            assert math.dist(each.center or (), wanted) < 0.05, each
            assert each.valid > 0.2


def test_a_plane_is_exact():
    """On a plane without noise centre and size follow from the intrinsics, to half a pixel."""
    (found,) = lift([CUP], flat(), K)
    assert found.center == pytest.approx((0, 0, 2), abs=HALF_PIXEL)
    assert found.size == pytest.approx((320 / 500 * 2, 240 / 500 * 2, 0))
    assert found.valid == 1


@pytest.mark.parametrize("off_centre", [0.1, 0.9])
def test_pixels_have_their_middles_at_whole_numbers(off_centre):
    """A point at the middle of pixel (u, v) lies on that pixel's ray."""
    u, v = round(off_centre * 640), round(off_centre * 480)
    point = PointedObject(Point((u + 0.5) / 640, (v + 0.5) / 480), "cup")
    (found,) = lift([point], flat(), K)
    assert found.center == pytest.approx(((u - 319.5) / 250, (v - 239.5) / 250, 2))
    assert found.size is None


def test_millimetres_are_metres():
    """Depth in uint16 millimetres gives what floats in metres give."""
    millimetres = np.full(SHAPE, 2000, np.uint16)
    assert lift([CUP], millimetres, K) == lift([CUP], flat(), K)


def test_an_object_is_told_from_its_background():
    """A box of which a third is the object gives the object, not the wall behind it."""
    depth = flat(4.0)
    depth[180:300, 240:400] = 1.5  # half the box across, half of it down
    (found,) = lift([CUP], depth, K)
    assert found.center
    assert found.center[2] == pytest.approx(1.5)


def test_a_box_beside_its_object_is_corrected_half_way():
    """The centre is between the box's middle and that of the surface in it."""
    depth = flat(4.0)
    depth[:, 320:] = 2.0
    (found,) = lift([CUP], depth, K)
    u = (319.5 + 399.5) / 2
    assert found.center == pytest.approx(((u - K[2]) / K[0] * 2, 0, 2), abs=HALF_PIXEL)


def test_an_outline_has_its_own_pixels_only():
    """A ring's hole, which shows the wall, neither counts as valid nor moves the centre."""
    path = "M0,0 L1,0 L1,1 L0,1Z M0.1,0.1 L0.1,0.9 L0.9,0.9 L0.9,0.1Z"  # turns the other way
    depth = flat(1.0)
    depth[144:336, 192:448] = np.nan
    (found,) = lift([Outline(path, CUP.box, "ring")], depth, K)
    assert found.center == pytest.approx((0, 0, 1), abs=HALF_PIXEL)
    assert found.valid == 1


def test_an_unreadable_outline_counts_as_its_box():
    """A path that is none gives what the outline's box gives."""
    broken = Outline("no path", CUP.box, "cup")
    assert lift([broken], flat(), K)[0].center == lift([CUP], flat(), K)[0].center


def test_masks_have_the_pixels_of_their_outlines():
    """Without a ring's hole; a path that is none gives the box, cut at the image's edges."""
    path = "M0,0 L1,0 L1,1 L0,1Z M0.25,0.25 L0.25,0.75 L0.75,0.75 L0.75,0.25Z"
    ring = mask(Outline(path, Box(0.25, 0.5, 0.75, 1.0), "ring"), 16, 8)
    assert "\n".join("".join(".#"[pixel] for pixel in row) for row in ring[4:].tolist()) == (
        "....########....\n....##....##....\n....##....##....\n....########...."
    )
    assert not ring[:4].any()
    outside = mask(Outline("no path", Box(-0.5, 0.0, 0.125, 2.0), "box"), 16, 8)
    assert outside[:, :2].all()
    assert not outside[:, 2:].any()


def test_noise_is_in_the_covariance():
    """Along the ray it is the depth's noise, across it that of the box, a proper covariance."""
    rng = np.random.default_rng(0)
    aside = Detection(Box(0.6, 0.6, 0.9, 0.9), "cup")
    noisy = flat() + rng.normal(size=SHAPE) * 0.03
    (found,) = lift([aside], noisy, K)
    matrix = np.array(found.covariance)
    assert math.sqrt(matrix[2, 2]) == pytest.approx(0.03, rel=0.1)
    assert found.center
    x, _, z = found.center
    across = z / 500 * math.hypot(1, 0.03 * 0.3 * 640)  # a pixel, and 3 % of the box's width
    assert matrix[0, 0] == pytest.approx(across**2 + (x / z) ** 2 * matrix[2, 2])
    assert matrix[0, 2] == pytest.approx(x / z * matrix[2, 2])
    assert np.allclose(matrix, matrix.T)
    assert np.linalg.eigvalsh(matrix).min() > 0


def test_a_track_brings_its_own_deviation():
    """A track whose place is less certain has a wider covariance across, and the same along."""
    axes = BoxAxes(0.5, 0.5, 0.5, 0.5)
    sure, unsure = (
        TrackNow(axes, BoxAxes(each, each, 0, 0), 0.1, CUP, 1, "t") for each in (0.0, 0.1)
    )
    one, other = lift((sure, unsure), flat(), K)
    assert one.mark.label == "cup"
    assert one.center == pytest.approx((0, 0, 2), abs=HALF_PIXEL)
    assert one.covariance
    assert other.covariance
    assert other.covariance[0][0] > 2 * one.covariance[0][0]
    assert other.covariance[2][2] == one.covariance[2][2]


def test_results_of_all_kinds():
    """A result, and a session's, give their marks in order; text and failures give nothing."""
    result = DetectResult((CUP, CUP), info())
    in_session = FrameResult(FrameStamp(), "t", result, None, True)
    failed = FrameResult(FrameStamp(), "t", NotFound("gone"), None, True)
    with Client("127.0.0.1:9") as client:
        assert client.lift(result, flat(), K) == lift(result, flat(), K)
    assert [each.mark for each in lift(in_session, flat(), K)] == [CUP, CUP]
    assert lift(failed, flat(), K) == lift(QueryResult("yes", None, info()), flat(), K) == ()


def test_marks_without_depth_say_why():
    """A mark on a hole or outside the image has no centre but a reason; others are unharmed."""
    depth = flat()
    depth[:, :100] = 0
    hole = PointedObject(Point(0.05, 0.5), "cup")
    outside = Detection(Box(1.1, 0.2, 1.3, 0.4), "cup")
    on_hole, beyond, fine = lift([hole, outside, CUP], depth, K)
    assert on_hole.center is None
    assert on_hole.valid == 0
    assert "0 of 36 pixels have depth, fewer than 5" in on_hole.reason
    assert beyond.center is None
    assert "inside" in beyond.reason
    assert fine.center is not None
    assert not fine.reason


@pytest.mark.parametrize("x", [float("nan"), float("inf"), -3e8])
def test_a_mark_at_no_place_has_a_reason(x):
    """Coordinates that are not finite, or far away, give a reason and raise nothing."""
    (found,) = lift([PointedObject(Point(x, 0.5), "cup")], flat(), K)
    assert found.center is None
    assert found.reason


# ---------------------------------------------------------------- intrinsics


def camera_info(**changes: object) -> SimpleNamespace:
    k = [500.0, 0, 319.5, 0, 500.0, 239.5, 0, 0, 1]
    return SimpleNamespace(**{"k": k, "d": [0.0] * 5, "width": 640, "height": 480, **changes})


@pytest.mark.parametrize(
    "intrinsics", [list(K), np.reshape(camera_info().k, (3, 3)), camera_info(), camera_info(d=[])]
)
def test_forms_of_intrinsics(intrinsics):
    """Four numbers, a matrix and a CameraInfo are the same camera."""
    assert lift([CUP], flat(), intrinsics) == lift([CUP], flat(), K)


def test_a_crop_has_its_middle_where_it_likes():
    """A CameraInfo of the depth's own size is believed."""
    k = [500.0, 0, 159.5, 0, 500.0, 119.5, 0, 0, 1]
    (found,) = lift([CUP], flat(), camera_info(k=k))
    assert found.center == pytest.approx((0.64, 0.48, 2), abs=2 * HALF_PIXEL)


@pytest.mark.parametrize(
    ("intrinsics", "message"),
    [
        (camera_info(d=[0.1, 0]), r"distortion d = \[0.1, 0.0\], which must be zero: rectify"),
        (camera_info(width=1280, height=720), "intrinsics are of 1280x720 .* depth is 640x480"),
        ((500, 500, 959.5, 539.5), r"cx = 959.5, outside the depth image of 640x480.* 0..640"),
        ((500, 500, 319.5, -10), "cy = -10"),
        ((1000, 1000, 639.5, 479.5), "as of an image of about 1280x960, but depth is 640x480"),
        ((250, 250, 159.5, 119.5), r"\(cx, cy\) = \(159.5, 119.5\), as of an image .* 320x240"),
        ((0.82, 1.09, 0.5, 0.5), "as of an image of about 2x2"),
        ((500, 500, float("nan"), 240), "cx = nan"),
        ((0, 500, 319.5, 239.5), "fx = 0: it must be above 0"),
        ((500, float("inf"), 319.5, 239.5), "fy = inf"),
        ((500, 500, 319.5), r"shape \(3,\)"),
        (np.eye(3) + 1, "a matrix must be"),
        ("camera", "intrinsics are 'camera'"),
    ],
)
def test_wrong_intrinsics(intrinsics, message):
    """Intrinsics that cannot be the image's are refused with the value and the limit."""
    with pytest.raises(ValueError, match=message):
        lift([CUP], flat(), intrinsics)


# ---------------------------------------------------------------- depth


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        (np.full(SHAPE, 2000, np.int32), "type int32, whose unit is not known: it must be uint16"),
        (np.full(SHAPE, 2000.0), "median of 2000 m, above 1000: floats must be in metres"),
        (np.full(SHAPE, np.nan), "no value in 640x480 pixels"),
        (np.zeros(SHAPE, np.uint16), "no value in 640x480 pixels"),
        (np.ones((480, 640, 1), np.float32), r"shape \(480, 640, 1\)"),
        (np.ones((0, 640), np.float32), r"shape \(0, 640\)"),
        ("depth.png", r"shape \(\)"),
    ],
)
def test_wrong_depth(depth, message):
    """Depth of an unknown unit, shape or content is refused with what it is."""
    with pytest.raises(ValueError, match=message):
        lift([CUP], depth, K)


def test_depth_of_another_size():
    """Both sizes are named where the result tells the image's."""
    message = "depth is 640x480, but the image is 1280x720"
    with pytest.raises(ValueError, match=message):
        lift(DetectResult((CUP,), info(1280, 720)), flat(), K)
