"""The operator's socket of the user that runs the server."""

from __future__ import annotations

import os
from pathlib import Path

from legato_service.addresses import UNIX


def admin_socket(port: int) -> str:
    """Return the address of the operator's socket of the server on `port`; make its folder.

    Clients look for it in the same places.

    Raises:
        OSError: there is no folder that only this user can enter.
    """
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise OSError(f"others can enter {folder}")
    return f"{UNIX}{folder}/admin-{port}.sock"


def _folder() -> Path:
    user = os.geteuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    if runtime.is_dir() and os.access(runtime, os.W_OK):
        return runtime / "legato"
    return Path(f"/tmp/legato-{user}")
