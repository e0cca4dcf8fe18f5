"""`gear serve`: add trajectories of actors on other machines to a table of this node's store.

They come from remote actors (RemoteWriter) or rollout workers (RemoteRolloutWorker), which also get
the weights of the run's policy board (RemotePolicyBoard). The server is one of the table's writers;
it waits for the run to begin, and ends with it or with SIGTERM.

With --metrics and without --config it serves the metrics of running jobs as Prometheus text, and
nothing else, until SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from contextlib import ExitStack

from deepspeed_gear.cli import Options
from deepspeed_gear.errors import ConfigError, undo_on_error

_RUN = "name or id of the run, where several of one config share this node"
_MESSAGE = (
    "most MiB of a trajectory or batch, 1 to 1024; a larger message is not received (default: 64)"
)
METRICS_PORT = 9464  # on which exporters of OpenTelemetry serve Prometheus, too
_METRICS = (
    f"serve the metrics of running jobs as Prometheus text at this port (default: {METRICS_PORT})"
)
_TOKEN = "file of mode 0600 with the token that actors show"
OPTIONS: Options = {
    "--config F": "the run's ds_config.json",
    "--table T": "which table (default: the only one that takes writers)",
    "--run R": (_RUN, {"dest": "run_name"}),
    "--host HOST": ("address to listen at (default: 127.0.0.1)", {"default": "127.0.0.1"}),
    "--port PORT": ("port to listen at (default: a free one)", {"type": int, "default": 0}),
    "--token-file F": _TOKEN,
    "--tls-cert F": "certificate, and those between it and the root, in PEM",
    "--tls-key F": "its private key, in PEM",
    "--insecure": "admit other addresses than loopback without TLS",
    "--max-message MIB": (_MESSAGE, {"type": int, "default": 64}),
    "--metrics PORT": (_METRICS, {"nargs": "?", "type": int, "const": METRICS_PORT}),
    "--wait S": ("seconds to wait for the store (default: 60)", {"type": float, "default": 60.0}),
}


def run(args: argparse.Namespace) -> int:
    """Serve until the run ends, or until SIGTERM or Ctrl-C."""
    for option, value in (("--config", args.config), ("--token-file", args.token_file)):
        needs = args.metrics is None or args.config or args.token_file
        if needs and value is None:
            rule = "must be given where trajectories are received"
            raise ConfigError(option, rule, None, "or give --metrics alone")
    with ExitStack() as stack:
        if args.metrics is not None:
            from deepspeed_gear.cli.metrics_server import MetricsServer, RunSource

            MetricsServer.check(args.host, args.metrics, args.insecure)
            source = RunSource(args.run_name, may_begin_later=args.config is not None)
            server = MetricsServer(source, args.host, args.metrics, args.insecure)
            stack.callback(server.close)
            print(f"metrics at {server.url}", flush=True)
        return _wait_for_signal() if args.config is None else _serve_table(args)


def _wait_for_signal() -> int:
    """Wait for SIGTERM or Ctrl-C."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: ended.set())
    ended.wait()
    return 0


def _serve_table(args: argparse.Namespace) -> int:
    """Receive trajectories until the run ends, or until SIGTERM or Ctrl-C."""
    with ConfigError.on(
        "gear serve",
        "needs pyarrow and grpcio",
        ImportError,
        remedy="pip install deepspeed_gear[remote]",
    ):
        from deepspeed_gear.remote.gateway import Gateway, read_certificate
        from deepspeed_gear.remote.gateway_limits import raise_descriptor_limit
    from deepspeed_gear.remote.connection import read_token
    from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

    logging.basicConfig(format="gear: %(message)s", level=logging.INFO)
    # grpc logs a traceback for each token that is not text, at any rate of requests.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ConfigError(
            "--tls-cert",
            "must be given together with --tls-key",
            None,
            "give both, or neither with --insecure",
        )
    certificate = read_certificate(args.tls_cert, args.tls_key) if args.tls_cert else None
    token = read_token(args.token_file)
    max_bytes = args.max_message << 20
    Gateway.check(args.host, certificate, args.insecure, max_bytes)  # before the wait for the store
    writer = TrajectoryWriter.attach(
        args.config, table=args.table, wait_s=args.wait, run=args.run_name
    )
    raise_descriptor_limit()
    with undo_on_error(writer.close):
        gateway = Gateway(
            writer, token, args.host, args.port, certificate, args.insecure, max_bytes
        )
    ended: list[int] = []  # after the wait for the store, which signals end
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: ended.append(signum))
    print(f"serving table {gateway.table} at {gateway.url}\nrun {gateway.run_id}", flush=True)
    reason = gateway.run(lambda: bool(ended))
    print(f"added {gateway.sessions.num_added:,} trajectories; ended: {reason}")
    return 0
