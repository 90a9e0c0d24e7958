"""What metrics and traces cost a Query, with the null engine.

    python -m benchmarks telemetry

Servers that differ by their options take turns; each turn is a block of calls one after the other.
The figure is the service process's CPU time per call, because other work on the machine moves times
more than telemetry does. A pair is two turns of neighbours; `same` is a second server without
telemetry, whose difference is the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path

import grpc
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_client.cli.demo import LocalServer

from benchmarks import record

_NULL = ("--model", "null", "--log-level", "info")
_SETTLE = 0.03  # seconds
_COLLECTOR = "COLLECTOR"  # stands for its address
SERVERS: dict[str, tuple[str, ...]] = {
    "off": (),
    "same": (),
    "metrics": ("--metrics-listen", "127.0.0.1:0"),
    "traces of 1 %": ("--otlp-endpoint", _COLLECTOR, "--trace-ratio", "0.01"),
    "traces of all": ("--otlp-endpoint", _COLLECTOR),
}


def main(options: Sequence[str]) -> int:
    """Measure and write the record."""
    arguments = _parse(options)
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(_collector())
        callers = {
            name: stack.enter_context(
                _caller([collector if each == _COLLECTOR else each for each in given])
            )
            for name, given in SERVERS.items()
        }
        for caller in callers.values():
            caller.turn(arguments.calls)
        turns = [
            {name: caller.turn(arguments.calls) for name, caller in _order(callers, index)}
            for index in range(arguments.turns)
        ]
    rows = [_row(name, turns) for name in SERVERS]
    heads = ("server", "CPU of a call, us", "more than `off`", "interquartile", "P50, us")
    table = record.table(heads, rows)
    record.write(arguments.name, "Cost of telemetry", {"turns": turns}, [table])
    return 0


class _Caller:
    """Calls one server on a channel of its own."""

    def __init__(self, server: LocalServer, channel: grpc.Channel) -> None:
        self._pid = server.pid
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._request = inference_pb2.QueryRequest(question="what is in the image?")

    def turn(self, calls: int) -> tuple[float, float]:
        """Return the CPU time and the median time of a call, in seconds."""
        before, times = _cpu(self._pid), []
        for _ in range(calls):
            began = time.perf_counter()
            self._stub.Query(self._request)
            times.append(time.perf_counter() - began)
        time.sleep(_SETTLE)  # the last records are written
        return (_cpu(self._pid) - before) / calls, statistics.median(times)


@contextlib.contextmanager
def _caller(options: Sequence[str]) -> Iterator[_Caller]:
    with LocalServer([*_NULL, *options]) as server:
        server.wait_until_serving(60, lambda _: None)
        with grpc.insecure_channel(server.target) as channel:
            yield _Caller(server, channel)


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Run an OpenTelemetry collector that drops everything; its CPU time is not counted."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
        lambda received, context: b""
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    generic = grpc.method_handlers_generic_handler(service, {"Export": handler})
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def _order(callers: dict[str, _Caller], index: int) -> list[tuple[str, _Caller]]:
    """Alternate forwards and backwards, so that no server is always the later one."""
    return list(callers.items())[:: -1 if index % 2 else 1]


def _cpu(pid: int) -> float:
    """CPU seconds of all threads, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _row(name: str, turns: list[dict[str, tuple[float, float]]]) -> tuple[str, ...]:
    differences = [turn[name][0] / turn["off"][0] - 1 for turn in turns]
    low, middle, high = record.quantiles(differences, n=4)
    cpu = statistics.median(turn[name][0] for turn in turns)
    p50 = statistics.median(turn[name][1] for turn in turns)
    spread = f"{low:+.1%} to {high:+.1%}"
    return name, f"{cpu * 1e6:.1f}", f"{middle:+.1%}", spread, f"{p50 * 1e6:.0f}"


def _parse(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks telemetry", description=__doc__)
    parser.add_argument("--name", default="telemetry_query")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--calls", type=int, default=40)
    return parser.parse_args(options)
