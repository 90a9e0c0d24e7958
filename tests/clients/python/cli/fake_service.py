"""Stands in for `python -m legato_service` in the demo's tests: scripted answers, real process.

FAKE_SERVICE says how it behaves: "ok", "crash" while starting, or "bad-exit" when stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from legato.v1 import inference_pb2_grpc

from tests.clients.python.fake_server import FakeServer


def main() -> int:
    """Serve until SIGTERM."""
    behaviour = os.environ["FAKE_SERVICE"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--device")
    args = parser.parse_args()
    if behaviour == "crash":
        sys.stderr.write(f"no weights here for {args.device}\n")
        return 3
    # Blocked before any thread begins, so that the signal waits for sigwait below.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    server = grpc.server(futures.ThreadPoolExecutor(4))
    servicer = health.HealthServicer()
    servicer.set("legato.v1.InferenceService", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(FakeServer(), server)
    server.add_insecure_port(args.listen)
    server.start()
    signal.sigwait({signal.SIGTERM})
    server.stop(None).wait()
    return 5 if behaviour == "bad-exit" else 0


sys.exit(main())
