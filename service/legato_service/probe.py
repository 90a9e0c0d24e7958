"""A health check for containers: `python -m legato_service.probe`.

Exit codes: 0 SERVING, 1 not serving or without that service, 2 wrong options, 3 no answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from legato_service import addresses

SERVING, NOT_SERVING, WRONG_OPTIONS, NO_ANSWER = range(4)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    with _channel(options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=options.service)
        try:
            status = stub.Check(request, timeout=options.timeout).status
        except grpc.RpcError as error:
            _say(f"{options.address}: {error.code().name}: {error.details()}")
            missing = error.code() is grpc.StatusCode.NOT_FOUND
            return NOT_SERVING if missing else NO_ANSWER
    _say(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
    return SERVING if status == health_pb2.HealthCheckResponse.SERVING else NOT_SERVING


def _channel(options: argparse.Namespace) -> grpc.Channel:
    settings: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    if not options.tls:
        return grpc.insecure_channel(options.address, settings)
    if options.server_name:
        settings.append(("grpc.ssl_target_name_override", options.server_name))
    files = (options.ca, options.key, options.cert)
    credentials = grpc.ssl_channel_credentials(*(_read(file) for file in files))
    return grpc.secure_channel(options.address, credentials, settings)


def _read(file: Path | None) -> bytes | None:
    return None if file is None else file.read_bytes()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="legato_service.probe",
        description="Ask grpc.health.v1 of a server; the exit code is 0 while it is SERVING.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--address", metavar="HOST:PORT", default="127.0.0.1:50051")
    add("--service", default="", help="name of a service; empty: whether the process is alive")
    add("--timeout", metavar="SECONDS", type=float, default=3.0)
    add("--tls", action="store_true", help="encrypt; the files below imply it")
    add("--ca", metavar="FILE", type=Path, help="authority of the server's certificate, PEM")
    add("--cert", metavar="FILE", type=Path, help="certificate of the probe itself, PEM")
    add("--key", metavar="FILE", type=Path, help="its private key, PEM")
    add("--server-name", metavar="NAME", help="name in the server's certificate, if not the host")
    options = parser.parse_args(argv)
    files = (options.ca, options.cert, options.key)
    options.tls = options.tls or any(files)
    try:
        addresses.check("--address", options.address, unix=True)
        if (options.cert is None) != (options.key is None):
            raise ValueError("--cert and --key are needed together")
        if options.timeout <= 0:
            raise ValueError(f"--timeout must be positive, not {options.timeout}")
        for file in filter(None, files):
            file.open("rb").close()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    sys.exit(main())
