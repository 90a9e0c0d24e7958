"""What all tests share."""

from hypothesis import settings

WAITING = ("tests/simulation/", "tests/faults/", "tests/e2e/")
"""Folders of long files, most of which wait for servers most of the time."""

settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing
settings.load_profile("untimed")


def pytest_collection_modifyitems(items):
    """Spread files that wait among those that compute, so that cores are busy; none comes last."""
    files = list(dict.fromkeys(_file(item) for item in items))
    waiting = [file for file in files if file.startswith(WAITING)]
    computing = [file for file in files if not file.startswith(WAITING)]
    ranks = {file: 0.8 * number / len(waiting) for number, file in enumerate(waiting)}
    ranks |= {file: number / len(computing) for number, file in enumerate(computing)}
    items.sort(key=lambda item: ranks[_file(item)])


def _file(item):
    return item.nodeid.partition("::")[0]
