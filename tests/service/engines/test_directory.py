"""What engines hold."""

from legato_service.engines.group import Directory

A, B = ("a",), ("b",)


def test_a_key_has_the_engines_that_were_noted():
    """Several may hold one, and a key without any is left out."""
    directory = Directory()
    directory.note((A, B), 0)
    directory.note((A,), 3)
    assert list(directory.holders((("none",), B, A))) == [{0}, {0, 3}]


def test_a_lost_engine_holds_nothing():
    """Keys that no engine holds any more are gone."""
    directory = Directory()
    directory.note((A, B), 0)
    directory.note((A,), 1)
    directory.forget(0)
    assert list(directory.holders((A, B))) == [{1}]
    assert len(directory) == 1


def test_the_least_recently_noted_are_dropped():
    """The memory of a process that sees new images all day stays bounded."""
    directory = Directory(max_keys=2)
    for key in ("a", "b", "a", "c"):
        directory.note(((key,),), 1)
    assert list(directory.holders((A, B, ("c",)))) == [{1}, {1}]
    assert len(directory) == 2
