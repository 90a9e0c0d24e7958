"""The latency policy of a process."""

import os

import pytest
from legato_engine.errors import InvalidField
from legato_engine.ipc import latency_policy
from legato_engine.ipc.latency_policy import LOW_LATENCY, SHARED, resolve, setting_in


@pytest.mark.parametrize(
    ("setting", "cores", "policy"),
    [
        ("auto", 7, SHARED),
        ("auto", 8, LOW_LATENCY),
        ("low-latency", 1, LOW_LATENCY),
        ("shared", 64, SHARED),
    ],
)
def test_auto_depends_on_the_number_of_cores(monkeypatch, setting, cores, policy):
    """`auto` is low latency with 8 or more cores; the other settings ignore cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    resolve.cache_clear()
    try:
        assert resolve(setting) is policy
    finally:
        resolve.cache_clear()


def test_an_unknown_setting_is_refused():
    """The error names the setting's field."""
    with pytest.raises(InvalidField) as caught:
        latency_policy.resolve("fast")
    assert caught.value.metadata["field"] == "latency_policy"


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ([], "auto"),
        (["serve", "--latency-policy", "shared"], "shared"),
        (["--listen", "x", "--latency-policy=low-latency", "--insecure"], "low-latency"),
        (["--latency", "shared"], "shared"),
        (["--latency-policy", "fast"], "auto"),
        (["--latency-policy"], "auto"),
        (["-q", "--", "--latency-policy", "shared"], "auto"),
    ],
)
def test_the_setting_is_found_before_options_are_parsed(arguments, setting):
    """All forms that the parser of options accepts are found; malformed ones are `auto`."""
    assert setting_in(arguments) == setting
