"""What gRPC has to know before it is imported, which it reads then and never again.

Connections are read by the thread that waits for an answer. Otherwise threads of gRPC's own read
them, and three of those wake each other before the one that waits. The environment is left as it
was, for this program's children; what it says of this itself holds, and so does what gRPC read when
the program imported it before this package.
"""

from __future__ import annotations

import os

_SETTING = "GRPC_EXPERIMENTS"

if _SETTING not in os.environ:
    os.environ[_SETTING] = "-event_engine_client"
    try:
        import grpc  # noqa: F401 - for what it reads
    finally:
        del os.environ[_SETTING]
