"""The hop: what gRPC and the process boundary add to a single request.

The same engine runs twice on one device: in a server, and in this process with its core stepped
directly. An asyncio client and a blocking client call the server, and a bare grpc.aio server that
answers the same bytes at once: its time is gRPC's own part of the hop. Requests alternate in
blocks. The image is known, and sent as bytes or named by its id. Without the hop its bytes are in
shared memory before the clock starts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# First: it sets gRPC's environment, which is read at the first import only.
from legato_client import AsyncClient, CachedImage, Client, QueryResult, Sampling

# isort: split
import grpc
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_client.cli.demo import LocalServer
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.core.assembly import assemble
from legato_engine.core.engine_core import EngineCore
from legato_engine.errors import LegatoError
from legato_engine.images.decoding import content_key, image_id
from legato_engine.ipc.messages import Done, EngineMessage, Failed
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import CachedImageRef as CachedSource
from legato_engine.types import (
    EncodedImage,
    ImageSource,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
)
from msgspec import structs

from benchmarks import record, shared_options
from benchmarks.image.charts import Photographer
from benchmarks.serve.contenders import echo_server
from benchmarks.serve.echo import Answers

START_TIMEOUT = 300.0
QUESTION = "What is there?"
KINDS = ("bytes", "id")  # how the image is given
KV_FRACTION = 0.25  # for each of two engines that load on one device at the same time


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Medians in ms of `calls` requests each, with `tokens` output tokens.

    `through` and `bare` are by the kind of the client: our server, and the bare server.
    """

    picture: str
    tokens: int
    calls: int
    in_process: float
    through: dict[str, float]
    bare: dict[str, float]

    def hop(self, client: str) -> float:
        """Return the milliseconds that gRPC and the other process add."""
        return self.through[client] - self.in_process

    def ours(self, client: str) -> float:
        """Return the part of the hop that is not gRPC's own."""
        return self.hop(client) - self.bare[client]


class InProcess:
    """An engine without its process: the calling thread steps it until a request is done."""

    def __init__(self, arguments: argparse.Namespace, jpeg: bytes) -> None:
        config = model_config(arguments)
        self._assembly = assemble(structs.replace(config, kv_memory_fraction=KV_FRACTION))
        self._store = BlobStore(new_namespace())
        self._jpeg = jpeg
        self._woken = threading.Event()
        self._ended: list[Done | Failed] = []
        self._serial = 0
        self._core: EngineCore = self._assembly.core(
            blobs=BlobReader(self._store.namespace), send=self._receive, wake=self._woken.set
        )

    def ask(self, kind: str, tokens: int) -> tuple[float, int]:
        """Return milliseconds and output tokens of one request.

        Raises:
            LegatoError: The request failed.
        """
        self._serial += 1
        request = Request(
            request_id=RequestKey(f"hop-{self._serial}"),
            task=QuerySpec(question=QUESTION),
            image=self._source(kind),
            sampling=SamplingParams(temperature=0.0, max_tokens=tokens, seed=0),
        )
        self._ended.clear()
        start = time.perf_counter()
        self._core.submit(request)
        while not self._ended:
            if not self._core.busy:
                self._woken.wait()
                self._woken.clear()
            self._core.step()
        milliseconds = (time.perf_counter() - start) * 1e3
        while self._core.busy:
            self._core.step()  # commit the zombie of an ended answer
        return milliseconds, self._output_tokens()

    def _output_tokens(self) -> int:
        (report,) = self._ended
        if isinstance(report, Failed):
            raise LegatoError(report.error.message)
        return report.usage.output_tokens

    def close(self) -> None:
        """Stop the threads and release the device."""
        self._core.close()
        self._store.close()
        self._assembly.device.close()

    def _source(self, kind: str) -> ImageSource:
        if kind == "id":
            return CachedSource(image_id=image_id(content_key(self._jpeg)))
        blob = self._store.put(self._jpeg)
        return EncodedImage(blob=blob, mime_type="image/jpeg")

    def _receive(self, report: EngineMessage) -> None:
        if isinstance(report, Done | Failed):
            self._ended.append(report)


class ByAsyncio:
    """The same requests by an asyncio client of a server."""

    def __init__(self, target: str, jpeg: bytes) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(target)
        self._jpeg = jpeg

    def ask(self, kind: str, tokens: int) -> tuple[float, int]:
        """Return milliseconds and output tokens of one request.

        Raises:
            LegatoError: The request failed.
        """
        return self._runner.run(self._ask(kind, tokens))

    def close(self) -> None:
        """Close the connection."""
        self._runner.run(self._client.close())
        self._runner.close()

    async def _ask(self, kind: str, tokens: int) -> tuple[float, int]:
        image, sampling = _image(kind, self._jpeg), _sampling(tokens)
        start = time.perf_counter()
        answer = await self._client.query(image, QUESTION, sampling=sampling)
        return (time.perf_counter() - start) * 1e3, _tokens_of(answer)


class Blocking:
    """The same requests by a blocking client, whose own thread waits for the answer."""

    def __init__(self, target: str, jpeg: bytes) -> None:
        self._client = Client(target)
        self._jpeg = jpeg

    def ask(self, kind: str, tokens: int) -> tuple[float, int]:
        """Do as `ByAsyncio.ask`."""
        image, sampling = _image(kind, self._jpeg), _sampling(tokens)
        start = time.perf_counter()
        answer = self._client.query(image, QUESTION, sampling=sampling)
        return (time.perf_counter() - start) * 1e3, _tokens_of(answer)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


CLIENTS: dict[str, type[ByAsyncio] | type[Blocking]] = {"asyncio": ByAsyncio, "blocking": Blocking}


def _image(kind: str, jpeg: bytes) -> CachedImage | bytes:
    return CachedImage(image_id(content_key(jpeg))) if kind == "id" else jpeg


def _sampling(tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=tokens, seed=0)


def _tokens_of(answer: QueryResult) -> int:
    assert answer.info.usage is not None, "every answer counts its tokens"
    return answer.info.usage.output_tokens


Ask = Callable[[str, int], tuple[float, int]]


def compare(asks: Mapping[str, Ask], kind: str, tokens: int, calls: int, block: int) -> Row:
    """Send `calls` requests each way, in alternating blocks; a block's first is not counted.

    The ways are `inside`, and for each client `through CLIENT` and `bare CLIENT`.
    """
    times: dict[str, list[float]] = {name: [] for name in asks}
    seen: set[int] = set()
    while len(times["inside"]) < calls:
        for name, ask in asks.items():
            ask(kind, tokens)
            for _ in range(block):
                milliseconds, produced = ask(kind, tokens)
                times[name].append(milliseconds)
                if not name.startswith("bare"):
                    seen.add(produced)
    if len(seen) != 1:
        raise ValueError(f"answers of different lengths cannot be compared: {sorted(seen)} tokens")
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    return Row(
        picture=kind,
        tokens=seen.pop(),
        calls=len(times["inside"]),
        in_process=medians["inside"],
        through={client: medians[f"through {client}"] for client in CLIENTS},
        bare={client: medians[f"bare {client}"] for client in CLIENTS},
    )


def main(argv: Sequence[str]) -> int:
    """Measure images as bytes and by id at 1 and 3 tokens, and record."""
    arguments = _parse(argv)
    jpeg = Photographer(0, max(arguments.width, arguments.height)).jpeg(
        0, (arguments.width, arguments.height)
    )
    serve = _serve_options(arguments)
    with LocalServer(serve) as server, contextlib.ExitStack() as running:
        inside = running.enter_context(contextlib.closing(InProcess(arguments, jpeg)))
        server.wait_until_serving(START_TIMEOUT, lambda _: None)
        bare = running.enter_context(echo_server(_answers(server.target)))
        asks: dict[str, Ask] = {"inside": inside.ask}
        for way, target in (("through", server.target), ("bare", bare.target)):
            for name, kind in CLIENTS.items():
                client = running.enter_context(contextlib.closing(kind(target, jpeg)))
                asks[f"{way} {name}"] = client.ask
        for ask in asks.values():
            ask("bytes", 1)  # from here on the image is known
        rows = [
            compare(asks, kind, tokens, arguments.calls, arguments.block)
            for kind in KINDS
            for tokens in arguments.tokens
        ]
    figures = {
        "serve": serve,
        "size": (arguments.width, arguments.height),
        "jpeg_bytes": len(jpeg),
        "rows": [
            dataclasses.asdict(row)
            | {"hop_ms": row.hop("asyncio"), "hop_blocking_ms": row.hop("blocking")}
            for row in rows
        ],
    }
    times = ("through gRPC, P50 ms", "in process", "hop ms", "of it a bare server", "ours")
    heads = ("image as", "tokens", "client", *times, "calls")
    cells = [
        [
            *(row.picture, row.tokens, name),
            *(f"{value:.2f}" for value in (row.through[name], row.in_process, row.hop(name))),
            *(f"{value:.2f}" for value in (row.bare[name], row.ours(name))),
            row.calls,
        ]
        for row in rows
        for name in CLIENTS
    ]
    title = f"The hop: a known image, one caller: {' '.join(serve)}"
    record.write(arguments.name, title, figures, [record.table(heads, cells)])
    return 0


def _answers(target: str) -> Answers:
    """Return the bare server's answers: one answer of ours."""
    with grpc.insecure_channel(target) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.QueryRequest(question=QUESTION)
        request.sampling.max_tokens = 3
        return Answers({"Query": stub.Query(request).SerializeToString()}, {})


def _serve_options(arguments: argparse.Namespace) -> list[str]:
    options = ["--device", arguments.device, "--model", arguments.model, "--dtype", arguments.dtype]
    for name in ("weights", "tokenizer"):
        if getattr(arguments, name):
            options += [f"--{name}", getattr(arguments, name)]
    if arguments.random_weights:
        options.append("--random-weights")
    options += ["--kv-memory-fraction", str(KV_FRACTION)]
    return [*options, "--threads", str(arguments.threads)]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks hop", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="hop", help="of the record")
    parser.add_argument("--width", type=int, default=850)
    parser.add_argument("--height", type=int, default=600)
    parser.add_argument("--calls", type=int, default=200, help="each way, per row")
    parser.add_argument("--block", type=int, default=10, help="counted requests in a row")
    parser.add_argument("--tokens", type=shared_options.numbers, default=[1, 3], help="e.g. 1,3")
    return parser.parse_args(argv)
