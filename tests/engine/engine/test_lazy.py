"""Values computed on first use."""

import threading

import pytest
from legato_engine.core.preprocessor import Lazy


def test_the_first_thread_computes():
    """A second thread waits for the first, and both get the same value."""
    begun, go = threading.Event(), threading.Event()
    computed: list[object] = []
    got: list[object] = []

    def compute() -> object:
        begun.set()
        assert go.wait(30)
        computed.append(object())
        return computed[-1]

    lazy: Lazy[object] = Lazy(compute)
    threads = [threading.Thread(target=lambda: got.append(lazy.get())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    seen = [lazy.is_computed]
    go.set()
    for thread in threads:
        thread.join()
    assert [*seen, lazy.is_computed] == [False, True]
    assert got == computed * 2


def test_a_failed_computation_is_repeated():
    """An error is raised to the caller of `get`; the next call computes again."""
    lazy = Lazy(iter([7]).__next__)
    nothing: list[int] = []
    late = Lazy(iter(nothing).__next__)
    for _ in range(2):
        with pytest.raises(StopIteration):
            late.get()
        assert lazy.get() == 7
