"""The directory of servers."""

from __future__ import annotations

from legato_ray.directory import MAX_AGE, Directory


def test_replicas_have_to_repeat_themselves() -> None:
    """One that says nothing more is not listed, and neither is one that was dropped."""
    now = 0.0
    directory = Directory(lambda: now)
    directory.put("a", "a-health")
    directory.put("b", "b-health")
    now = MAX_AGE
    directory.put("b", "b-health")
    assert directory.servers() == {"a": "a-health", "b": "b-health"}
    now = MAX_AGE + 0.1
    assert directory.servers() == {"b": "b-health"}
    directory.drop("b")
    directory.drop("never there")
    assert directory.servers() == {}
