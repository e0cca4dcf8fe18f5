"""Files of object stores, such as S3, through fsspec."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, TypeVar

from deepspeed_gear.data.sources.remote_source import ReadRange, RemoteSource, TransientFault
from deepspeed_gear.errors import DataError

Result = TypeVar("Result")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # of fsspec, by scheme
EXTRA = "pip install 'deepspeed_gear[cloud]'"
_PART_BYTES = 4 << 20  # of one request; after a cut it is requested again
HAS_QUERY = re.compile(r"\?[^/]*=")
_WILDCARDS = re.compile(r"[*?\[]")
_CHANGED = "it has changed while it was read; ingest it again"
_ACCESS = "check the name and the credentials (FSSPEC_S3_ANON=true reads public buckets of S3)"


class ObjectSource(RemoteSource):
    """An object, the objects below a prefix, or those that match a pattern.

    Credentials, regions and endpoints are those of the package of fsspec: files and variables of
    AWS or Google, and fsspec's own (`FSSPEC_S3_ENDPOINT_URL`).
    """

    def __init__(self, scheme: str, rest: str) -> None:
        rest = rest.strip("/")
        bucket = rest.split("/")[0]
        if not bucket or "@" in bucket or HAS_QUERY.search(rest):
            raise DataError(
                f"{scheme}://{bucket.rpartition('@')[2]}",
                f"must be {scheme}://BUCKET/PATH",
                None,
                "credentials come from the environment or the files of the provider",
            )
        super().__init__(f"{scheme}://{rest}")
        self._files = self._file_system(scheme)
        head = wildcard_head(rest)
        if head != rest:
            self.url = f"{scheme}://{head}"
            found = self._ask(lambda: self._files.glob(rest, detail=True))
        else:
            info = self._ask(lambda: self._files.info(rest))
            if info["type"] == "file":
                self._head = rest
                self._add("", info)
                self.revision = self.files[""].version
                return
            found = self._ask(lambda: self._files.find(rest, detail=True))
        self._head = head
        for name, info in sorted(found.items()):
            if info["type"] == "file" and not name.endswith("/"):
                self._add(name.removeprefix(f"{head}/"), info)
        if not self.files:
            raise DataError(self.url, "must contain files", None, "check the path or the pattern")

    def _file_system(self, scheme: str) -> Any:
        try:
            return import_module("fsspec").filesystem(scheme)
        except ImportError:
            raise DataError(self.url, f"needs {PACKAGES[scheme]}", None, EXTRA) from None

    def _add(self, inner: str, info: dict[str, Any]) -> None:
        keys = ("ETag", "etag", "md5Hash", "generation", "LastModified", "created")
        version = next((str(info[key]) for key in keys if info.get(key)), "")
        self.add_file(inner, info.get("size"), version.strip('"'))

    def _ask(self, request: Callable[[], Result]) -> Result:
        return self.repeat(self.url, lambda: self._asked(self.url, request))

    def _asked(self, where: str, request: Callable[[], Result]) -> Result:
        """Return the result of a request; its errors are renamed, as they may hold addresses."""
        try:
            return request()
        except DataError:
            raise
        except FileNotFoundError:
            raise DataError(where, "must exist", None, "check the bucket and the path") from None
        except PermissionError as error:
            raise DataError(where, "must be readable", type(error).__name__, _ACCESS) from None
        except Exception as error:  # each package has its own
            name = type(error).__name__
            if "Credential" in name or "Token" in name or "Auth" in name:
                raise DataError(where, "must be readable", name, _ACCESS) from None
            if name == "FileExpired":
                raise DataError(where, "must not change", name, _CHANGED) from None
            raise TransientFault(f"a failed request ({name})") from None

    def range_reader(self, name: str) -> ReadRange:
        key = "/".join(filter(None, (self._head, name)))
        where = self.shown(name)
        opened: list[Any] = []

        def part(start: int, stop: int) -> bytes:
            if not opened:
                # Without a cache of its own, each read is one request for just these bytes.
                opened.append(self._files.open(key, "rb", cache_type="none"))
            opened[0].seek(start)
            content: bytes = opened[0].read(stop - start)
            return content

        def read(start: int, stop: int) -> Iterator[bytes]:
            while start < stop:
                end = min(stop, start + _PART_BYTES)
                content = self._asked(where, partial(part, start, end))
                if not content:
                    return
                start += len(content)
                yield content

        return read


def wildcard_head(pattern: str) -> str:
    """Return the folder before the first part with a wildcard; a path without any is returned."""
    parts = PurePosixPath(pattern).parts
    plain = next((i for i, part in enumerate(parts) if _WILDCARDS.search(part)), None)
    return pattern if plain is None else "/".join(parts[:plain])
