"""Values made once."""

import threading

import pytest
from legato_engine.engine.once import Once


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

    once: Once[object] = Once(make)
    threads = [threading.Thread(target=lambda: got.append(once.get())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    seen = [once.made]
    go.set()
    for thread in threads:
        thread.join()
    assert [*seen, once.made] == [False, True]
    assert got == made * 2


def test_what_could_not_be_made_is_tried_again():
    """An error is the asker's; the next one makes it."""
    once = Once(iter([7]).__next__)
    nothing: list[int] = []
    late = Once(iter(nothing).__next__)
    for _ in range(2):
        with pytest.raises(StopIteration):
            late.get()
        assert once.get() == 7
