"""Remote writers over TLS, and the files that tokens are read from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from remote_support import (
    TOKEN,
    assert_same,
    connect,
    openssl_certificate,
    section,
    served,
    stored,
    trajectory,
    write_token,
)

from deepspeed_gear.errors import (
    ConfigError,
    LostNodeError,
)
from deepspeed_gear.remote.connection import parse_url, read_token
from deepspeed_gear.remote.gateway import Certificate, Gateway


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test")
    chain, key = openssl_certificate(tmp_path)
    with served(section(), certificate=Certificate.read(chain, key)) as (replay, gateway):
        assert gateway.url.startswith("grpc+tls://")
        url = f"grpc+tls://localhost:{gateway.port}"
        with connect(url, ca=chain) as writer:
            writer.add(trajectory(0))
        monkeypatch.setenv("SSL_CERT_FILE", str(chain))  # the roots of this machine, if `ca` is not given
        with connect(url) as writer:
            writer.add(trajectory(1))
        assert_same(stored(replay), range(2))
        (tmp_path / "other").mkdir()
        monkeypatch.setenv("SSL_CERT_FILE", str(openssl_certificate(tmp_path / "other")[0]))
        with pytest.raises(LostNodeError, match="must answer within 1 s"):
            connect(url, timeout_s=1.0)
        with pytest.raises(LostNodeError):
            connect(f"grpc://127.0.0.1:{gateway.port}", timeout_s=1.0)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test")
    chain, key = openssl_certificate(tmp_path, days=-1)
    with served(section(), certificate=Certificate.read(chain, key)) as (replay, gateway):
        with pytest.raises(LostNodeError, match=r"must answer within 1 s.*(?i:certificate|handshake|ssl)"):
            connect(f"grpc+tls://localhost:{gateway.port}", ca=chain, timeout_s=1.0)
        assert len(replay) == 0


def test_the_network_wants_tls(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"host must be a loopback address without TLS, got '0.0.0.0'; give"
    ):
        Gateway.check("0.0.0.0", None, insecure=False)
    Gateway.check("0.0.0.0", None, insecure=True)
    with pytest.raises(ConfigError, match="url must be a loopback address without TLS"):
        connect("grpc://10.0.0.1:77")
    with pytest.raises(ConfigError, match="readable PEM"):
        Certificate.read(tmp_path / "none", tmp_path / "none")
    for url in ("http://a:1", "grpc://a", "grpc://a:b", "grpc://a:1/x", "a:1"):
        with pytest.raises(ConfigError, match="must be grpc://HOST:PORT"):
            parse_url(url)


def test_tokens_are_read_from_private_files(tmp_path: Path) -> None:
    path = write_token(tmp_path / "token")
    assert read_token(path) == TOKEN
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0600, got '0o640'"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="at least 16 printable") as found:
        read_token(path)
    assert "short" not in str(found.value)
    with pytest.raises(ConfigError, match="openssl rand"):
        read_token(tmp_path / "none")
