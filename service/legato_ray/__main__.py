"""`python -m legato_ray`: writes Envoy's endpoints, on the host of each Envoy."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import ray

from legato_ray.application import directory
from legato_ray.endpoints import EndpointWriter

_ANSWER = 2.0  # seconds for the directory


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m legato_ray", description=__doc__)
    parser.add_argument("folder", type=Path, help="where Envoy watches for endpoints.json")
    parser.add_argument("--ray-address", default="auto", help="as of ray.init (%(default)s)")
    parser.add_argument(
        "--lame-duck",
        type=float,
        default=2.0,
        help="seconds from NOT_SERVING until a server leaves (%(default)s)",
    )
    parser.add_argument(
        "--interval", type=float, default=0.5, help="seconds between polls (%(default)s)"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    ray.init(address=arguments.ray_address, log_to_driver=False)
    servers = directory()

    def listed() -> Mapping[str, str]:
        found: Mapping[str, str] = ray.get(servers.servers.remote(), timeout=_ANSWER)
        return found

    writer = EndpointWriter(arguments.folder, listed, lame_duck=arguments.lame_duck)
    while True:
        writer.step()
        time.sleep(arguments.interval)


if __name__ == "__main__":
    main()
