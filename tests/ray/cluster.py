"""A Ray of this host with the application on it, the writer of endpoints, and Envoy."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.envoy import Envoy
from tests.e2e.server import ENVIRONMENT


class Cluster:
    """What `serve run` would start, from this process, so that a test can look into it."""

    def __init__(self, folder: Path, envoy: Envoy) -> None:
        self.envoy = envoy
        self._folder = folder

    def deploy(self, **settings: Any) -> None:
        """Return once the application runs with these settings."""
        from legato_ray.application import build
        from ray import serve

        own = {"host": "127.0.0.1", "drain_grace": 20.0, "num_cpus": 0.1, "max_surge_percent": 100}
        serve.run(build(own | settings), name="legato", route_prefix=None)

    def published(self) -> frozenset[str]:
        """What the writer has told Envoy."""
        return self.envoy.file.read()

    def wait_for(self, count: int) -> frozenset[str]:
        """Until Envoy has that many servers, all healthy; their addresses."""
        while len(self.published()) != count or self.envoy.healthy() != self.published():
            time.sleep(0.05)
        return self.published()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Envoy starts when the application has written its first endpoints."""
    environment = ENVIRONMENT | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_AUTH_MODE": "token",  # of this cluster only
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    os.environ.update(environment)
    import ray
    from ray import serve

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="legato")
    writer = None
    try:
        serve.start(proxy_location="Disabled")
        envoy = Envoy(folder)
        command = [sys.executable, "-m", "legato_ray", str(envoy.file.path.parent)]
        command += ["--ray-address", ray.get_runtime_context().gcs_address]
        with (folder / "writer.log").open("wb") as log:
            writer = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
        yield Cluster(folder, envoy)
    finally:
        if writer is not None:
            writer.terminate()
            writer.wait()
        serve.shutdown()
        ray.shutdown()


def processes() -> list[int]:
    """The servers that replicas have started on this host."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"legato_ray.lifeline" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return sorted(found)
