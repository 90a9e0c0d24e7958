"""What Envoy adds to a call, with the null engine.

    python -m benchmarks mesh

One server is asked directly and through Envoy with the shipped configuration, in turn; a turn is a
block of calls one after the other. A figure is the median of the turns' medians, beside the
quartiles of the turns. `pip install -e ".[mesh]"` brings Envoy.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
from legato.v1 import inference_pb2, inference_pb2_grpc, media_pb2, task_pb2
from legato_client.cli.demo import LocalServer
from legato_ray.endpoints import EndpointFile

from benchmarks import record
from benchmarks.image.charts import CHART, jpegs

_ROOT = Path(__file__).parents[2]
_ENVOY = Path(sys.executable).with_name("envoy")
_DESCRIPTOR = _ROOT / "proto/gen/legato/v1/descriptor.binpb"
_QUESTION = "How many?"
_IMAGE_BYTES = 100_000
_WAYS = ("direct", "Envoy")

Call = Callable[[inference_pb2_grpc.InferenceServiceStub], Iterator[object]]
"""Returns when the answer has begun; the rest is read outside of the time."""
Turns = list[dict[str, float]]


def main(options: Sequence[str]) -> int:
    """Measure and write the record."""
    arguments = _parse(options)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(LocalServer(["--model", "null", "--log-level", "warning"]))
        server.wait_until_serving(60, lambda _: None)
        envoy = stack.enter_context(_envoy(server.target))
        targets = dict(zip(_WAYS, (server.target, envoy), strict=True))
        stubs = {name: stack.enter_context(_stub(target)) for name, target in targets.items()}
        calls = {"text": _text(), "100 kB of image": _image(), "Generate, first message": _stream()}
        figures = {
            name: _measure(stubs, call, arguments.turns, arguments.calls)
            for name, call in calls.items()
        }
    heads = ("call, one at a time, P50", "direct, ms", "through Envoy, ms", "added, ms")
    table = record.table(heads, [_row(name, turns) for name, turns in figures.items()])
    record.write(arguments.name, "What Envoy adds to a call", {"turns": figures}, [table])
    return 0


# ---------------------------------------------------------------- calls


def _text() -> Call:
    request = inference_pb2.QueryRequest(question=_QUESTION)
    return lambda stub: iter([stub.Query(request)])


def _image() -> Call:
    """Make a call with an image whose last bytes only travel: decoders stop at its end."""
    (file,) = jpegs(CHART, 1, (64, 48))
    data = file + os.urandom(_IMAGE_BYTES - len(file))
    image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))
    request = inference_pb2.QueryRequest(question=_QUESTION, image=image)
    return lambda stub: iter([stub.Query(request)])


def _stream() -> Call:
    """One word, so that little follows the message that is waited for."""
    task = task_pb2.Task(query=task_pb2.QueryTask(question=_QUESTION))
    task.sampling.max_tokens = 1
    request = inference_pb2.GenerateRequest(task=task)

    def begin(stub: inference_pb2_grpc.InferenceServiceStub) -> Iterator[object]:
        events = iter(stub.Generate(request))
        assert next(events).started.model
        return events

    return begin


# ---------------------------------------------------------------- measuring


def _measure(
    stubs: dict[str, inference_pb2_grpc.InferenceServiceStub], call: Call, turns: int, calls: int
) -> Turns:
    """Measure the median of each turn, in milliseconds; the first turn warms up."""
    found = [
        {name: _median(stub, call, calls) for name, stub in _order(stubs, index)}
        for index in range(turns + 1)
    ]
    return found[1:]


def _median(stub: inference_pb2_grpc.InferenceServiceStub, call: Call, calls: int) -> float:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        rest = call(stub)
        times.append(time.perf_counter() - began)
        collections.deque(rest, maxlen=0)
    return statistics.median(times) * 1e3


def _order(
    stubs: dict[str, inference_pb2_grpc.InferenceServiceStub], index: int
) -> list[tuple[str, inference_pb2_grpc.InferenceServiceStub]]:
    """Alternate forwards and backwards, so that no way is always the later one."""
    return list(stubs.items())[:: -1 if index % 2 else 1]


def _row(name: str, turns: Turns) -> tuple[str, ...]:
    columns = [[turn[way] for turn in turns] for way in _WAYS]
    columns.append([turn["Envoy"] - turn["direct"] for turn in turns])
    return name, *map(_spread, columns)


def _spread(values: list[float]) -> str:
    low, middle, high = record.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


# ---------------------------------------------------------------- the two ways


@contextlib.contextmanager
def _stub(target: str) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    with grpc.insecure_channel(target) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


@contextlib.contextmanager
def _envoy(server: str) -> Iterator[str]:
    """Run an Envoy in front of the server, on a port that the kernel chooses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        EndpointFile(folder).write([server])
        admin, config = folder / "admin", folder / "envoy.yaml"
        render = [sys.executable, str(_ROOT / "deploy/envoy/render.py")]
        render += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        render += ["--endpoints", name, "--descriptor", str(_DESCRIPTOR)]
        config.write_bytes(subprocess.run(render, capture_output=True, check=True).stdout)
        command = [str(_ENVOY), "-c", str(config), "--admin-address-path", str(admin)]
        command += ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
            try:
                yield _address(process, admin)
            finally:
                process.kill()


def _address(process: subprocess.Popen[bytes], admin: Path) -> str:
    """Wait until it listens and has checked the server's health."""
    while process.poll() is None:
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            base = f"http://{admin.read_text()}"
            with urllib.request.urlopen(f"{base}/ready", timeout=10) as ready:
                is_live = ready.read().strip() == b"LIVE"
            with urllib.request.urlopen(f"{base}/listeners", timeout=10) as listeners:
                if is_live:  # "legato::127.0.0.1:41234"
                    return str(listeners.read(), "utf-8").split("::")[1].strip()
    raise RuntimeError(f"Envoy ended with {process.returncode}")


def _parse(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks mesh", description=__doc__)
    parser.add_argument("--name", default="mesh")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--calls", type=int, default=150)
    return parser.parse_args(options)
