"""What all tests share."""

import gc
import os
import socket

import pytest
from hypothesis import settings

from tests import shared
from tests.fork_server.popen import ForkingStarts

WAITING = ("tests/simulation/", "tests/faults/", "tests/e2e/")
"""Folders of long files, most of which wait for servers most of the time."""

RUN_ONCE = (
    "tests/contract/",
    "tests/docs/",
    "tests/emulator/",
    "tests/engine/core/",
    "tests/engine/kernels/",
    "tests/engine/kv_cache/",
    "tests/engine/layers/",
    "tests/engine/models/",
    "tests/megakernel_model/",
    "tests/engine/runtime/",
    "tests/engine/scheduler/",
    "tests/engine/speculative/",
    "tests/service/test_convert.py",
    "tests/simulation/",
    "training/tests/",
)
"""Folders of tests that never run a second time: they wait for no clock and no other process, or
they compare bits, where a failure that does not repeat is a defect."""

BITS = (
    "tests/engine/core/test_memory.py",
    "tests/engine/kernels/cpu/test_decoder.py",
    "tests/engine/kernels/test_operations.py",
    "tests/engine/kernels/test_experts.py",
    "tests/engine/kernels/test_sampling_spec.py",
    "tests/engine/layers/",
    "tests/engine/models/decoder/test_engine.py",
    "tests/engine/models/test_decoders.py",
    "tests/engine/models/moondream/test_adapters.py",
    "tests/engine/models/moondream/test_model.py",
    "tests/engine/models/moondream/test_moondream3.py",
    "tests/engine/runtime/test_loops.py",
    "tests/engine/runtime/test_draft_model.py",
    "tests/engine/runtime/test_kv_pool.py",
    "tests/engine/runtime/test_kernel_backend.py",
    "tests/engine/runtime/test_sampler.py",
    "tests/engine/speculative/test_speculation.py",
    "tests/published/",
)
"""Tests that compare bits of the CPU's operations, which torch computes with the vectors that the
processor has: CI runs them with those of other processors too. They have the mark `bits`."""

_starts = ForkingStarts()
_MAY_FORK = os.environ.get("LEGATO_TEST_STARTS") != "execute"

settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing
settings.load_profile("untimed")


def pytest_configure(config):
    """Begin what all processes share, in the one that starts them."""
    if not hasattr(config, "workerinput"):
        shared.begin()


def pytest_unconfigure(config):
    """End it."""
    if not hasattr(config, "workerinput"):
        shared.end()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node, error):
    """End the run when a worker dies: with `loadfile`, xdist waits for ever after replacing one.

    Its option against replacements succeeds without a worker's tests if it died between two.
    """
    if error:
        pytest.exit(f"worker {node.gateway.id} died: {error}", returncode=1)


def pytest_sessionstart(session):
    """Have what a process tells of each test for its reruns leave at once.

    pytest-rerunfailures sends it in small writes, of which each would wait for the acknowledgement
    of the one before: 40 ms for every test.
    """
    channel = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if channel is not None:
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Spare thousands of modules and tests the collections of garbage, each of half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fork servers and engines, except in tests that start them as users do."""
    real = any(item.get_closest_marker(name) for name in ("real_start", "slow"))
    _starts.active = _MAY_FORK and not real
    return (yield)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(items):
    """Spread files that wait among those that compute, so that cores are busy; none comes last.

    A test of `RUN_ONCE` runs once, whatever `--reruns` says.
    """
    files = list(dict.fromkeys(_file(item) for item in items))
    for item in items:
        if item.nodeid.startswith(RUN_ONCE):
            item.add_marker(pytest.mark.flaky(reruns=0))
        if item.nodeid.startswith(BITS):
            item.add_marker(pytest.mark.bits)
    waiting = [file for file in files if file.startswith(WAITING)]
    computing = [file for file in files if not file.startswith(WAITING)]
    ranks = {file: 0.8 * number / len(waiting) for number, file in enumerate(waiting)}
    ranks |= {file: number / len(computing) for number, file in enumerate(computing)}
    items.sort(key=lambda item: ranks[_file(item)])


def _file(item):
    return item.nodeid.partition("::")[0]
