"""The environment that gRPC reads once, when it is imported.

The thread that waits for an answer reads the connection. Otherwise three threads of gRPC's own wake
each other before it. While no thread waits, gRPC looks at its connections twice a second, or a
client that asks now and then would notice a server that has come back only after five seconds or
more. The environment is restored for this program's children. A setting of the program's own holds,
and so does what gRPC read when it was imported before this package.
"""

from __future__ import annotations

import os

_SETTINGS = {
    "GRPC_EXPERIMENTS": "-event_engine_client",
    "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "500",
    "GRPC_VERBOSITY": "ERROR",  # without it, failed handshakes are printed beside our own error
}

_missing = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
os.environ.update(_missing)
try:
    import grpc  # noqa: F401 - for what it reads
finally:
    for _name in _missing:
        del os.environ[_name]
