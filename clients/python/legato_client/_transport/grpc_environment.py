"""The environment that gRPC reads once, when it is imported.

The thread that waits for an answer reads the connection. Otherwise three threads of gRPC's own wake
each other before it. The environment is restored for this program's children. A setting of the
program's own holds, and so does what gRPC read when it was imported before this package.
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
