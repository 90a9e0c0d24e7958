"""A real Envoy with the shipped configuration, on free loopback ports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from legato_ray.endpoints import EndpointFile

ROOT = Path(__file__).parents[2]
ENVOY = str(Path(sys.executable).with_name("envoy"))
DESCRIPTOR = ROOT / "proto/gen/legato/v1/descriptor.binpb"


def render(endpoints: Path, *options: str) -> str:
    """The shipped configuration with ports that the kernel chooses, and more options."""
    command = [sys.executable, str(ROOT / "deploy/envoy/render.py"), "--listen", "127.0.0.1:0"]
    command += ["--admin", "127.0.0.1:0", "--endpoints", str(endpoints)]
    command += ["--descriptor", str(DESCRIPTOR), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Envoy:
    """Envoy in a `with` block, in front of the addresses that were last published."""

    def __init__(self, folder: Path, *addresses: str, options: Sequence[str] = ()) -> None:
        """`options` are those of deploy/envoy/render.py."""
        self._folder = folder
        self._endpoints = folder / "endpoints"
        self._endpoints.mkdir()
        self.file = EndpointFile(self._endpoints)
        if addresses:
            self.file.write(addresses)
        self.config = folder / "envoy.yaml"
        self.config.write_text(render(self._endpoints, *options))
        self.address = ""
        self._admin = ""

    def validate(self) -> subprocess.CompletedProcess[str]:
        """What Envoy itself says of the configuration."""
        command = [ENVOY, "--mode", "validate", "-c", str(self.config)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def __enter__(self) -> Envoy:
        admin = self._folder / "admin"
        command = [ENVOY, "-c", str(self.config), "--admin-address-path", str(admin)]
        command += ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
        self._log = (self._folder / "envoy.log").open("wb")
        self.process = subprocess.Popen(command, stderr=self._log, stdin=subprocess.DEVNULL)
        while not (admin.exists() and (text := admin.read_text())):
            self._check_runs()
        self._admin = f"http://{text}"
        while not self.is_ready():
            self._check_runs()
        (listener,) = json.loads(self.get("/listeners?format=json"))["listener_statuses"]
        socket = listener["local_address"]["socket_address"]
        self.address = f"{socket['address']}:{socket['port_value']}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

    def get(self, path: str) -> str:
        """A page of its administration."""
        with urllib.request.urlopen(self._admin + path, timeout=10) as response:
            return str(response.read(), "utf-8")

    def is_ready(self) -> bool:
        """It listens, and has checked the health of its first endpoints."""
        try:
            return self.get("/ready").strip() == "LIVE"
        except OSError:
            return False

    def healthy(self, cluster: str = "legato") -> set[str]:
        """The addresses that get calls."""
        statuses = json.loads(self.get("/clusters?format=json"))["cluster_statuses"]
        (hosts,) = (one.get("host_statuses", []) for one in statuses if one["name"] == cluster)
        return {_address(host) for host in hosts if _is_healthy(host["health_status"])}

    def counter(self, name: str) -> int:
        """The value of a statistic; 0 if there is none yet."""
        stats = json.loads(self.get(f"/stats?format=json&filter=^{name}$"))["stats"]
        return sum(int(one.get("value", 0)) for one in stats)

    def _check_runs(self) -> None:
        assert self.process.poll() is None, (self._folder / "envoy.log").read_text()
        time.sleep(0.02)


def _is_healthy(status: dict[str, Any]) -> bool:
    failed = ("failed_active_health_check", "failed_outlier_check", "pending_active_hc")
    return not any(status.get(flag) for flag in failed)


def _address(host: dict[str, Any]) -> str:
    socket = host["address"]["socket_address"]
    return f"{socket['address']}:{socket['port_value']}"
