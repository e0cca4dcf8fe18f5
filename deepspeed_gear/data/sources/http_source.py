"""Files of HTTP servers, read by byte ranges with the standard library."""

from __future__ import annotations

import base64
import http.client
import posixpath
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit, urlunsplit

from deepspeed_gear.data.sources.brace_patterns import EXISTS, check_none_missing, expand
from deepspeed_gear.data.sources.remote_source import ReadRange, RemoteSource, TransientFault
from deepspeed_gear.errors import DataError

_TIMEOUT_S = 60.0  # without a byte
_PART_BYTES = 256 << 10
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_CHANGED = "it has changed while it was read; ingest it again"
_RULE = "must be readable from its server"


class HttpSource(RemoteSource):
    """A file at an address of the schemes http and https, or the files of a pattern of braces.

    A user and password in the address are sent to its own host only. They and the query, which may
    be a token, occur in no message and no metadata.
    """

    def __init__(self, scheme: str, rest: str, is_pattern: bool = False) -> None:
        given = urlsplit(f"{scheme}://{rest}")
        host = given.netloc.rpartition("@")[2]

        def shown(path: str) -> str:
            return urlunsplit((scheme, host, path, "", ""))

        paths = expand(given.path) if is_pattern else [given.path]
        folder = posixpath.commonpath([posixpath.dirname(path) for path in paths])
        super().__init__(shown(folder if is_pattern else given.path).rstrip("/"))
        if not given.hostname or not given.path.strip("/") or given.path.endswith("/"):
            raise DataError(
                shown(given.path),
                "must be the address of a file",
                None,
                "servers of HTTP list no folders",
            )
        if "*" in given.path:
            raise DataError(
                shown(given.path),
                "must not be a pattern",
                None,
                "servers of HTTP list no folders: name a file",
            )
        headers = {}
        if given.username is not None:
            pair = f"{unquote(given.username)}:{unquote(given.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._files: dict[str, HttpFile] = {}
        missing = []
        for path in paths:
            address = urlunsplit((scheme, host, path, given.query, ""))
            file = HttpFile(shown(path), address, headers)
            try:
                self.repeat(shown(path), file.probe)
            except DataError as error:
                if not is_pattern or error.rule != EXISTS:
                    raise
                missing.append(shown(path))
                continue
            name = posixpath.relpath(path, folder) if is_pattern else ""
            self._files[name] = file
            self.add_file(name, file.size, file.version)
        check_none_missing(missing)
        self.has_ranges = all(file.has_ranges for file in self._files.values())
        self.revision = "" if is_pattern else self._files[""].version

    def range_reader(self, name: str) -> ReadRange:
        return self._files[name].read


class HttpFile:
    """Byte ranges of one file.

    Args:
        shown: Its address for messages.
        address: Its address with a query that may hold credentials.
        headers: Headers for the host of the address; redirects to others leave Authorization out.
        remedy: Remedy where the server refuses access.
    """

    def __init__(
        self,
        shown: str,
        address: str,
        headers: Mapping[str, str],
        remedy: str = "check the address, and the user and password or the token in it",
    ) -> None:
        self._shown = shown
        self._address = address
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "deepspeed_gear", **headers}
        self._remedy = remedy
        self._redirected: str | None = None  # where the last answer came from
        self.size = -1
        self.version = ""
        self.has_ranges = True

    def probe(self) -> None:
        """Set size, version and `has_ranges` by a request for the first byte."""
        with self._open(0, 1) as response:
            self._check_encoding(response)
            self.version = _version(response.headers)
            self.has_ranges = response.status == 206
            length = response.headers.get("Content-Length", "")
            text = self._range(response)[1] if self.has_ranges else length
        if not str(text).isdigit():
            raise DataError(
                self._shown, "must have a size that its server states", None, "copy it first"
            )
        self.size = int(text)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes [start, stop), or those before a cut."""
        with self._open(start, stop) as response:
            self._check_encoding(response)
            if self.size >= 0:
                self._check_unchanged(response, start)
            skip = 0 if response.status == 206 else start
            left = stop - start
            while left > 0:
                part = self._part(response, min(_PART_BYTES, skip or left))
                if not part:
                    return
                if skip:
                    skip -= len(part)
                    continue
                left -= len(part)
                yield part

    def _part(self, response: Any, most: int) -> bytes:
        try:
            part: bytes = response.read1(most)
        except (OSError, http.client.HTTPException) as error:
            raise TransientFault(f"the connection was cut ({type(error).__name__})") from None
        return part

    def _open(self, start: int, stop: int) -> Any:
        if self._redirected is not None:
            try:
                return self._request(self._redirected, start, stop)
            except (DataError, TransientFault):
                self._redirected = None  # such addresses expire
        response = self._request(self._address, start, stop)
        if response.url != self._address:
            self._redirected = response.url
        return response

    def _request(self, address: str, start: int, stop: int) -> Any:
        headers = {**self._headers, "Range": f"bytes={start}-{stop - 1}"}
        if _origin(address) != _origin(self._address):
            headers.pop("Authorization", None)
        opener = urllib.request.build_opener(SafeRedirects(self._shown))
        try:
            request = urllib.request.Request(address, headers=headers)
            return opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                self._refuse(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, DataError):
                raise
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise DataError(
                    self._shown,
                    _RULE,
                    f"a certificate that is not valid ({reason.verify_message})",
                    "check the address",
                ) from None
            if isinstance(error, (http.client.InvalidURL, ValueError)):
                raise DataError(
                    self._shown, "must be a valid address", None, "correct it"
                ) from None
            raise TransientFault(f"no connection ({type(reason).__name__})") from None

    def _refuse(self, error: urllib.error.HTTPError) -> NoReturn:
        """Raise what the status of an answer means."""
        status = error.code
        if status == 416 and (error.headers.get("Content-Range") or "") == "bytes */0":
            raise DataError(self._shown, "must not be empty", 0, "check the source") from None
        if status in _TRANSIENT:
            wait = error.headers.get("Retry-After") or ""
            raise TransientFault(f"status {status}", float(wait) if wait.isdigit() else 0.0)
        rules = {
            401: (_RULE, self._remedy),
            403: (_RULE, self._remedy),
            404: (EXISTS, "check the address"),
            410: (EXISTS, "check the address"),
            412: ("must not change", _CHANGED),
            416: ("must not change", _CHANGED),
        }
        rule, remedy = rules.get(status, (_RULE, "check the address"))
        raise DataError(self._shown, rule, f"status {status}", remedy) from None

    def _check_encoding(self, response: Any) -> None:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise DataError(
                self._shown, "must be sent without an encoding", encoding, "copy it first"
            )

    def _range(self, response: Any) -> tuple[int, str]:
        """Return the first byte and the size of the file that an answer of status 206 states."""
        text = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text)
        if match is None:
            raise DataError(self._shown, "must be sent with a Content-Range", text, "copy it first")
        return int(match[1]), match[2]

    def _check_unchanged(self, response: Any, start: int) -> None:
        length = response.headers.get("Content-Length", "")
        first, size = self._range(response) if response.status == 206 else (start, length)
        is_same = first == start and size in ("*", "", str(self.size))
        version = _version(response.headers)
        if not is_same or (version and self.version and version != self.version):
            raise DataError(self._shown, "must not change", None, _CHANGED)


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to http, and without credentials for other hosts."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if scheme not in allowed:
            raise DataError(
                self._shown,
                f"must stay on {' or '.join(allowed)}",
                f"a redirect to {scheme}",
                "check the address",
            )
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and _origin(newurl) != _origin(req.full_url):
            new.remove_header("Authorization")
        return new


def _origin(address: str) -> tuple[str, str]:
    parts = urlsplit(address)
    return parts.scheme, parts.netloc


def _version(headers: Any) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")
