"""Authentication: tokens in files, and the addresses that may be used without TLS."""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from deepspeed_gear.errors import ConfigError

LEAST_TOKEN = 16
_MAKE = "make one: (umask 077; openssl rand -hex 32 > FILE)"


def read_token(path: str | Path) -> str:
    """Read a token from a file that only its owner can read.

    Raises:
        ConfigError: The file cannot be read, others may read it, or it holds no token.
    """
    name = f"token file {path}"
    try:
        with open(path, encoding="ascii") as file:
            status = os.fstat(file.fileno())
            token = file.read().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(name, "must be a readable text file", None, _MAKE) from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        mode = oct(stat.S_IMODE(status.st_mode))
        raise ConfigError(name, "must be a file of this user with mode 0600", mode, f"chmod 600 {path}")
    return check_token(name, token)


def check_token(name: str, token: str) -> str:
    """Return the token if it is valid.

    Raises:
        ConfigError: It is too short, or no header can hold it. Its text is not in the error.
    """
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        rule = f"must hold a token of at least {LEAST_TOKEN} printable ASCII characters"
        raise ConfigError(name, rule, None, _MAKE)
    return token


def is_loopback(host: str) -> bool:
    """Return whether a host is certainly this machine: a loopback address or `localhost`, no other name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_plain(name: str, host: str, insecure: bool, remedy: str) -> None:
    """Refuse a connection without TLS that leaves the machine.

    Raises:
        ConfigError: It would, and `insecure` is False.
    """
    if not insecure and not is_loopback(host):
        raise ConfigError(name, "must be a loopback address without TLS", host, remedy)


def parse_url(url: str) -> tuple[bool, str]:
    """Return whether a gateway's url has TLS, and its host.

    Raises:
        ConfigError: It is none.
    """
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("grpc", "grpc+tls") and parts.hostname and parts.port
    except ValueError:
        known = None
    if not known or parts.path or parts.query or parts.username:
        raise ConfigError("url", "must be grpc://HOST:PORT or grpc+tls://HOST:PORT", url)
    return parts.scheme == "grpc+tls", str(parts.hostname)
