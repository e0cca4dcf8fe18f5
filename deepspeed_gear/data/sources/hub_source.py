"""Data sets of the Hugging Face hub, listed by huggingface_hub and read by byte ranges."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, TypeVar
from urllib.parse import unquote

from deepspeed_gear.data.sources.http_source import HttpFile
from deepspeed_gear.data.sources.object_source import EXTRA, HAS_QUERY, wildcard_head
from deepspeed_gear.data.sources.remote_source import ReadRange, RemoteSource, TransientFault
from deepspeed_gear.errors import DataError

Result = TypeVar("Result")
_FORM = re.compile(r"(?:datasets/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>.+))?")
_SPECIAL = re.compile(r"refs/(?:convert/[^/]+|pr/\d+)")  # revisions with slashes
_LOGIN = "check the name; a private or gated data set needs a token: hf auth login, or HF_TOKEN"


class HubSource(RemoteSource):
    """A data set of the hub, or a file, folder or pattern in it.

    The revision is resolved to a commit first, so that all files are of one commit. The token, the
    endpoint (`HF_ENDPOINT`) and the offline mode are those of huggingface_hub.
    """

    def __init__(self, rest: str) -> None:
        kind = rest.split("/")[0]
        if kind in ("models", "spaces", "buckets"):
            raise DataError(f"hf://{kind}/", "must be a data set", kind, "hf://OWNER/NAME")
        parts = rest.removeprefix("datasets/").split("/", 2)
        owner, name, path = (*parts, "", "")[:3]
        name, _, revision = name.partition("@")
        if revision == "refs" and (special := _SPECIAL.match(f"refs/{path}")):
            revision = special[0]
            path = f"refs/{path}"[special.end() :].lstrip("/")
        path = path.strip("/")
        if not owner or not name or "@" in owner or HAS_QUERY.search(rest):
            raise DataError(
                f"hf://{owner.rpartition('@')[2]}/{name}",
                "must be hf://OWNER/NAME[@REVISION][/PATH]",
                None,
                "correct it; the token is read from where hf auth login stores it, or HF_TOKEN",
            )
        self._repo = f"{owner}/{name}"
        super().__init__("/".join(filter(None, (f"hf://datasets/{self._repo}", path))))
        try:
            self._hub: Any = import_module("huggingface_hub")
            self._errors: Any = import_module("huggingface_hub.errors")
        except ImportError:
            raise DataError(self.url, "needs huggingface_hub", None, EXTRA) from None
        self._api = self._hub.HfApi()
        self._given = unquote(revision) or None
        self.revision = str(self._ask(self._info).sha)
        self._list(path)

    def _info(self) -> Any:
        return self._api.repo_info(self._repo, repo_type="dataset", revision=self._given)

    def _list(self, path: str) -> None:
        """List a file, the files of a folder, or those that match a pattern."""
        known = {"repo_type": "dataset", "revision": self.revision}
        head = wildcard_head(path)
        is_pattern = head != path
        self._head = path if not is_pattern else head
        if path and not is_pattern:
            found = self._ask(lambda: self._api.get_paths_info(self._repo, [path], **known))
            if not found:
                raise DataError(self.url, "must exist", None, "check the path and the revision")
            if hasattr(found[0], "size"):
                self._add("", found[0])
                return
        tree = self._ask(
            lambda: list(
                self._api.list_repo_tree(self._repo, head or None, recursive=True, **known)
            )
        )
        for entry in tree:
            if not hasattr(entry, "size"):
                continue  # a folder
            if not is_pattern or _matches(entry.path, path):
                inner = entry.path.removeprefix(f"{head}/") if head else entry.path
                self._add(inner, entry)
        if is_pattern:
            self.url = "/".join(filter(None, (f"hf://datasets/{self._repo}", head)))
        if not self.files:
            raise DataError(self.url, "must contain files", None, "check the path or the pattern")

    def _add(self, inner: str, entry: Any) -> None:
        self.add_file(inner, entry.size, entry.blob_id)

    def _ask(self, request: Callable[[], Result]) -> Result:
        return self.repeat(self.url, lambda: self._asked(request))

    def _asked(self, request: Callable[[], Result]) -> Result:
        errors = self._errors
        try:
            return request()
        except errors.RevisionNotFoundError:
            raise DataError(
                self.url, "must have the revision", self._given, "name a branch, tag or commit"
            ) from None
        except (errors.RepositoryNotFoundError, errors.GatedRepoError):
            raise DataError(self.url, "must be readable on the hub", None, _LOGIN) from None
        except errors.EntryNotFoundError:
            raise DataError(
                self.url, "must exist", None, "check the path and the revision"
            ) from None
        except errors.OfflineModeIsEnabled:
            raise DataError(
                self.url, "must be reached on the hub", "offline mode", "unset HF_HUB_OFFLINE"
            ) from None
        except errors.HfHubHTTPError as error:
            status = getattr(getattr(error, "response", None), "status_code", 0)
            if status >= 500 or status in (408, 429):
                raise TransientFault(f"status {status}") from None
            raise DataError(
                self.url, "must be readable on the hub", f"status {status}", _LOGIN
            ) from None
        except errors.HFValidationError:
            raise DataError(
                self.url, "must have valid names", None, "hf://OWNER/NAME[@REVISION][/PATH]"
            ) from None
        except Exception as error:  # of the HTTP library below, which differs by version
            if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests"):
                raise TransientFault(f"no connection ({type(error).__name__})") from None
            if isinstance(error, OSError):
                raise TransientFault(f"no connection ({type(error).__name__})") from None
            raise

    def range_reader(self, name: str) -> ReadRange:
        inner = "/".join(filter(None, (self._head, name)))
        address = self._hub.hf_hub_url(
            self._repo,
            inner,
            repo_type="dataset",
            revision=self.revision,
            endpoint=self._api.endpoint,
        )
        headers = self._hub.utils.build_hf_headers()
        token = next((v for k, v in headers.items() if k.lower() == "authorization"), None)
        named = {"Authorization": token} if token else {}
        file = HttpFile(self.shown(name), address, named, _LOGIN)
        file.size = self.files[name].size
        return file.read


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern, whose wildcards do not match slashes."""
    parts = name.split("/")
    patterns = pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
