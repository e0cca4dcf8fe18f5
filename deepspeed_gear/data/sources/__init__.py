"""Sources of ingest on other machines, as paths that are read by byte ranges.

`source_path` gives a `RemotePath` for an address; readers use it like any `pathlib.Path`. Libraries
that take names of local files get an open file instead, by the functions of `opened_files`.
"""

from __future__ import annotations

import re

from deepspeed_gear.data.sources.brace_patterns import check_none_missing, expand, wildcards
from deepspeed_gear.data.sources.http_source import HttpSource
from deepspeed_gear.data.sources.hub_source import HubSource
from deepspeed_gear.data.sources.object_source import PACKAGES, ObjectSource
from deepspeed_gear.data.sources.remote_path import RemotePath
from deepspeed_gear.data.sources.remote_source import RemoteSource
from deepspeed_gear.errors import DataError, undo_on_error

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
SCHEMES = ("hf", *PACKAGES, "https", "http")


def is_address(text: object) -> bool:
    """Return whether a text is the address of a remote source, such as `s3://bucket/name`."""
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def source_path(address: str, show_progress: bool = False) -> RemotePath:
    """List a remote source and return the path of its file or folder.

    Args:
        address: `hf://OWNER/NAME[@REVISION][/PATH]`, `s3://BUCKET/PATH`, `gs://BUCKET/PATH` or
            `https://HOST/PATH`; a path of the first three may be a file, a folder or a pattern.
        show_progress: Show the bytes that are fetched on stderr.
    Raises:
        DataError: The address is malformed, nothing is there, or a package is missing.
    Cost: one to three requests, and one for each 1,000 files of a folder.
    """
    match = _ADDRESS.match(address)
    scheme = match[1].lower() if match else ""
    rest = address[match.end() :] if match else ""
    source: RemoteSource
    if scheme in ("http", "https"):
        source = HttpSource(scheme, rest)
    elif scheme == "hf":
        source = HubSource(rest)
    elif scheme in PACKAGES:
        source = ObjectSource(scheme, rest)
    else:
        raise DataError(
            f"{scheme}://",
            f"must be one of {', '.join(f'{one}://' for one in SCHEMES)}",
            None,
            "copy the files to this machine and give their folder",
        )
    if show_progress:
        source.show_bar()
    return RemotePath(source, "")


def pattern_paths(pattern: str, show_progress: bool = False) -> list[RemotePath]:
    """Return the paths of the files that a pattern of braces names, in its order, in one source.

    Args:
        pattern: An address, such as `https://HOST/shards-{000..012}.tar`.
        show_progress: As in `source_path`.
    Raises:
        DataError: As `source_path`; the pattern is wrong, or files of it are missing.
    Cost: a request for each file of an HTTP server, else as `source_path` for the pattern with `*`.
    """
    scheme, _, rest = pattern.partition("://")
    if scheme.lower() in ("http", "https"):
        files = HttpSource(scheme.lower(), rest, is_pattern=True)
        if show_progress:
            files.show_bar()
        return [RemotePath(files, name) for name in files.files]
    folder = pattern[: pattern.index("{")].rpartition("/")[0]
    inside = pattern.removeprefix(f"{folder}/")
    names = expand(inside)
    wild = wildcards(inside)
    root = source_path(f"{folder}/{wild}" if wild else folder, show_progress)
    paths = [root / name for name in names]
    with undo_on_error(root.source.close):
        check_none_missing([str(path) for path in paths if not path.is_file()])
    return paths


def check_local(name: str, path: object) -> None:
    """Raise for an address where a folder of this machine is needed."""
    if is_address(path):
        scheme = str(path).split("://")[0]
        raise DataError(
            name,
            "must be on this machine",
            f"{scheme}://",
            "gear ingest ADDRESS FOLDER makes a data set from it here",
        )
