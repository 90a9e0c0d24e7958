"""Servers that cannot start, what killed ones leave behind, and logs that take no lines."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import legato_tiny
import pytest
import safetensors.torch
from legato.v1 import inference_pb2, inference_pb2_grpc

from tests.e2e.scenes import two_shapes
from tests.e2e.server import ENVIRONMENT, Server, children, exists, until
from tests.engine.models.gguf import gguf_files

# ---------------------------------------------------------------- unservable
# A configuration that cannot be served is told once, and the server leaves.


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        (("--model", "moondream2", "--weights", "."), "tokenizer", "needs a tokenizer.json"),
        (("--weights", "."), "weights", "no config.json"),
        (("--weights", "nowhere"), "weights", "no such file or folder: nowhere"),
        (("--model", "smollm2-135m", "--models", "."), "weights", "`legato pull smollm2-135m`"),
        pytest.param(
            ("--adapters", os.devnull), "adapters", "is not a folder", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--refiner", os.devnull),
            "refiner",
            "legato-tiny takes no refiner",
            marks=pytest.mark.slow,
        ),
        (
            ("--model", "random-tiny3", "--refiner", os.devnull),
            "refiner",
            "null cannot be read",
        ),
    ],
)
def test_what_cannot_be_served_is_said_once(
    tmp_path: Path, options: tuple[str, ...], field: str | None, reason: str
) -> None:
    """One line names the setting and what is wrong; no stack, no second engine, exit code 78."""
    refused_once(tmp_path, options, field, reason)


def refused_once(
    tmp_path: Path,
    options: tuple[str, ...],
    field: str | None,
    reason: str,
    environment: dict[str, str] = ENVIRONMENT,
) -> None:
    """Start a server that must say this once and exit."""
    ended = subprocess.run(
        [sys.executable, "-m", "legato_service", "--listen", "127.0.0.1:0", *options],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == os.EX_CONFIG
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    (refusal,) = [line for line in lines if line["event"] == "configuration_rejected"]
    assert reason in refusal["reason"]
    assert refusal.get("field") == field
    loading = [line["stage"] for line in lines if line["event"] == "loading"]
    assert len({*loading}) == len(loading), "it seems to start again"
    assert "Traceback" not in ended.stderr
    assert "engine_lost" not in ended.stderr


@pytest.mark.slow
def test_a_bad_tokenizer_is_said_once(tmp_path: Path) -> None:
    """The line names the file."""
    (tmp_path / "bad.json").write_text("[]")
    reason = "bad.json is not a byte-level tokenizer"
    refused_once(tmp_path, ("--tokenizer", "bad.json"), "tokenizer", reason)


@pytest.mark.slow
def test_weights_that_are_not_finite_are_said_once(tmp_path: Path) -> None:
    """The line names the tensor and the file."""
    folder = tmp_path / "damaged"
    shutil.copytree(legato_tiny.path(), folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    name = max(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[-1] = float("nan")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    reason = f"{name} in {folder / 'model.safetensors'} holds numbers that are not finite"
    refused_once(tmp_path, ("--weights", str(folder)), "weights", reason)


def test_too_little_memory_is_said_once(tmp_path: Path) -> None:
    """The line says how much is needed and how much there is."""
    options = ("--max-running", "50000000")
    refused_once(tmp_path, options, "max_running", "the KV cache needs")


def test_a_long_temporary_folder_is_said_once(tmp_path: Path) -> None:
    """Its sockets could not be reached."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    environment = {**ENVIRONMENT, "TMPDIR": str(folder)}
    refused_once(tmp_path, ("--model", "null"), "TMPDIR", "set TMPDIR to a shorter", environment)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_damaged_gguf_is_said_once(tmp_path: Path) -> None:
    """One engine, one line, no crash bundle."""
    gguf_files.write_small(tmp_path / "model.gguf", {"tokenizer.ggml.merges": ["no pair"]})
    options = ("--weights", "model.gguf", "--crash-folder", str(tmp_path / "crashes"))
    refused_once(tmp_path, options, "tokenizer", "the tokenizer of model.gguf cannot be read")
    assert not (tmp_path / "crashes").exists()


# ---------------------------------------------------------------- leftovers
# What a killed server left behind is removed by the next one.

WITHOUT_SHARED_MEMORY = """
import os
access = os.access
os.access = lambda path, mode: str(path) != "/dev/shm" and access(path, mode)
"""


@pytest.fixture
def own_temporary():
    """A temporary folder where these servers keep blobs, too: no other test's server sweeps it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="legato-"))  # short, for the sockets' paths
    (folder / "sitecustomize.py").write_text(WITHOUT_SHARED_MEMORY)
    yield folder
    shutil.rmtree(folder)


def owned(pid, folder):
    """The lock files that a process holds, and the blobs in `folder` that it named."""
    links = (link.resolve() for link in pathlib.Path(f"/proc/{pid}/fd").iterdir())
    locks = [path for path in links if path.name.endswith("lock")]
    return [*locks, *folder.glob(f"legato-{pid}-*")]


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_killed_server_leaves_nothing_for_good(tmp_path, own_temporary, processes):
    """Its blobs and sockets are there until another one starts; a live server's stay."""
    folders = [tmp_path / name for name in ("live", "killed", "next")]
    for folder in folders:
        folder.mkdir()
    options = ("--model", "null", "--processes", processes)
    path = os.pathsep.join((str(own_temporary), ENVIRONMENT["PYTHONPATH"]))
    environment = {"TMPDIR": str(own_temporary), "PYTHONPATH": path}
    with Server(folders[0], *options, environment=environment) as live:
        killed = Server(folders[1], *options, environment=environment)
        killed.__enter__()
        found = owned(killed.process.pid, own_temporary)
        assert len(found) == 2  # of the blobs and of the sockets
        namespace = next(path.name for path in found if path.parent == own_temporary)
        blobs = [own_temporary / f"{namespace[1:-5]}-{part}x" for part in ("", "1-")]
        for blob in blobs:
            blob.write_bytes(b"left")
            blob.chmod(0o600)
        started = children(killed.process.pid)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        killed.channel.close()
        until(lambda: not any(exists(pid) for pid in started))
        assert all(path.exists() for path in (*found, blobs[0]))  # a worker may remove its own
        held = owned(live.process.pid, own_temporary)
        with Server(folders[2], *options, environment=environment) as another:
            assert not any(path.exists() for path in (*found, *blobs))
            (told,) = another.wait_for("leftovers_removed")
            assert told["blobs"] >= 1
            assert all(path.exists() for path in held)
            assert live.is_serving()
        folder = next(path.parent for path in found if path.parent != own_temporary)
        assert folder.parent == own_temporary
        assert not folder.exists()
    assert not any(path.exists() for path in held)


# ---------------------------------------------------------------- log sinks
# A log that takes no lines delays no call and ends no process.

REQUEST = inference_pb2.DetectRequest(image=two_shapes().message(), object="red circle")


@contextlib.contextmanager
def full_pipe():
    """The writing end of a full pipe that nothing reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    try:
        yield {"stderr": writing}
    finally:
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def full_device():
    """A device that refuses every write."""
    with open("/dev/full", "wb") as file:
        yield {"stderr": file}


@contextlib.contextmanager
def closed():
    """No standard error."""
    yield {"preexec_fn": lambda: os.close(2)}


def answered(stub):
    """Whether the server answers; it may be starting."""
    try:
        return len(stub.Detect(REQUEST, timeout=10).objects) > 0
    except grpc.RpcError:
        return False


def free_address():
    """An address of which no log line has to tell, with a port that the kernel gives no other."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        address = ("127.0.0.1", random.randrange(lowest // 2, lowest))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return "{}:{}".format(*address)


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "stderr", [full_pipe, pytest.param(full_device, marks=pytest.mark.slow), closed]
)
def test_a_server_whose_log_takes_no_lines_serves_and_drains(stderr, processes):
    """It answers more calls than the log's pipe has lines, and SIGTERM ends it with code 0."""
    address = free_address()
    command = [sys.executable, "-m", "legato_service", "--model", "null", "--listen", address]
    with stderr() as streams:
        process = subprocess.Popen(
            [*command, "--processes", processes],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            **streams,
        )
        try:
            with grpc.insecure_channel(address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                while not answered(stub):
                    assert process.poll() is None
                    time.sleep(0.1)
                for _ in range(10):
                    calls = [stub.Detect.future(REQUEST) for _ in range(100)]
                    assert all(call.result().objects for call in calls)
            started = children(process.pid)
            assert started
            process.terminate()
            assert process.wait() == 0
            assert not any(exists(pid) for pid in started)
        finally:
            process.kill()
            process.wait()
