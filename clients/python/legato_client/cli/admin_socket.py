"""The operator's socket of a server that this user runs."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path


def admin_target(server: str) -> str:
    """Where AdminService of `server` (HOST:PORT) is: this user's socket, else the server itself.

    A server makes its socket in a folder that only its user can enter; sockets in other folders
    may be anyone's.
    """
    host, _, port = server.rpartition(":")
    if host.strip("[]") in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::"):
        for folder in _folders():
            path = folder / f"admin-{port}.sock"
            if _is_own(folder) and _is_served(path):
                return f"unix:{path}"
    return server


def _folders() -> list[Path]:
    """Those that the server chooses from, in its order."""
    user = os.geteuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    return [runtime / "legato", Path(f"/tmp/legato-{user}")]


def _is_served(path: Path) -> bool:
    """A server that was killed leaves its socket behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _is_own(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )
