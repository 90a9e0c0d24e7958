"""The figures and the images of a recording."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from legato_client import Box, BoxAxes, Detection, TrackNow
from PIL import Image

from examples.robot import overlay, report
from examples.robot.recording import Answer, Drop, Look, Recording, Sent
from examples.robot.scene import compose

NOUNS = ("bus", "dog")
SCENE = compose(NOUNS, 0)
AGE = 0.4  # seconds between an image and its answer


def recording(age: float = AGE, count: int = 10) -> Recording:
    """Every tenth second an image, every other one answered with the truth, that late.

    Tracks are at the truth of their moment.
    """
    made = Recording(NOUNS, count, [Sent(n, n / 10, n / 10 + 0.002) for n in range(1, count + 1)])
    for frame in made.sent:
        if frame.sequence % 2:
            drop = Drop(frame.sequence, "superseded", frame.sent, len(made.drops) + 1)
            made.drops.append(drop)
            continue
        truth, arrived = SCENE.truth(frame.captured), frame.captured + age
        for noun, track in zip(NOUNS, tracks_at(arrived), strict=True):
            is_last = noun == "dog"
            answer = Answer(
                frame.sequence, noun, (truth[noun],), arrived, is_last, "", ("1",), (track,)
            )
            made.answers.append(answer)
    made.looks = [Look(n / 10, tracks_at(n / 10)) for n in range(6, count + 1)]
    return made


def tracks_at(t: float) -> tuple[TrackNow, ...]:
    """Each thing where it is at that time, quite sure of it."""
    truth, sure = SCENE.truth(t), BoxAxes(0.01, 0.01, 0.01, 0.01)
    return tuple(
        TrackNow(
            axes_of(truth[noun]),
            sure,
            AGE,
            Detection(truth[noun], noun, None, "1"),
            1,
            noun,
        )
        for noun in NOUNS
    )


def axes_of(box: Box) -> BoxAxes:
    """Its centre and size."""
    width, height = box.x_max - box.x_min, box.y_max - box.y_min
    return BoxAxes(box.x_min + width / 2, box.y_min + height / 2, width, height)


def test_ages_are_from_capture_to_arrival() -> None:
    """In milliseconds, of every answer."""
    figures = report.summarise(SCENE, recording())
    assert figures["age_ms"] == pytest.approx({"p50": 400, "p90": 400, "p99": 400, "max": 400})
    assert figures["sent_late_ms"] == pytest.approx({"p50": 2, "p90": 2, "p99": 2})
    assert figures["between_answers_ms"] == pytest.approx({"p50": 200, "p90": 200, "p99": 200})


def test_lateness_costs_overlap_and_only_lateness() -> None:
    """True boxes score 1 when taken; on arrival they score less, the later the less."""
    early, late = (report.summarise(SCENE, recording(age)) for age in (0.1, 0.8))
    assert early["iou_at_capture"]["mean"] == late["iou_at_capture"]["mean"] == 1.0
    assert late["iou_on_arrival"]["mean"] < early["iou_on_arrival"]["mean"] < 1.0
    assert report.summarise(SCENE, recording(0.0))["iou_on_arrival"]["mean"] == 1.0


def test_a_missed_object_counts_as_nothing() -> None:
    """An answer without boxes lowers the mean, and a box more than there are things is counted."""
    made = recording()
    made.answers = [
        Answer(a.sequence, a.noun, () if a.noun == "bus" else a.boxes * 2, a.arrived, a.is_last)
        for a in made.answers
    ]
    figures = report.summarise(SCENE, made)
    assert figures["iou_at_capture"] == {"mean": 0.5, "at_least_0.5": 0.5}
    assert figures["boxes_too_many"] == 5


def test_a_session_without_answers_has_no_figures_but_books() -> None:
    """Nothing measured is null in JSON, never a number, and the table can still be written."""
    silent = Recording(NOUNS, 1, [Sent(1, 0.0, 0.0)])
    figures = report.summarise(SCENE, silent)
    told = json.loads(json.dumps(report.without_nan(figures), allow_nan=False))
    assert told["age_ms"]["p99"] is None
    assert told["iou_at_capture"]["mean"] is None
    assert told["faults"] == ["frame 1: answers [], 0 drops"]
    assert "frame 1" in report.markdown("x", {}, figures)


def test_the_table_says_what_was_measured() -> None:
    """Counts, ages and both overlaps are in the table, beside how they came about."""
    figures = report.summarise(SCENE, recording())
    text = report.markdown("A run", {"fps": 10}, figures)
    assert "- fps: `10`" in text
    assert "| frames dropped | 5 (5 superseded) |" in text
    assert "| age of an answer, P50 / P90 / P99 | 400.0 / 400.0 / 400.0 ms |" in text
    assert (
        f"| mean IoU, truth when the answer arrived | {figures['iou_on_arrival']['mean']:.3f} |"
        in text
    )


def test_the_newest_answer_is_that_about_the_newest_image() -> None:
    """Before the first answer nothing is known; one about an older image changes nothing."""
    made = recording()
    assert report.newest_answer(made.answers, "bus", 0.5) is None
    newest = report.newest_answer(made.answers, "bus", 0.81)
    assert newest is not None
    assert newest.sequence == 4
    made.answers.append(Answer(2, "bus", (), 0.9, False))
    assert report.newest_answer(made.answers, "bus", 0.95) is not made.answers[-1]


def test_what_is_extrapolated_is_scored_at_its_moment() -> None:
    """Tracks at the truth of a moment score 1 there, where answers of an older image do not."""
    figures = report.summarise(SCENE, recording())
    assert figures["iou_extrapolated"]["mean"] == pytest.approx(1)
    assert figures["iou_at_any_moment"]["extrapolated"] == pytest.approx(1)
    assert figures["iou_at_any_moment"]["newest_answer"] < 0.9
    assert figures["likely_places"] == 1
    assert figures["tracks_by_noun"] == {"bus": 1, "dog": 1}


def test_tracks_that_are_wrong_score_less() -> None:
    """Late tracks are not likely places, a second track of an object is counted, none is 0."""
    made = recording()
    made.looks = [Look(look.time, tracks_at(look.time - AGE)) for look in made.looks]
    made.answers = [dataclasses.replace(answer, tracks=()) for answer in made.answers]
    made.answers[-2:] = [dataclasses.replace(a, track_ids=("2",)) for a in made.answers[-2:]]
    figures = report.summarise(SCENE, made)
    assert figures["iou_at_any_moment"]["extrapolated"] < 0.9
    assert figures["likely_places"] < 0.9
    assert figures["tracks_by_noun"] == {"bus": 2, "dog": 2}
    assert figures["iou_extrapolated"]["mean"] == 0


def test_a_moment_shows_truth_tracks_and_stale_boxes() -> None:
    """The image of that time is marked where things are, are expected, and were seen."""
    bare = SCENE.image(0.8)
    stale = list(SCENE.truth(0.4).values())
    with_truth = overlay.moment(SCENE, 0.8, (), ())
    with_tracks = overlay.moment(SCENE, 0.8, tracks_at(0.8), ())
    with_all = overlay.moment(SCENE, 0.8, tracks_at(0.8), stale)
    assert len({p.tobytes() for p in (bare, with_truth, with_tracks, with_all)}) == 4
    left, top, _, _ = SCENE.truth(0.8)["bus"].to_pixels(*bare.size)
    assert with_truth.getpixel((left + 20, top)) == (255, 255, 255)


@pytest.mark.parametrize(("count", "size"), [(2, (480, 386)), (6, (1456, 386)), (40, (1456, 780))])
def test_the_sheet_has_a_tile_for_each_moment(count: int, size: tuple[int, int]) -> None:
    """At most six moments, three in a row; fewer answers make a smaller sheet."""
    assert overlay.sheet(SCENE, recording(count=count)).size == size


def test_without_an_answer_there_is_no_sheet() -> None:
    """The error says so."""
    with pytest.raises(ValueError, match="no frame was answered"):
        overlay.sheet(SCENE, Recording(NOUNS, 0))


def test_a_film_has_every_frame(tmp_path: Path) -> None:
    """One image a look; a GIF needs no tool, and another ending is refused."""
    path = tmp_path / "robot.gif"
    overlay.write_film(path, overlay.film(SCENE, recording()), 10)
    with Image.open(path) as film:
        assert getattr(film, "n_frames", 1) == 5
    with pytest.raises(ValueError, match=r"robot\.avi"):
        overlay.write_film(tmp_path / "robot.avi", [], 10)
