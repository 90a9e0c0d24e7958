"""The service configuration that comes with this package: what channels retry, and where they go.

`service_config.json` is the one source, in gRPC's own form, for clients in any language. gRPC
retries a stream only while no response has begun, so one policy serves every method: a session's
first response comes before any frame is sent, and an upload sent twice is one image.

Its health check and `round_robin` are for names that stand for several servers: a server that says
NOT_SERVING gets no calls while another does. With a single server they would only hide its own
answer, which says why it does not serve and when to come back.
"""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

_FILE = "service_config.json"
_FOR_SEVERAL = ("healthCheckConfig", "loadBalancingConfig")
_SEVERAL_SCHEMES = ("dns:", "xds:")


def load() -> dict[str, Any]:
    """The whole configuration, for several servers."""
    text = importlib.resources.files("legato_client").joinpath(_FILE).read_text("utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def of_target(target: str) -> str:
    """The configuration for a gRPC name, as JSON."""
    config = load()
    if not names_several(target):
        for key in _FOR_SEVERAL:
            del config[key]
    return json.dumps(config)


def names_several(target: str) -> bool:
    """Whether a gRPC name may stand for several servers.

    That is a list of addresses ("ipv4:10.0.0.1:50051,10.0.0.2:50051") or a name with the scheme
    "dns:"; "host:port" without a scheme is one server, "unix:/path" too.
    """
    return "," in target or target.startswith(_SEVERAL_SCHEMES)


def max_attempts() -> int:
    """How often a call is tried at most."""
    attempts: int = load()["methodConfig"][0]["retryPolicy"]["maxAttempts"]
    return attempts
