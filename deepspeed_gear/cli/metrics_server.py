"""Prometheus metrics of running jobs: their names, labels and values, and their HTTP server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.replay.run_reading import (
    LiveRun,
    RankReading,
    RunReading,
    TableReading,
    find_run,
    living_runs,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"
_LOOK_S = 5.0  # least time between two looks for runs that have begun
_REQUEST_S = 10.0  # longest wait for a client
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})  # in values of labels
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Sample(NamedTuple):
    """A value of a metric, with its labels; as text, its line."""

    name: str
    labels: Mapping[str, str]
    value: float

    def __str__(self) -> str:
        labels = ",".join(
            f'{name}="{text.translate(_ESCAPED)}"' for name, text in self.labels.items()
        )
        return f"gear_{self.name}{{{labels}}} {float(self.value)!r}"


#: Help of each metric by its name, without the prefix `gear_`. Those in `_total` are counters.
HELP = {
    "table_steps": "Steps that the table holds on this node.",
    "table_rows": "Rows in use on this node, with those of columns of T+1 rows.",
    "table_capacity_rows": "Rows that trajectories can fill on this node.",
    "table_trajectories": "Trajectories that the table holds on this node.",
    "table_capacity_trajectories": "Trajectories that the table can hold.",
    "table_fill_ratio": "Part of the rows or slots in use, whichever is larger.",
    "table_bytes": "Bytes of shared memory of the table's store.",
    "table_writers": "Processes that are attached and only write.",
    "table_added_trajectories_total": "Trajectories ever added on this node.",
    "table_added_steps_total": "Steps ever added on this node.",
    "table_batches_total": "Global batches ever selected.",
    "table_samples_total": "Samples ever drawn, over all nodes.",
    "table_policy_version": "Version of the newest policy.",
    "table_priority_mean": "Mean priority of items that can be drawn.",
    "table_groups": "Groups of the table, by state.",
    "table_prompts": "Prompts of the table's ledger, by state.",
    "batch_effective_ratio": "Effective sample size / size of the newest batch.",
    "batch_duplicates_ratio": "Part of the newest batch that repeats an item.",
    "batch_age_trajectories_mean": "Mean age of the newest batch's samples.",
    "batch_age_trajectories_max": "Largest age of the newest batch's samples.",
    "batch_lag_versions_mean": "Mean policy lag of the newest batch's samples.",
    "batch_lag_versions_max": "Largest policy lag of the newest batch's samples.",
    "rank_up": "1 if the rank is attached, else 0.",
    "rank_batches_total": "Micro batches or rollout batches that it took.",
    "rank_wait_seconds_total": "Seconds that it waited for batches.",
    "rank_late_seconds_total": "Seconds that the first rank waited for it.",
    "rank_waited_for_seconds": "Seconds for which another rank waits for it now.",
    "rank_steps_total": "Optimizer steps of packed batches that it took.",
    "rank_tokens_total": "Tokens of these steps, of all ranks together.",
}


def exposition(readings: Iterable[RunReading]) -> str:
    """Return readings as Prometheus text: HELP and TYPE of each metric, then its samples.

    Metrics without a sample are left out. Source: Prometheus, "Exposition formats", 0.0.4.
    """
    by_name: dict[str, list[Sample]] = {name: [] for name in HELP}
    for reading in readings:
        run = reading.run.name or reading.run.id
        for table in reading.tables:
            for sample in _of_table(table, {"run": run, "table": table.table}):
                by_name[sample.name].append(sample)
        for rank in reading.ranks:
            for sample in _of_rank(rank, {"run": run, "rank": str(rank.rank)}):
                by_name[sample.name].append(sample)
    lines = []
    for name, samples in by_name.items():
        if samples:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP gear_{name} {HELP[name]}", f"# TYPE gear_{name} {kind}"]
            lines += map(str, samples)
    return "".join(f"{line}\n" for line in lines)


def _of_table(table: TableReading, labels: Mapping[str, str]) -> Iterator[Sample]:
    has_capacity = table.most_rows is not None
    priorities = table.priorities
    batch = table.batch
    values: dict[str, float | None] = {
        "table_steps": table.steps,
        "table_rows": table.rows,
        "table_capacity_rows": table.most_rows,
        "table_trajectories": table.trajectories,
        "table_capacity_trajectories": table.most_trajectories,
        "table_fill_ratio": table.fill,
        "table_bytes": table.num_bytes,
        "table_writers": table.writers if has_capacity else None,
        "table_added_trajectories_total": table.added if has_capacity else None,
        "table_added_steps_total": table.steps_added if has_capacity else None,
        "table_batches_total": None if table.kind is None else table.batches,
        "table_samples_total": None if table.kind is None else table.samples,
        "table_policy_version": table.version,
    }
    if priorities is not None and len(priorities):
        values["table_priority_mean"] = float(priorities.mean())
    if batch is not None:
        values["batch_effective_ratio"] = batch.effective
        values["batch_duplicates_ratio"] = batch.duplicates
        if len(batch.ages):
            values["batch_age_trajectories_mean"] = float(batch.ages.mean())
            values["batch_age_trajectories_max"] = float(batch.ages.max())
        if len(batch.lags):
            values["batch_lag_versions_mean"] = float(batch.lags.mean())
            values["batch_lag_versions_max"] = float(batch.lags.max())
    for name, value in values.items():
        if value is not None:
            yield Sample(name, labels, value)
    for name, states in (("table_groups", table.groups), ("table_prompts", table.prompts)):
        for state, count in states.items():
            yield Sample(name, {**labels, "state": state}, count)


def _of_rank(rank: RankReading, labels: Mapping[str, str]) -> Iterator[Sample]:
    yield Sample("rank_up", labels, float(rank.lives))
    yield Sample("rank_batches_total", labels, rank.batches)
    yield Sample("rank_wait_seconds_total", labels, rank.wait_s)
    if rank.late_s is not None:
        yield Sample("rank_late_seconds_total", labels, rank.late_s)
        yield Sample("rank_waited_for_seconds", labels, rank.waited_for_s or 0.0)
    if rank.steps:
        yield Sample("rank_steps_total", labels, rank.steps)
        yield Sample("rank_tokens_total", labels, rank.tokens)


class RunSource:
    """The running jobs whose metrics are served. Thread safe.

    Args:
        name: The only run, as `find_run`; None: all of this user, also those that begin later.
        may_begin_later: Whether a named run need not run yet.
    Raises:
        ConfigError: The named run does not run, and must.
    """

    def __init__(self, name: str | None, may_begin_later: bool = False) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._runs: list[LiveRun] = []
        if name is not None and not may_begin_later:
            self._runs = [find_run(name)]
        self._looked_s = float("-inf")

    def readings(self) -> list[RunReading]:
        """Return a reading of each living run."""
        with self._lock:
            self._runs = [run for run in self._runs if run.lives]
            if time.monotonic() - self._looked_s > _LOOK_S:
                self._looked_s = time.monotonic()
                self._find_new()
            return [run.read() for run in self._runs]

    def _find_new(self) -> None:
        known = {run.run.id for run in self._runs}
        for run in living_runs():
            is_wanted = self._name is None or self._name in (run.run.name, run.run.id)
            if is_wanted and run.run.id not in known:
                self._runs.append(run)


class MetricsServer:
    """An HTTP server of `/metrics`, on threads of its own, until `close`.

    Args:
        source: The runs.
        host: Address to listen at.
        port: Port to listen at; 0: a free one.
        insecure: Admit other addresses than loopback.
    Raises:
        ConfigError: The address or port cannot be listened at.
    """

    def __init__(self, source: RunSource, host: str, port: int, insecure: bool) -> None:
        self.check(host, port, insecure)
        kind = type("MetricsHandler", (_Handler,), {"source": source})
        with ConfigError.on(
            f"--metrics {port}",
            f"must be a port of {host} that can be listened at",
            OSError,
            OverflowError,
            remedy="give another port, or 0 for a free one",
        ):
            self._server = _Server((host, port), kind)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://{host}:{self._server.server_address[1]}{PATH}"

    @staticmethod
    def check(host: str, port: int, insecure: bool) -> None:
        """Raise a ConfigError if it must not listen there."""
        if not 0 <= port < 1 << 16:
            raise ConfigError(
                "--metrics",
                "must be a port in [0, 65535]",
                port,
                "leave it out for the default port",
            )
        if host not in _LOOPBACK and not insecure:
            rule = "must be a loopback address: metrics are sent without TLS and token"
            raise ConfigError("--host", rule, host, "add --insecure in a private network")

    def close(self) -> None:
        """Stop listening; requests that are answered at the moment end with the process."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class _Handler(BaseHTTPRequestHandler):
    source: RunSource
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        """Answer `/metrics`, and no other path."""
        is_known = self.path.partition("?")[0] == PATH
        text = exposition(self.source.readings()) if is_known else f"the metrics are at {PATH}\n"
        body = text.encode()
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", CONTENT_TYPE if is_known else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log no request: one comes every few seconds."""
