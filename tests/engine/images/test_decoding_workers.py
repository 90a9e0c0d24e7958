"""Decoding in processes of their own."""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import structlog
from legato_engine.errors import ImageTooLarge, ImageUndecodable, InternalError
from legato_engine.failpoints import VARIABLE
from legato_engine.images import decoding_workers
from legato_engine.images.decoding import decode_encoded
from legato_engine.images.decoding_workers import DecodingWorkers
from legato_engine.images.headers import inspect
from legato_engine.images.memory import PixelMemory, host_slab, new_pixels
from PIL import Image

from tests.hostile_images import exif_entries, file, many_scans, png, png_chunk, smooth

MAX_PIXELS = 40_000_000
SMALL = file(smooth(40, 30), "PNG")

PARENT = """
import os, time
from legato_engine.images.decoding_workers import DecodingWorkers
workers = DecodingWorkers(max_pixels=1)
workers.start(1)
print(workers.pids[0], flush=True)
time.sleep(3600)
"""


@contextlib.contextmanager
def running(**options):
    """Workers for the length of a block."""
    workers = DecodingWorkers(max_pixels=MAX_PIXELS, **options)
    try:
        yield workers
    finally:
        workers.close()


def decode(workers, data, allocate=new_pixels):
    """Decode a file in a worker."""
    header = inspect(data, max_pixels=MAX_PIXELS, max_bytes=10**8)
    return workers.decode(memoryview(data), header, allocate)


def refusal(workers, data):
    """The error of a file that cannot be decoded."""
    with pytest.raises((ImageTooLarge, ImageUndecodable, InternalError)) as caught:
        decode(workers, data)
    return caught.value


def resident(pid, name="VmRSS:"):
    """A memory count of a process, in bytes."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def exists(pid):
    """Whether a process runs and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def turned(value):
    """An EXIF block."""
    block = Image.Exif()
    block[0x0112] = value
    return block.tobytes()


@pytest.mark.real_start
def test_pixels_are_those_of_this_process():
    """Every kind, mode and orientation, large after small and small after large."""
    image = smooth(160, 120)
    files = [SMALL]
    for kind in ("JPEG", "PNG", "WEBP"):
        files += [file(image, kind, exif=turned(value)) for value in (1, 2, 5, 6, 8)]
    files += [file(smooth(1500, 1000), "PNG"), SMALL, file(smooth(1250, 1000), "WEBP")]
    files += [file(image.convert(mode), "PNG") for mode in ("L", "LA", "RGBA", "P", "1")]
    files += [file(image.convert("CMYK"), "JPEG"), file(image, "JPEG", progressive=True)]
    memory = PixelMemory(host_slab(1 << 22))
    with running() as workers:
        for data in files:
            expected_HWC = decode_encoded(data, max_pixels=MAX_PIXELS)
            assert np.array_equal(decode(workers, data, memory.allocate), expected_HWC)
        assert len(workers.pids) == 1


def test_there_are_as_many_workers_as_callers():
    """Callers at a time have a worker each; callers in turn share one."""
    with running() as workers, concurrent.futures.ThreadPoolExecutor(3) as pool:
        for result in [pool.submit(decode, workers, SMALL) for _ in range(30)]:
            assert result.result().shape == (30, 40, 3)
        assert 1 <= len(workers.pids) <= 3


def test_what_cannot_be_decoded_costs_no_worker():
    """A corrupt file is the caller's mistake, and the same worker takes the next."""
    with running() as workers:
        assert isinstance(refusal(workers, SMALL[:-60]), ImageUndecodable)
        (pid,) = workers.pids
        assert isinstance(refusal(workers, many_scans(300, 80)), ImageTooLarge)
        assert decode(workers, SMALL).shape == (30, 40, 3)
        assert workers.pids == [pid]


@pytest.mark.parametrize("action", ["exit", "kill"])
def test_a_crash_is_of_one_image(monkeypatch, action):
    """A worker that dies of an image fails it, and the next image has a new worker."""
    monkeypatch.setenv(VARIABLE, f"decode.begin={action}")
    with running() as workers:
        error = refusal(workers, SMALL)
        assert isinstance(error, ImageUndecodable)
        assert "decoder" in error.message
        monkeypatch.delenv(VARIABLE)
        assert decode(workers, SMALL).shape == (30, 40, 3)


def test_a_worker_that_is_killed_from_outside_fails_no_image(monkeypatch):
    """The image is decoded by another, whether the first was idle or at work."""
    with running() as workers:
        decode(workers, SMALL)
        os.kill(workers.pids[0], signal.SIGKILL)
        assert decode(workers, SMALL).shape == (30, 40, 3)
    monkeypatch.setenv(VARIABLE, "decode.begin=sleep(3600)")
    with running() as workers, concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(decode, workers, SMALL)
        while not workers.pids:
            time.sleep(0.01)
        monkeypatch.delenv(VARIABLE)
        os.kill(workers.pids[0], signal.SIGKILL)
        assert result.result().shape == (30, 40, 3)


def test_a_worker_that_hangs_is_ended(monkeypatch):
    """Without CPU time a worker has some multiple of its limit."""
    monkeypatch.setenv(VARIABLE, "decode.begin=hang")
    with running(wall_factor=0.5) as workers:
        error = refusal(workers, SMALL)
        assert isinstance(error, ImageTooLarge)
        assert error.metadata["unit"] == "seconds"
        assert workers.pids == []


def test_cpu_time_is_limited(monkeypatch):
    """The kernel ends a worker that computes for too long."""
    monkeypatch.setattr(decoding_workers, "_SECONDS", 0.05)
    monkeypatch.setattr(decoding_workers, "_SECONDS_PER_PIXEL", 0.0)
    with running(wall_factor=1000) as workers:
        error = refusal(workers, file(smooth(4000, 4000), "PNG", compress_level=1))
        assert isinstance(error, ImageTooLarge)
        assert error.metadata == {"field": "image", "limit": "0.05", "unit": "seconds"}


def test_memory_is_limited(monkeypatch):
    """An image that takes more than its share is refused, and the worker lives on."""
    monkeypatch.setattr(decoding_workers, "_BYTES", 8 << 20)
    monkeypatch.setattr(decoding_workers, "_BYTES_PER_PIXEL", 0)
    monkeypatch.setattr(decoding_workers, "_BYTES_PER_BYTE", 0)
    with running() as workers:
        error = refusal(workers, file(smooth(3000, 3000), "PNG", compress_level=1))
        assert isinstance(error, ImageTooLarge)
        assert error.metadata["unit"] == "bytes of memory"
        assert decode(workers, SMALL).shape == (30, 40, 3)


KINDS = ["JPEG", "progressive", "PNG", "WEBP"]
RARE = ["lossless", "I;16", "CMYK"]


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in RARE)]
)
def test_a_large_image_is_within_its_limits(kind):
    """What a format takes for each pixel is allowed for, with its orientation."""
    image = smooth(4000, 3000)
    options: dict[str, dict[str, Any]] = {
        "progressive": {"progressive": True},
        "PNG": {"compress_level": 1},
        "WEBP": {"method": 0},
        "lossless": {"lossless": True, "method": 0},
    }
    form = {"progressive": "JPEG", "CMYK": "JPEG", "lossless": "WEBP", "I;16": "PNG"}.get(
        kind, kind
    )
    if kind == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
    if kind == "CMYK":
        image = image.convert("CMYK")
    with running() as workers:
        data = file(image, form, exif=turned(6), **options.get(kind, {}))
        assert decode(workers, data).shape == (4000, 3000, 3)


def test_memory_of_a_large_image_is_given_back():
    """After an image of 36 megapixels a worker is as small as after a small one."""
    with running() as workers:
        decode(workers, SMALL)
        before = resident(workers.pids[0])
        decode(workers, png(6000, 6000))
        assert resident(workers.pids[0], "VmHWM:") - before > 100 << 20  # the control
        decode(workers, SMALL)
        assert resident(workers.pids[0]) - before < 24 << 20


def test_metadata_cannot_fill_the_memory():
    """Entries that name the same megabytes again and again are never read."""
    with running() as workers:
        decode(workers, SMALL)
        before = resident(workers.pids[0])
        data = png(40, 30, extra=png_chunk(b"eXIf", exif_entries()))
        assert decode(workers, data).shape == (30, 40, 3)
        assert resident(workers.pids[0], "VmHWM:") - before < 100 << 20


def test_a_fault_of_the_worker_is_internal(monkeypatch):
    """What is no fault of the image is not blamed on it."""
    monkeypatch.setenv(VARIABLE, "decode.begin=raise@1")
    with running() as workers:
        assert isinstance(refusal(workers, SMALL), InternalError)
        assert decode(workers, SMALL).shape == (30, 40, 3)


def test_nothing_is_left_after_the_end():
    """Workers and their descriptors go with their owner."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with running() as workers:
        workers.start(2)
        decode(workers, SMALL)
        pids = workers.pids
    for pid in pids:
        while exists(pid):
            time.sleep(0.01)
    del workers
    while len(os.listdir("/proc/self/fd")) > descriptors:  # gRPC of other tests may have had more
        time.sleep(0.01)


def test_a_worker_is_confined(monkeypatch):
    """It has no secret of the server's, no privileges to gain, and a filter of system calls."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    with running() as workers:
        decode(workers, SMALL)
        process = pathlib.Path(f"/proc/{workers.pids[0]}")
        status = dict(line.split(":\t") for line in (process / "status").read_text().splitlines())
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        assert b"secret" not in (process / "environ").read_bytes()
        files = {os.readlink(link).split(":")[0] for link in (process / "fd").iterdir()}
        assert files <= {"/dev/null", "pipe", "socket", "/memfd", f"/proc/{process.name}/statm"}


def test_what_a_library_writes_is_logged(monkeypatch):
    """Warnings of a decoder reach standard error through the log alone, as fields."""
    frames = png(8, 8, extra=png_chunk(b"acTL", bytes(8)))
    with running() as workers, structlog.testing.capture_logs() as events:
        assert decode(workers, frames).shape == (8, 8, 3)
    (event,) = [each for each in events if each["event"] == "image_decoder_stderr"]
    assert "APNG" in event["text"]


@pytest.mark.usefixtures("child_python_path")
def test_workers_die_with_their_parent():
    """A parent that is killed leaves no worker."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert exists(pid)
        parent.kill()
    while exists(pid):
        time.sleep(0.01)


def test_a_worker_loads_neither_torch_nor_the_engine():
    """Its start takes a fraction of a second, and its memory is a fraction of the engine's."""
    script = (
        "import sys, legato_engine.images.decoding_worker as w;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'asyncio', 'legato_engine.engine')))"
    )
    paths = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": paths}
    assert (
        subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0
    )
