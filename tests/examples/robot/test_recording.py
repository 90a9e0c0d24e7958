"""The books of a session, from both sides."""

from __future__ import annotations

import pytest

from examples.robot.recording import Answer, Drop, Recording, Sent

NOUNS = ("dog", "bus")


def answer(sequence: int, noun: str, is_last: bool) -> Answer:
    """An answer without boxes."""
    return Answer(sequence, noun, (), 1.0, is_last)


def books() -> Recording:
    """Three frames: answered, dropped, answered."""
    return Recording(
        NOUNS,
        3,
        sent=[Sent(n, n / 30, n / 30) for n in (1, 2, 3)],
        answers=[answer(n, noun, noun == "bus") for n in (1, 3) for noun in NOUNS],
        drops=[Drop(2, "superseded", 1.0, 1)],
    )


def test_whole_books_have_no_fault() -> None:
    """Every frame answered for every task or dropped once: nothing to say."""
    assert books().faults() == []
    assert books().reasons() == {"superseded": 1}
    assert Recording(NOUNS, 0).faults() == []


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
