"""What all tests share."""

from hypothesis import settings

LONG = ("tests/simulation/", "tests/faults/", "tests/e2e/")

settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing
settings.load_profile("untimed")


def pytest_collection_modifyitems(items):
    """Long files first, so that no process has one left when the others are done."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
