"""Outlines and hulls of sprite alpha, in unit sprite coordinates (-0.5..0.5, y down)."""

import numpy as np

OUTLINE_POINTS = 64
HULL_POINTS = 48
BRIDGE = 3


def resample_closed(points_P2: np.ndarray, count: int) -> np.ndarray:
    """``count`` points evenly spaced along a closed polygon, starting at its first point."""
    closed = np.concatenate([points_P2, points_P2[:1]])
    steps = np.hypot(*np.diff(closed, axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    wanted = np.linspace(0.0, along[-1], count, endpoint=False)
    return np.stack([np.interp(wanted, along, closed[:, axis]) for axis in (0, 1)], axis=1)


def is_clockwise(points_P2: np.ndarray) -> bool:
    """Clockwise as seen on screen, where y grows downwards."""
    x, y = points_P2.T
    return float(np.sum(x * np.roll(y, -1) - np.roll(x, -1) * y)) > 0


def trace_outline(alpha: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None, float]:
    """Alpha, uint8 [S,S] -> outline [64,2] clockwise, hull [48,2], share of the area outlined."""
    from scipy import ndimage  # art script only
    from scipy.spatial import ConvexHull
    from skimage.measure import find_contours

    side = alpha.shape[0]
    mask = alpha > 127
    labels, count = ndimage.label(ndimage.binary_closing(np.pad(mask, BRIDGE), iterations=BRIDGE))
    if count == 0:
        return None, None, 0.0
    sizes = ndimage.sum_labels(np.ones_like(labels), labels, range(1, count + 1))
    largest = ndimage.binary_fill_holes(labels == int(np.argmax(sizes)) + 1)
    contour = max(find_contours(np.pad(largest, 1).astype(float), 0.5), key=len)
    outline = (contour[:-1, ::-1] - 1 - BRIDGE + 0.5) / side - 0.5
    if not is_clockwise(outline):
        outline = outline[::-1]
    rows, columns = np.nonzero(mask)
    corners = np.concatenate(
        [np.stack([columns + dx, rows + dy], 1) for dx in (0, 1) for dy in (0, 1)]
    )
    hull = corners[ConvexHull(corners).vertices] / side - 0.5
    return (
        resample_closed(outline, OUTLINE_POINTS),
        fit_hull(hull),
        float(np.max(sizes) / np.sum(sizes)),
    )


def fit_hull(hull_P2: np.ndarray) -> np.ndarray:
    """Reduce a convex hull to HULL_POINTS support points, or repeat its last one that often."""
    if len(hull_P2) > HULL_POINTS:
        angles = np.linspace(0, 2 * np.pi, HULL_POINTS, endpoint=False)
        directions = np.stack([np.cos(angles), np.sin(angles)])
        hull_P2 = hull_P2[np.argmax(hull_P2 @ directions, axis=0)]
    return np.concatenate([hull_P2, np.repeat(hull_P2[-1:], HULL_POINTS - len(hull_P2), axis=0)])
