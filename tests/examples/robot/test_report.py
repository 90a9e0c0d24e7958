"""Scenes, recordings, scores and reports of the robot's camera."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from legato_client import Box, BoxAxes, Detection, TrackNow
from PIL import Image

from examples.robot import report
from examples.robot.recording import Answer, Drop, Look, Recording, Sent
from examples.robot.report import match, mean, overlap, percentile
from examples.robot.scene import NOUNS as ALL_NOUNS
from examples.robot.scene import Scene, compose

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
    with_truth = report.moment(SCENE, 0.8, (), ())
    with_tracks = report.moment(SCENE, 0.8, tracks_at(0.8), ())
    with_all = report.moment(SCENE, 0.8, tracks_at(0.8), stale)
    assert len({p.tobytes() for p in (bare, with_truth, with_tracks, with_all)}) == 4
    left, top, _, _ = SCENE.truth(0.8)["bus"].to_pixels(*bare.size)
    assert with_truth.getpixel((left + 20, top)) == (255, 255, 255)


@pytest.mark.parametrize(("count", "size"), [(2, (480, 386)), (6, (1456, 386)), (40, (1456, 780))])
def test_the_sheet_has_a_tile_for_each_moment(count: int, size: tuple[int, int]) -> None:
    """At most six moments, three in a row; fewer answers make a smaller sheet."""
    assert report.sheet(SCENE, recording(count=count)).size == size


def test_without_an_answer_there_is_no_sheet() -> None:
    """The error says so."""
    with pytest.raises(ValueError, match="no frame was answered"):
        report.sheet(SCENE, Recording(NOUNS, 0))


def test_a_film_has_every_frame(tmp_path: Path) -> None:
    """One image a look; a GIF needs no tool, and another ending is refused."""
    path = tmp_path / "robot.gif"
    report.write_film(path, report.film(SCENE, recording()), 10)
    with Image.open(path) as film:
        assert getattr(film, "n_frames", 1) == 5
    with pytest.raises(ValueError, match=r"robot\.avi"):
        report.write_film(tmp_path / "robot.avi", [], 10)


# ---------------------------------------------------------------- recording
# The books of a session, from both sides.

ASKED = ("dog", "bus")


def answer(sequence: int, noun: str, is_last: bool) -> Answer:
    """An answer without boxes."""
    return Answer(sequence, noun, (), 1.0, is_last)


def books() -> Recording:
    """Three frames: answered, dropped, answered."""
    return Recording(
        ASKED,
        3,
        sent=[Sent(n, n / 30, n / 30) for n in (1, 2, 3)],
        answers=[answer(n, noun, noun == "bus") for n in (1, 3) for noun in ASKED],
        drops=[Drop(2, "superseded", 1.0, 1)],
    )


def test_whole_books_have_no_fault() -> None:
    """Every frame answered for every task or dropped once: nothing to say."""
    assert books().faults() == []
    assert books().reasons() == {"superseded": 1}
    assert Recording(ASKED, 0).faults() == []


@pytest.mark.parametrize("order", [("dog", "bus"), ("bus", "dog")])
def test_answers_may_come_in_any_order(order: tuple[str, str]) -> None:
    """The tasks of a frame may end in any order; only the last one is marked."""
    whole = books()
    whole.answers = [answer(n, noun, noun == order[1]) for n in (1, 3) for noun in order]
    assert whole.faults() == []


def break_books(kind: str) -> Recording:
    """Books with one fault."""
    broken = books()
    match kind:
        case "frame 2: answers [], 0 drops":
            broken.drops = []
        case "frame 2: answers [], 2 drops":
            broken.drops.append(Drop(2, "too_old", 1.0, 2))
        case "frame 1: answers ['bus'], 0 drops":
            del broken.answers[0]
        case "frame 3: answers ['dog', 'bus'], 1 drops":
            broken.drops.append(Drop(3, "too_old", 1.0, 2))
        case "frame 1: its last answer is not marked as the last":
            broken.answers[1] = answer(1, "bus", False)
        case "frame 9: never sent":
            broken.drops.append(Drop(9, "too_old", 1.0, 2))
        case "the server's count of drops is 5, 1 arrived":
            broken.drops = [Drop(2, "superseded", 1.0, 5)]
        case "the session was over 2 frames before the clip was":
            broken.num_frames, broken.left_out = 6, [4]
        case "it broke":
            broken.failure = "it broke"
    return broken


@pytest.mark.parametrize(
    "fault",
    [
        "frame 2: answers [], 0 drops",
        "frame 2: answers [], 2 drops",
        "frame 1: answers ['bus'], 0 drops",
        "frame 3: answers ['dog', 'bus'], 1 drops",
        "frame 1: its last answer is not marked as the last",
        "frame 9: never sent",
        "the server's count of drops is 5, 1 arrived",
        "the session was over 2 frames before the clip was",
        "it broke",
    ],
)
def test_a_breach_is_named(fault: str) -> None:
    """Each way in which the books may disagree is one fault, and says where."""
    assert break_books(fault).faults() == [fault]


def test_an_answer_given_twice_is_a_breach() -> None:
    """Two ends of one task on one frame are one too many."""
    broken = books()
    broken.answers.insert(0, answer(1, "dog", False))
    assert broken.faults() == ["frame 1: answers ['dog', 'dog', 'bus'], 0 drops"]


# ---------------------------------------------------------------- scene
# Drawings that move, and the truth about them.

SEEDS = (0, 1, 7)
TIMES = tuple(k * 0.37 for k in range(40))
THREE = ("balloon", "bicycle", "dog")


def test_a_seed_is_a_scene() -> None:
    """The same seed gives the same images and truth, another one another scene."""
    one, same, other = (compose(THREE, seed) for seed in (3, 3, 4))
    assert one == same
    assert one.jpeg(1.5) == same.jpeg(1.5)
    assert one.truth(1.5) != other.truth(1.5)


@pytest.mark.parametrize("noun", ALL_NOUNS)
def test_the_truth_is_where_the_pixels_are(noun: str) -> None:
    """What differs from the empty ground is what the truth frames, to two pixels, at any time."""
    scene = compose((noun,), 5)
    empty = np.asarray(Scene(scene.size, ()).image(0))
    for t in TIMES[::7]:
        changed = np.any(np.asarray(scene.image(t)) != empty, axis=2)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        seen = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        true = scene.truth(t)[noun].to_pixels(*scene.size)
        assert np.abs(np.subtract(seen, true)).max() <= 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [(640, 480), (320, 240), (800, 450)])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_things_stay_in_the_image_and_apart(seed: int, size: tuple[int, int], count: int) -> None:
    """No thing leaves the image and none hides another, so that the truth needs no footnote."""
    scene = compose(ALL_NOUNS[:count], seed, size)
    for t in TIMES:
        boxes = list(scene.truth(t).values())
        for box in boxes:
            assert 0 <= box.x_min < box.x_max <= 1
            assert 0 <= box.y_min < box.y_max <= 1
        assert all(overlap(a, b) == 0 for a in boxes for b in boxes if a is not b)


@pytest.mark.parametrize("seed", SEEDS)
def test_things_move(seed: int) -> None:
    """A third of a second makes a box worse, so that lateness has a price to measure."""
    scene = compose(THREE, seed)
    for noun in THREE:
        fits = [overlap(scene.truth(t)[noun], scene.truth(t + 0.33)[noun]) for t in TIMES]
        assert sum(fits) / len(fits) < 0.8


@pytest.mark.parametrize(
    ("nouns", "word"), [(("unicorn",), "unicorn"), (("dog", "dog"), "different"), ((), "one to")]
)
def test_a_scene_that_cannot_be_drawn_is_an_error(nouns: tuple[str, ...], word: str) -> None:
    """The error names what is wrong with the nouns."""
    with pytest.raises(ValueError, match=word):
        compose(nouns, 0)


# ---------------------------------------------------------------- scoring

UNIT = Box(0, 0, 1, 1)
LEFT, RIGHT = Box(0, 0, 0.5, 1), Box(0.5, 0, 1, 1)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (UNIT, UNIT, 1.0),
        (UNIT, LEFT, 0.5),
        (LEFT, RIGHT, 0.0),
        (Box(0, 0, 0.5, 0.5), Box(0.25, 0, 0.75, 0.5), 1 / 3),
        (Box(0.2, 0.2, 0.2, 0.2), Box(0.2, 0.2, 0.2, 0.2), 0.0),
        (Box(0.9, 0.9, 0.1, 0.1), UNIT, 0.0),
    ],
    ids=["same", "half", "side by side", "shifted", "no area", "edges swapped"],
)
def test_overlap(one: Box, other: Box, expected: float) -> None:
    """Intersection over union, the same from both sides, never negative."""
    assert overlap(one, other) == pytest.approx(expected)
    assert overlap(other, one) == pytest.approx(expected)


def test_a_box_is_matched_once() -> None:
    """One box on two true ones finds one of them, and the best pair goes first."""
    assert match([UNIT], [LEFT, UNIT]) == [0.0, 1.0]
    assert match([LEFT, UNIT], [LEFT]) == [1.0]
    assert match([RIGHT, LEFT], [LEFT, RIGHT]) == [1.0, 1.0]


def test_what_is_not_found_counts_nothing() -> None:
    """A missed object scores 0; a box on nothing changes no score."""
    assert match([], [LEFT, RIGHT]) == [0.0, 0.0]
    assert match([RIGHT], [LEFT]) == [0.0]
    assert match([LEFT], []) == []


def test_percentiles_are_values_that_occurred() -> None:
    """Nearest rank: the least value that the share does not exceed."""
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0, 0.0)] == [
        50,
        90,
        99,
        100,
        1,
    ]
    assert percentile([3.0], 0.99) == 3.0


def test_of_nothing_there_is_no_figure() -> None:
    """An empty run gives no number that could be taken for one."""
    assert math.isnan(mean([]))
    assert math.isnan(percentile([], 0.5))
