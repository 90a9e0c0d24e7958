"""A hub on a loopback port: the three requests of a pull, and ways to fail."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`cuts` bytes of a file are sent before the connection closes, once for each entry.

    With `stalls` the connection stays open instead. `wrong` files are sent with other bytes.
    `declared` replaces fields of files' records, by name, and `answer` the whole record.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}  # by repository and name
        self.commit = COMMIT
        self.wrong: set[str] = set()
        self.declared: dict[str, dict[str, Any]] = {}
        self.answer: bytes | None = None
        self.cuts: list[int] = []
        self.stalls = False
        self.requests: list[tuple[str, str, str]] = []  # method, path, range
        self._release = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def put(self, repository: str, folder: Path) -> None:
        self.files[repository] = {
            path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
        }

    def ranges(self, name: str) -> list[str]:
        """The ranges of the downloads of a file."""
        return [
            asked
            for method, path, asked in self.requests
            if method == "GET" and path.endswith(f"/{name}")
        ]

    def info(self, repository: str) -> dict[str, Any]:
        """Weights are in LFS, other files are git blobs."""
        siblings = []
        for name, data in self.files[repository].items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
            if name.endswith(".safetensors"):
                sha256 = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
            siblings.append(entry | self.declared.get(name, {}))
        return {"id": repository, "sha": self.commit, "siblings": siblings, "tags": []}

    def wait_released(self) -> None:
        """Keeps a stalled connection open until the hub ends."""
        self._release.wait()


class _Server(http.server.ThreadingHTTPServer):
    hub: FakeHub


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        if (
            parts[:2] == ["api", "models"]
            and (name := "/".join(parts[2:4])) in self.server.hub.files
        ):
            data = self.server.hub.answer or json.dumps(self.server.hub.info(name)).encode()
            self._send(200, data, {"Content-Type": "application/json"}, body=True)
        elif (name := "/".join(parts[:2])) in self.server.hub.files and parts[
            -1
        ] in self.server.hub.files[name]:
            self._file(self.server.hub.files[name][parts[-1]], parts[-1], body=body)
        else:
            code = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"}
            self._send(404, b"{}", code, body=body)

    def _file(self, data: bytes, name: str, *, body: bool) -> None:
        headers = {
            "X-Repo-Commit": self.server.hub.commit,
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
        }
        if name in self.server.hub.wrong:
            data = bytes(len(data))
        status = 200
        if body and (asked := self.headers.get("Range", "")):
            begin = int(asked.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            data, status = data[begin:], 206
        self._send(status, data, headers, body=body, of_a_file=name.endswith(".safetensors"))

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        *,
        body: bool,
        of_a_file: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        if of_a_file and self.server.hub.cuts:
            self.wfile.write(data[: self.server.hub.cuts.pop(0)])
            self.wfile.flush()
            if self.server.hub.stalls:
                self.server.hub.wait_released()
            self.close_connection = True
            return
        self.wfile.write(data)
