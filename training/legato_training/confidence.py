"""What confidences are worth: ``python -m legato_training.confidence --objects FILE --fit FOLDER``.

Reads the objects that `legato calibrate --test --objects` has written of two labelled folders.
Writes COCO's average precision (pycocotools), the calibration error before and after the fit with
its error by the bootstrap, and a reliability diagram, all of the folder of the test.
"""

import argparse
import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from legato_client import Box, Point
from legato_client.calibration import scored
from legato_client.calibration.fit import Fit, Pairs, calibration_error, fit, judge, reliability
from legato_client.calibration.scored import (
    ANNOTATIONS,
    SKILLS,
    LabelledImage,
    Scored,
    read_labels,
)

WIDTH, HEIGHT, MARGIN = 300, 300, 44


def average_precision(
    labels: list[LabelledImage], found: list[Scored], annotations: Path
) -> dict[str, float]:
    """COCO's AP of the boxes of detect by score, and their F1 at IoU 0.5."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations))
        categories = {str(each["name"]): each["id"] for each in truth.cats.values()}
        rows = [
            {
                "image_id": each.image,
                "category_id": categories[each.name],
                "bbox": _bbox(each.place, truth.imgs[each.image]),
                "score": each.score,
            }
            for each in found
        ]
        judge = COCOeval(truth, truth.loadRes(rows), "bbox")
        judge.params.imgIds = sorted({each.number for each in labels})
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    named = enumerate(("AP", "AP50", "AP75"))
    hits = sum(each.right for each in found)
    wanted = sum(len(boxes) for each in labels for boxes in each.boxes.values())
    return {name: round(float(judge.stats[at]), 4) for at, name in named} | {
        "F1": round(2 * hits / (len(found) + wanted), 4)
    }


def _bbox(box: Box | Point, image: dict[str, Any]) -> list[float]:
    assert isinstance(box, Box)  # of detect
    left, top = box.x_min * image["width"], box.y_min * image["height"]
    return [left, top, box.x_max * image["width"] - left, box.y_max * image["height"] - top]


def ranking(pairs: list[tuple[float, bool]]) -> float:
    """Chance that a right object has a higher score than a wrong one (AUROC)."""
    right = np.array([score for score, is_right in pairs if is_right])
    wrong = np.array([score for score, is_right in pairs if not is_right])
    if not len(right) or not len(wrong):
        return float("nan")
    above = (right[:, None] > wrong).mean() + 0.5 * (right[:, None] == wrong).mean()
    return round(float(above), 4)


def measure(
    fitting: list[Scored], testing: list[Scored], labels: list[LabelledImage]
) -> dict[str, Any]:
    """Calibration and ranking of a skill; `shown_*` is of names that their pictures show."""
    fitted = fit(pairs_of(fitting))
    truth = {each.number: each.boxes for each in labels}
    testing = [replace(each, shown=bool(truth[each.image][each.name])) for each in testing]
    shown = pairs_of([each for each in testing if each.shown])
    judged, pairs = judge(fitted, testing), pairs_of(testing)
    errors = {
        name: round(getattr(judged, name), 4)
        for name in (
            "ece_before",
            "ece_before_error",
            "ece_after",
            "ece_after_error",
            "gain_error",
            "log_loss_before",
            "log_loss_after",
            "share_better",
        )
    }
    return {
        "fitted_on": len(fitting),
        "temperature": round(fitted.temperature, 4),
        "offset": round(fitted.offset, 4),
        "ships": judged.is_better,
        "objects": judged.objects,
        "right": judged.right,
        **errors,
        "shown_objects": len(shown),
        "shown_ece_before": round(calibration_error(Fit(), shown), 4),
        "shown_ece_after": round(calibration_error(fitted, shown), 4),
        "auroc": ranking(pairs),
        "before": bins_of(Fit(), pairs),
        "after": bins_of(fitted, pairs),
    }


def pairs_of(found: list[Scored]) -> list[tuple[float, bool]]:
    """Scores, and whether their objects are right."""
    return [(each.score, each.right) for each in found]


def bins_of(fitted: Fit, pairs: Pairs) -> list[list[float]]:
    """Of the reliability diagram: count, confidence, share right."""
    return [[b.count, b.confidence, b.right] for b in reliability(fitted, pairs)]


def diagram(measured: dict[str, Any]) -> str:
    """Draw a square for each skill: fraction right over confidence, before and after."""
    squares = []
    for place, (skill, each) in enumerate(measured.items()):
        at = place * (WIDTH + MARGIN) + MARGIN
        squares.append(
            f'<g transform="translate({at} 28)"><rect width="{WIDTH}" height="{HEIGHT}" '
            f'fill="none" stroke="#888"/><path d="M0 {HEIGHT}L{WIDTH} 0" stroke="#bbb" '
            f'stroke-dasharray="4"/><text y="-10">{skill}: ECE {each["ece_before"]:.3f} before, '
            f"{each['ece_after']:.3f} after</text>"
        )
        for name, colour in (("before", "#e08214"), ("after", "#2166ac")):
            most = max(count for count, _, _ in each[name])
            squares.extend(
                f'<circle cx="{x * WIDTH:.1f}" cy="{(1 - y) * HEIGHT:.1f}" '
                f'r="{3 + 9 * (count / most) ** 0.5:.1f}" fill="{colour}" fill-opacity="0.6"/>'
                for count, x, y in each[name]
            )
        squares.append(f'<text x="{WIDTH}" y="{HEIGHT + 18}" text-anchor="end">confidence</text>')
        squares.append("</g>")
    width = len(measured) * (WIDTH + MARGIN) + MARGIN
    key = (
        f'<text x="{MARGIN}" y="{HEIGHT + 62}">Share of right objects over confidence: '
        '<tspan fill="#e08214">before</tspan> and <tspan fill="#2166ac">after</tspan> the fit; '
        "areas by number of objects.</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT + 76}" '
        f'font-family="sans-serif" font-size="13" fill="#333"><rect width="100%" height="100%" '
        f'fill="#fff"/>{"".join(squares)}{key}</svg>\n'
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=Path, required=True, help="of legato calibrate --objects")
    parser.add_argument("--fit", type=Path, required=True, help="made by labelled.py")
    parser.add_argument("--test", type=Path, required=True, help="made by labelled.py")
    parser.add_argument("--absent", type=int, default=2, help="as of legato calibrate")
    parser.add_argument("--out", type=Path, required=True, help="confidence.json of results/")
    parser.add_argument("--diagram", type=Path, required=True)
    args = parser.parse_args()
    fit_labels, labels = (
        read_labels(folder, folder / ANNOTATIONS, absent=args.absent)
        for folder in (args.fit, args.test)
    )
    fitting, testing = (scored.read(args.objects, name) for name in ("fit", "test"))
    document: dict[str, Any] = {
        "fit_pictures": len(fit_labels),
        "pictures": len(labels),
        "boxes": average_precision(
            labels,
            [each for each in testing if each.skill == "detect"],
            args.test / ANNOTATIONS,
        ),
        "skills": {
            skill: measure(
                [each for each in fitting if each.skill == skill],
                [each for each in testing if each.skill == skill],
                labels,
            )
            for skill in SKILLS
        },
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    args.diagram.write_text(diagram(document["skills"]))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
