"""A small HTTP server with byte ranges, faults on request, and the hub's endpoints of data sets."""

import gc
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class RangeServer(ThreadingHTTPServer):
    """Serves `files` on the loopback device.

    Attributes:
        files: Content by path.
        redirects: Location by path.
        repos: Files by name, by the name of a data set of the hub.
        has_ranges: Whether answers are ranges; without them every answer is a whole file.
        cuts: Numbers of bytes after which the next answers end, each used once.
        statuses: Statuses of the next answers, each used once, with the header Retry-After: 0.
        requests: Path with query, and headers, of each request.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(files)
        self.redirects: dict[str, str] = {}
        self.repos: dict[str, dict[str, bytes]] = {}
        self.has_ranges = True
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.requests: list[tuple[str, dict[str, str]]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless its client has closed the connection.

        Tracebacks that threads print while pytest formats one can end Python 3.11's parser.
        """
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def ranges(self) -> list[tuple[int, int]]:
        """Return the requested ranges, [first, last]."""
        texts = (headers.get("range", "") for _, headers in self.requests)
        matches = (re.fullmatch(r"bytes=(\d+)-(\d+)", text) for text in texts)
        return [(int(match[1]), int(match[2])) for match in matches if match]


class _Handler(BaseHTTPRequestHandler):
    server: RangeServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self._answer(parse_qs(self.rfile.read(length).decode()))

    def do_GET(self) -> None:
        self._answer({})

    def _answer(self, form: dict[str, list[str]]) -> None:
        server = self.server
        server.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        path = unquote(urlsplit(self.path).path)
        if server.statuses:
            self._send(server.statuses.pop(0), b"", {"Retry-After": "0"})
            return
        if path in server.redirects:
            self._send(302, b"", {"Location": server.redirects[path]})
            return
        if path.startswith("/api/"):
            self._hub(urlsplit(self.path).path, form)
            return
        content = server.files.get(path)
        match = re.fullmatch(rf"/datasets/(.+?/.+?)/resolve/{COMMIT}/(.+)", path)
        if match:
            content = server.repos[match[1]].get(match[2])
        if content is None:
            self._send(404, b"", {})
            return
        self._send_file(content)

    def _hub(self, path: str, form: dict[str, list[str]]) -> None:
        match = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/([^/]+)/([^/]+)(?:/(.*))?)?", path)
        files = self.server.repos.get(match[1]) if match else None
        if match is None or files is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        kind = match[2]
        revision = match[3] and unquote(match[3])
        inner = unquote(match[4] or "")
        if revision not in (None, "main", "v1", COMMIT, "refs/convert/parquet"):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        value: Any = {"id": match[1], "sha": COMMIT}
        if kind == "paths-info":
            value = [_entry(files, name) for name in form["paths"] if _exists(files, name)]
        elif kind == "tree":
            head = f"{inner}/" if inner else ""
            value = [_entry(files, name) for name in files if name.startswith(head)]
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, content: bytes) -> None:
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not match or not self.server.has_ranges:
            self._send(200, content, headers)
            return
        first = int(match[1])
        last = min(int(match[2]), len(content) - 1)
        if first > last:
            self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(206, content[first : last + 1], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if len(body) > 1 and self.server.cuts:
            body = body[: self.server.cuts.pop(0)]
        self.wfile.write(body)
        self.close_connection = True


def _exists(files: Mapping[str, bytes], name: str) -> bool:
    return any(one == name or one.startswith(f"{name}/") for one in files)


def _entry(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {"type": "directory", "path": name, "oid": "0" * 40}
    oid = hashlib.sha1(files[name]).hexdigest()
    return {"type": "file", "path": name, "size": len(files[name]), "oid": oid}


@contextmanager
def serving(files: Mapping[str, bytes] | None = None) -> Iterator[RangeServer]:
    """Run a server until the block ends, without garbage collection.

    A read of HDF5 holds h5py's lock while it waits for this server, whose threads would wait for
    the lock if they collected an object of h5py.
    """
    gc.collect()
    gc.disable()
    server = RangeServer(files or {})
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        gc.enable()
