"""What credentials and TLS add to a call: one server without a model for each way, in turns."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# First: it sets gRPC's environment, which is read at the first import only.
import legato_client  # noqa: F401

# isort: split
import grpc
import numpy as np
import trustme
from legato.v1 import inference_pb2, inference_pb2_grpc, media_pb2
from legato_client.cli.demo import LocalServer
from PIL import Image

from benchmarks import record

START_TIMEOUT = 60.0
WAYS = ("open", "token", "tls", "tls, token", "mtls")
BASE = WAYS[0]


def main(argv: Sequence[str]) -> int:
    """Measure every way with a small request and with an image, and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks access", description=__doc__)
    parser.add_argument("--blocks", type=int, default=300, help="of calls, each way in turn")
    parser.add_argument("--calls", type=int, default=10, help="of a block")
    arguments = parser.parse_args(argv)
    requests = {
        "question": inference_pb2.QueryRequest(question="What is there?"),
        "image": inference_pb2.QueryRequest(question="What is there?", image=_image()),
    }
    size = requests["image"].ByteSize()
    with contextlib.ExitStack() as stack:
        stubs = _start(stack)
        figures: dict[str, Any] = {
            kind: _compare(stubs, request, arguments.blocks, arguments.calls)
            for kind, request in requests.items()
        }
    rows = [
        [kind, way, f"{each['p10_ms']:.3f}", f"{each['added_us']:+.0f}", f"{each['p50_ms']:.3f}"]
        for kind, ways in figures.items()
        for way, each in ways.items()
    ]
    heads = ("request", "way", "P10 ms", "added us at P10", "P50 ms")
    note = f"{arguments.blocks} blocks of {arguments.calls} calls; the image has {size} bytes."
    figures["image_bytes"] = size
    record.write("access", "Credentials and TLS", figures, [record.table(heads, rows), "", note])
    return 0


def _image() -> media_pb2.Image:
    noise = np.random.default_rng(0).integers(0, 256, (840, 1100, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(noise).save(data, "JPEG", quality=68)
    return media_pb2.Image(encoded=media_pb2.EncodedImage(data=data.getvalue()))


def _start(stack: contextlib.ExitStack) -> dict[str, Any]:
    """Make a stub of each way, with its metadata."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    authority = trustme.CA()
    server, client = authority.issue_cert("localhost", "127.0.0.1"), authority.issue_cert("a.b")
    paths = {name: folder / name for name in ("cert", "key", "ca", "tokens")}
    server.cert_chain_pems[0].write_to_path(str(paths["cert"]))
    server.private_key_pem.write_to_path(str(paths["key"]))
    authority.cert_pem.write_to_path(str(paths["ca"]))
    secret = secrets.token_urlsafe(32)
    paths["tokens"].write_text(
        '[[credential]]\nid = "a"\ntenant = "t"\nscopes = ["infer"]\n'
        f'sha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n'
    )
    root = authority.cert_pem.bytes()
    pair = (client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes())
    tls = ["--tls-cert", str(paths["cert"]), "--tls-key", str(paths["key"])]
    tokens = ["--tokens", str(paths["tokens"])]
    options = {
        "open": ([], None),
        "token": (tokens, None),
        "tls": (tls, grpc.ssl_channel_credentials(root)),
        "tls, token": (tls + tokens, grpc.ssl_channel_credentials(root)),
        "mtls": (
            [*tls, "--tls-client-ca", str(paths["ca"])],
            grpc.ssl_channel_credentials(root, *pair),
        ),
    }
    stubs = {}
    for way, (serve, credentials) in options.items():
        server_process = stack.enter_context(LocalServer(["--model", "null", *serve]))
        target = server_process.target.replace("127.0.0.1", "localhost")
        channel = (
            grpc.insecure_channel(target)
            if credentials is None
            else grpc.secure_channel(target, credentials)
        )
        stack.enter_context(channel)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer legato_a_{secret}"),) if "token" in way else ()
        stubs[way] = (stub, metadata)
    return stubs


def _wait_until_answered(stub: Any, metadata: Any, request: inference_pb2.QueryRequest) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            stub.Query(request, metadata=metadata, wait_for_ready=True, timeout=START_TIMEOUT)
        except grpc.RpcError as error:
            starting = error.code() is grpc.StatusCode.UNAVAILABLE
            if not starting or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _compare(
    stubs: dict[str, Any], request: inference_pb2.QueryRequest, blocks: int, calls: int
) -> dict[str, Any]:
    """Time each way in ms: the median, and the tenth percentile, which others disturb least."""
    times: dict[str, list[float]] = {way: [] for way in stubs}
    for stub, metadata in stubs.values():
        _wait_until_answered(stub, metadata, request)
    for turn in range(blocks):
        first = turn % len(stubs)
        for way in (*list(stubs)[first:], *list(stubs)[:first]):
            stub, metadata = stubs[way]
            stub.Query(request, metadata=metadata)
            for _ in range(calls):
                start = time.perf_counter()
                stub.Query(request, metadata=metadata)
                times[way].append((time.perf_counter() - start) * 1e3)
    tenths = {way: record.quantiles(spent, n=10)[0] for way, spent in times.items()}
    return {
        way: {
            "p10_ms": tenths[way],
            "p50_ms": statistics.median(spent),
            "added_us": (tenths[way] - tenths[BASE]) * 1e3,
        }
        for way, spent in times.items()
    }
