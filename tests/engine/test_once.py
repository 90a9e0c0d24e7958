"""Values made once."""

import threading

import pytest
from legato_engine.once import Once


def test_whoever_asks_first_makes_it():
    """A second thread waits for the one that makes it, and both have the same."""
    begun, go = threading.Event(), threading.Event()
    made: list[object] = []
    got: list[object] = []

    def make() -> object:
        begun.set()
        assert go.wait(30)
        made.append(object())
        return made[-1]

    once = Once(make)
    threads = [threading.Thread(target=lambda: got.append(once.get())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    assert not once.made
    go.set()
    for thread in threads:
        thread.join()
    assert once.made
    assert got == made * 2


def test_what_could_not_be_made_is_tried_again():
    """An error is the asker's; the next one makes it."""
    answers = iter([ValueError("not yet"), 7])

    def make() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    once = Once(make)
    with pytest.raises(ValueError, match="not yet"):
        once.get()
    assert (once.get(), once.get()) == (7, 7)
