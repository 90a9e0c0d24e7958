"""The service configuration: what channels retry, and where they go.

`service_config.json` is for clients in any language. gRPC retries a stream only while no response
has begun, so one policy serves every method: a session's first response comes before any frame is
sent, and an upload sent twice is one image.

The health check and `round_robin` are for names of several servers: one that says NOT_SERVING gets
no calls while another serves. A single server's own answer says why it does not serve and when to
come back.
"""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

_FILE = "service_config.json"
_FOR_SEVERAL = ("healthCheckConfig", "loadBalancingConfig")
_SEVERAL_SCHEMES = ("dns:", "xds:")


def load() -> dict[str, Any]:
    text = importlib.resources.files("legato_client").joinpath(_FILE).read_text("utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def of_target(target: str) -> str:
    config = load()
    if not names_several(target):
        for key in _FOR_SEVERAL:
            del config[key]
    return json.dumps(config)


def names_several(target: str) -> bool:
    """Whether a gRPC name may stand for several servers.

    That is a list of addresses ("ipv4:10.0.0.1:50051,10.0.0.2:50051") or a name with the scheme
    "dns:".
    """
    return "," in target or target.startswith(_SEVERAL_SCHEMES)


def max_attempts() -> int:
    attempts: int = load()["methodConfig"][0]["retryPolicy"]["maxAttempts"]
    return attempts
