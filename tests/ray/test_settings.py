"""The settings of the Ray application."""

from __future__ import annotations

import pytest
from legato_ray.settings import InvalidSettings, Settings


def test_words_and_values_are_read() -> None:
    """As `serve run` gives them, and as a configuration file does."""
    words = {"serve_options": "--model null", "num_replicas": "2", "queue_seconds": "0.5"}
    values = {"serve_options": ["--model", "null"], "num_replicas": 2, "queue_seconds": 0.5}
    assert Settings.of(words) == Settings.of(values)
    assert Settings.of(words).max_replicas == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 2}, "no setting 'replicas'"),
        ({"num_replicas": "two"}, "num_replicas must be of type int, got 'two'"),
        ({"num_replicas": 0}, "num_replicas must be positive, got 0"),
        ({"queue_seconds": -1}, "queue_seconds must be positive"),
        ({"num_replicas": 3, "max_replicas": 2}, "max_replicas 2 is below num_replicas 3"),
        ({"serve_options": "--listen 1.2.3.4:5"}, "must leave out --listen"),
        ({"serve_options": "--drain-grace=5"}, "must leave out --drain-grace"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, object], message: str) -> None:
    """With the name of the setting."""
    with pytest.raises(InvalidSettings, match=message):
        Settings.of(values)
