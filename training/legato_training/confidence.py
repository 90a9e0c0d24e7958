"""Measure confidences on a labelled folder: ``python -m legato_training.confidence --test FOLDER``.

Asks a server that runs the model, never about scenes that its calibration was fitted on. Writes
COCO's average precision (pycocotools), the calibration error before and after the fit, and a
reliability diagram.
"""

import argparse
import contextlib
import io
import json
from pathlib import Path

import numpy as np
from legato_client import Client
from legato_client.calibration.fit import Fit, calibration_error, log_loss, reliability
from legato_client.calibration.labelled import ANNOTATIONS, LabelledFolder, read_labels
from legato_client.calibration.scored import Scored, score

SKILLS = ("detect", "point", "segment")
WIDTH, HEIGHT, MARGIN = 300, 300, 44


def average_precision(labels: LabelledFolder, found: list[Scored], annotations: Path) -> dict:
    """COCO's AP of the boxes of detect by score, and their F1 at IoU 0.5."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations))
        rows = [
            {
                "image_id": each.picture,
                "category_id": labels.categories[each.name],
                "bbox": _bbox(each.place, truth.imgs[each.picture]),
                "score": each.score,
            }
            for each in found
        ]
        judge = COCOeval(truth, truth.loadRes(rows), "bbox")
        judge.params.imgIds = sorted({each.number for each in labels.pictures})
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    named = enumerate(("AP", "AP50", "AP75"))
    hits = sum(each.right for each in found)
    wanted = sum(len(boxes) for each in labels.pictures for boxes in each.boxes.values())
    return {name: round(float(judge.stats[at]), 4) for at, name in named} | {
        "F1": round(2 * hits / (len(found) + wanted), 4)
    }


def _bbox(box, image: dict) -> list[float]:
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


def measure(found: list[Scored], fitted: dict[str, Fit]) -> dict:
    """Calibration and ranking of each skill."""
    measured = {}
    for skill, fit in fitted.items():
        pairs = [(each.score, each.right) for each in found if each.skill == skill]
        bins = reliability(fit, pairs)
        measured[skill] = {
            "objects": len(pairs),
            "right": sum(is_right for _, is_right in pairs),
            "ece_before": round(calibration_error(Fit(), pairs), 4),
            "ece_after": round(calibration_error(fit, pairs), 4),
            "log_loss_before": round(log_loss(Fit(), pairs), 4),
            "log_loss_after": round(log_loss(fit, pairs), 4),
            "auroc": ranking(pairs),
            "before": [[b.count, b.confidence, b.right] for b in reliability(Fit(), pairs)],
            "after": [[b.count, b.confidence, b.right] for b in bins],
        }
    return measured


def diagram(measured: dict) -> str:
    """An SVG with a square for each skill: share right over confidence, before and after."""
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
    parser.add_argument("--test", type=Path, required=True, help="made by labelled.py")
    parser.add_argument("--server", default="127.0.0.1:50051")
    parser.add_argument("--fit", type=Path, required=True, help="the fit that is judged")
    parser.add_argument("--out", type=Path, required=True, help="confidence.json of results/")
    parser.add_argument("--diagram", type=Path, required=True)
    parser.add_argument("--annotations", type=Path, help="default: the folder's own")
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=["detect", "point"])
    args = parser.parse_args()
    annotations = args.annotations or args.test / ANNOTATIONS
    labels = read_labels(args.test, annotations, absent=2, seed=1)
    with Client(args.server, timeout=300.0) as client:
        found = score(
            client, labels.pictures, args.skills, parallel=4, tell=lambda: print(".", end="")
        )
    content = json.loads(args.fit.read_text())
    fitted = {skill: Fit(**each) for skill, each in content["skills"].items()}
    boxes = [each for each in found if each.skill == "detect"]
    document = {
        "pictures": len(labels.pictures),
        "fit": content,
        "boxes": average_precision(labels, boxes, annotations),
        "skills": measure(
            found, {name: each for name, each in fitted.items() if name in args.skills}
        ),
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    args.diagram.write_text(diagram(document["skills"]))
    print(json.dumps({k: v for k, v in document.items() if k != "fit"}))


if __name__ == "__main__":
    main()
