"""A real server with the arguments of the rendered chart, asked by the rendered probes."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from legato_service import probe

from tests.deploy.manifests import render
from tests.e2e.server import ENVIRONMENT, until
from tests.service.access.certificates import Authority, replace
from tests.service.access.tokens import Token, write

pytestmark = pytest.mark.deploy

OPEN = {"insecure": True}
PROTECTED = {
    "tls": {"secretName": "tls", "clientCA": True},
    "tokens": {"secretName": "tokens"},
}
DRAIN = {"delaySeconds": 2, "graceSeconds": 1}


class Pod:
    """The container of a manifest as a process; the folder holds its secrets."""

    def __init__(self, folder: Path, args: list[str]) -> None:
        self._log = folder / "server.log"
        mapped = [re.sub(r"=0\.0\.0\.0:[0-9]+$", "=127.0.0.1:0", each) for each in args]
        mapped = [each.replace("=/etc/legato", f"={folder}") for each in mapped]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "legato_service", *mapped],
                env={**ENVIRONMENT, "XDG_RUNTIME_DIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    def event(self, name: str) -> dict[str, str]:
        """Wait for its log line of this name."""
        found: list[dict[str, str]] = []

        def seen() -> bool:
            assert self.process.poll() is None or found, self._log.read_text()
            lines = map(json.loads, self._log.read_bytes().splitlines())
            found.extend(each for each in lines if each.get("event") == name)
            return bool(found)

        until(seen)
        return found[0]


def secrets(folder: Path) -> None:
    """What the secrets of the chart mount."""
    authority = Authority()
    pair = authority.server()
    (folder / "tls").mkdir()
    for name, data in (("crt", pair.chain), ("key", pair.key)):
        replace(folder / "tls" / f"tls.{name}", data)
    replace(folder / "tls" / "ca.crt", authority.pem)
    (folder / "tokens").mkdir()
    write(folder / "tokens" / "tokens.toml", Token("one", ["infer"]))


@pytest.mark.parametrize("access", [OPEN, PROTECTED], ids=["open", "protected"])
def test_a_pod_starts_is_probed_and_ends_within_its_grace(tmp_path, access):
    """Ready by its probes, after SIGTERM not ready, and gone before the kubelet kills it."""
    (release,) = render([{**access, "model": {"name": "null"}, "drain": DRAIN}])
    container = release.container
    secrets(tmp_path)
    pod = Pod(tmp_path, container["args"])
    try:
        pod.event("ready")
        pod.event("metrics_listening")
        address = pod.event("health_listening")["address"]

        def probed(kind: str) -> int:
            service = container[f"{kind}Probe"]["grpc"].get("service", "")
            return probe.main(["--address", address, "--service", service, "--timeout", "20"])

        assert [probed(kind) for kind in ("startup", "readiness", "liveness")] == [0, 0, 0]
        pod.process.send_signal(signal.SIGTERM)
        pod.event("drain_delayed")
        assert probed("readiness") != 0
        assert pod.process.wait(release.pod["terminationGracePeriodSeconds"]) == 0
    finally:
        pod.process.kill()
        pod.process.wait()
