"""Old names of modules and classes, and a rewriter of programs that use them.

    python tools/renames.py PROGRAM.py...          translate programs to the present names
    python tools/renames.py --move PACKAGE         move the modules of one package, in the old layout
    python tools/renames.py --names                rename the classes and functions of `NAMES` in the checkout

Imports are rewritten by the syntax tree; dotted names and paths of files in text by pattern.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "deepspeed_gear"

# Of each package: old path -> new path, under deepspeed_gear/.
MODULES: dict[str, str] = {
    "config": """
        config/checks config/cross_checks
        config/collect config/transfer
        config/conversion config/dtypes
        config/describe config/describe_options
        config/device config/device_checks
        config/digest config/config_digest
        config/errors config/error_messages
        config/fields config/field_checks
        config/hindsight config/hindsight_checks
        config/burn_in config/burn_in_checks
        config/life config/rate_limits
        config/samplers config/sampler_options
        config/tables config/table_options
    """,
    "ops": """
        ops/trust ops/library_trust
        ops/register ops/register_builders
        ops/fake ops/fake_ops
        selection/philox ops/philox
        ops/reference/collect ops/reference/gather
        ops/reference/draws ops/reference/sharded_draws
        ops/reference/ring ops/reference/ring_table
        ops/reference/rows ops/reference/encode_rows
    """,
    "data": """
        store/dataset data/dataset
        store/dataset_files data/dataset_files
        store/dataset_writer data/dataset_writer
        store/statistics data/dataset_statistics
        store/split data/splits
        store/mapped_files data/mapped_files
        store/trajectory data/trajectory_checks
        store/part data/dataset_part
        store/part_writer data/dataset_part_writer
        store/ingest/__init__ data/ingest/__init__
        store/ingest/common data/ingest/reader
        store/ingest/d4rl data/ingest/d4rl
        store/ingest/minari data/ingest/minari
        store/ingest/minari_table data/ingest/minari_tables
    """,
    "store": """
        store/memory store/shared_memory
        store/forks store/process_bound
        store/named store/named_stores
        store/living store/live_stores
        store/lock store/store_lock
        store/bells store/futex
        store/layout store/memory_layout
        store/spec store/table_spec
        store/extents store/row_allocator
        store/columns store/column_arrays
        store/filling store/dataset_loading
        store/life store/retention
        store/shares store/rate_quotas
        store/native store/native_handle
        store/unfinished store/open_slots
        store/sets store/slot_sets
        store/registration store/cuda_registration
        writer/room store/eviction
        writer/moving store/compaction
        selection/readers store/pins
    """,
    "writer": """
        store/staging writer/staged_rows
        writer/attach writer/attach_writer
        writer/late writer/late_columns
        writer/publishing writer/partial_publish
        writer/vector writer/vector_writer
        writer/writer writer/trajectory_writer
    """,
    "distributed": """
        store/sharding distributed/dataset_shards
        parallel/__init__ distributed/__init__
        parallel/compat distributed/deepspeed_compat
        parallel/exchange distributed/control_plane
        parallel/link distributed/node_channel
        parallel/news distributed/heartbeats
        parallel/plan distributed/read_needs
        parallel/topology distributed/topology
        parallel/watch distributed/failure_detector
        parallel/wire distributed/node_messages
        parallel/transport distributed/device_collectives
        replay/status distributed/batch_barrier
        replay/placement distributed/shard_placement
        parallel/meeting distributed/sharded/selection_agreement
        parallel/nodes distributed/sharded/sharded_selector
        parallel/delivery distributed/sharded/resolution_exchange
        parallel/replicas distributed/sharded/replicated_selector
        parallel/window distributed/sharded/age_window
        parallel/routes distributed/row_exchange/exchange_plan
        parallel/rows distributed/row_exchange/row_reads
        parallel/carrier distributed/row_exchange/row_exchange
        parallel/freight distributed/row_exchange/device_transport
    """,
    "sampling": """
        selection/__init__ sampling/__init__
        selection/anchors sampling/anchors
        selection/cut sampling/selection
        selection/draws sampling/sample_counts
        selection/drawing sampling/selecting
        selection/exclusions sampling/exclusions
        selection/gate sampling/rate_gate
        selection/gated sampling/rate_waiting
        selection/joint sampling/global_rate_gate
        selection/kinds sampling/stream_kinds
        selection/masses sampling/sum_tree
        selection/mixture sampling/mixture
        selection/notice sampling/selection_failure
        selection/peers sampling/selection_readers
        selection/rules sampling/mass_rules
        selection/reports sampling/priority_log
        selection/saved sampling/stream_state
        selection/selector sampling/local_selector
        selection/staleness sampling/staleness
        selection/stream sampling/batch_stream
        selection/priorities sampling/samplers/prioritized
        selection/by_row sampling/samplers/step_priorities
        selection/top sampling/samplers/top_k
        selection/age sampling/samplers/age
    """,
    "batching": """
        collection/__init__ batching/__init__
        collection/batch batching/batch
        collection/burn_in batching/burn_in
        collection/collector batching/gather
        collection/groups batching/gather_groups
        collection/hindsight batching/hindsight
        collection/prefetch batching/prefetcher
        replay/relabelling batching/relabelling
        replay/sizes batching/batch_info
        collection/calibration batching/transfer/calibration
        collection/guards batching/transfer/deferred_release
        collection/lane batching/transfer/cuda_streams
        collection/pieces batching/transfer/copy_engine
        collection/placed batching/transfer/device_gather
        collection/ways batching/transfer/methods
    """,
    "checkpoint": """
        replay/continuation checkpoint/checkpoint
        replay/loading checkpoint/table_loading
        replay/snapshot checkpoint/table_files
        replay/resharding checkpoint/reshard
        replay/position checkpoint/position
        replay/saves checkpoint/save_folders
    """,
    "device": """
        store/ring_table device/ring_table
        selection/on_ring device/ring_selection
        collection/device_batch device/device_batch
        parallel/device_cut device/joint_selection
        parallel/device_feedback device/joint_priorities
        parallel/device_peers device/replica_agreement
        parallel/device_rows device/device_row_exchange
        replay/device_feed device/device_loader
        replay/device_parts device/device_builder
        replay/device_passes device/device_evaluation
        replay/device_reports device/device_priority_log
        replay/device_sharing device/device_sharing
        replay/device_state device/device_checkpoint
    """,
    "replay": """
        replay/device replay/device_replay
        replay/questions replay/can_sample
        replay/feed replay/batch_loader
        replay/maker replay/batch_assembler
        replay/parts replay/builder
        replay/setup replay/config_resolution
        replay/stores replay/attach_stores
        replay/placing replay/device_transfer
        replay/over_nodes replay/node_setup
        replay/passes replay/evaluation
        replay/samplers replay/stream_specs
        replay/feedback replay/priority_updates
        replay/late_reports replay/async_priority_updates
        replay/content replay/table_edits
        replay/contents replay/tables
        replay/versions replay/policy_version
        replay/life replay/retention_options
        replay/clamping replay/clamp_warnings
        replay/preview replay/rank_preview
        replay/statistics replay/replay_statistics
    """,
    "actors": """
        store/request_slots actors/inference_mailbox
        replay/inference actors/inference_loader
        writer/actor actors/actor_process
        writer/board actors/policy_board
        writer/collect actors/start_actors
        writer/simulators actors/inference_client
    """,
    "remote": """
        writer/remote/__init__ remote/__init__
        writer/remote/client remote/remote_writer
        writer/remote/line remote/connection
        writer/remote/outbox remote/send_queue
        writer/remote/security remote/authentication
        writer/remote/sender remote/sender
        writer/remote/server remote/gateway
        writer/remote/sessions remote/sessions
        writer/remote/wire remote/gateway_messages
    """,
    "engine": """
        engine/pipeline engine/pipeline_engine
        engine/resume engine/engine_checkpoint
    """,
    "cli": """
        cli/distribution cli/inspect_distribution
        cli/living cli/inspect_live
        cli/machine cli/doctor_probe
        cli/verdict cli/doctor_report
        cli/network cli/doctor_network
        cli/remote cli/ssh_hosts
        cli/reference cli/config_reference
    """,
}

# Test files: old path -> new path, under tests/.
TESTS: dict[str, str] = {
    "config": """
        unit/test_config unit/config/test_config
        unit/test_config_fields unit/config/test_field_checks
        unit/test_config_refusals unit/config/test_config_refusals
        unit/test_configs_folder unit/config/test_configs_folder
        unit/test_docs_configs unit/config/test_docs_configs
        unit/test_schedules unit/config/test_schedules
        unit/test_reference unit/config/test_config_reference
    """,
    "ops": """
        unit/test_builder unit/ops/test_builder
        unit/test_cuda_compile unit/ops/test_cuda_compile
        unit/test_functional unit/ops/test_functional
        unit/test_host_arithmetic unit/ops/test_host_arithmetic
        unit/test_jit unit/ops/test_jit
        unit/test_native_stub unit/ops/test_native_stub
        unit/test_philox unit/ops/test_philox
        unit/test_stale_locks unit/ops/test_stale_locks
        unit/test_trust unit/ops/test_library_trust
        unit/test_wheel unit/ops/test_wheel
    """,
    "data": """
        unit/test_dataset unit/data/test_dataset
        unit/test_dataset_damage unit/data/test_dataset_damage
        unit/test_finite unit/data/test_finite
        unit/test_ingest unit/data/test_ingest
        unit/test_ingest_broken unit/data/test_ingest_broken
        unit/test_ingest_minari unit/data/test_ingest_minari
        unit/test_parts unit/data/test_dataset_parts
        unit/test_split unit/data/test_splits
    """,
    "store": """
        unit/test_forks unit/store/test_process_bound
        unit/test_layout unit/store/test_memory_layout
        unit/test_life unit/store/test_rate_limiter
        unit/test_lock unit/store/test_store_lock
        unit/test_memory unit/store/test_shared_memory
        unit/test_memory_limits unit/store/test_memory_limits
        unit/test_reaper unit/store/test_reaper
        unit/test_room unit/store/test_eviction
        unit/test_sets unit/store/test_slot_sets
        unit/test_table unit/store/test_table
        unit/test_table_shards unit/store/test_table_shards
    """,
    "sampling": """
        unit/test_anchors unit/sampling/test_anchors
        unit/test_drawn unit/sampling/test_drawn_statistics
        unit/test_joint unit/sampling/test_global_rate_gate
        unit/test_rates unit/sampling/test_rate_waiting
        unit/test_rules unit/sampling/test_mass_rules
        unit/test_samplers unit/sampling/test_samplers
        unit/test_samplers_doc unit/sampling/test_samplers_doc
        unit/test_stream unit/sampling/test_batch_stream
        unit/test_stream_ahead unit/sampling/test_stream_ahead
        unit/priorities/conftest unit/sampling/priorities/conftest
        unit/priorities/test_clamping unit/sampling/priorities/test_clamping
        unit/priorities/test_items unit/sampling/priorities/test_items
        unit/priorities/test_reports unit/sampling/priorities/test_priority_log
        unit/priorities/test_saving unit/sampling/priorities/test_saving
    """,
    "batching": """
        unit/test_batch unit/batching/test_batch
        unit/test_burn_in unit/batching/test_burn_in
        unit/test_collector unit/batching/test_gather
        unit/test_guards unit/batching/test_deferred_release
        unit/test_hindsight unit/batching/test_hindsight
        unit/test_hopper_batches unit/batching/test_hopper_batches
        unit/test_placed_ring unit/batching/test_transfer_ring
        unit/test_prefetch unit/batching/test_prefetcher
    """,
    "distributed": """
        unit/test_compat unit/distributed/test_deepspeed_compat
        unit/test_exchange unit/distributed/test_control_plane
        unit/test_link unit/distributed/test_node_channel
        unit/test_loaded_placement unit/distributed/test_loaded_placement
        unit/test_node_window unit/distributed/test_age_window
        unit/test_placement unit/distributed/test_shard_placement
        unit/test_plan unit/distributed/test_read_needs
        unit/test_routes unit/distributed/test_exchange_plan
        unit/test_sharding unit/distributed/test_dataset_shards
        unit/test_shards unit/distributed/test_sharded_selection
        unit/test_watch unit/distributed/test_failure_detector
        unit/test_wire unit/distributed/test_node_messages
    """,
    "checkpoint": """
        unit/test_saves unit/checkpoint/test_save_folders
        unit/test_snapshot unit/checkpoint/test_table_files
    """,
    "writer": """
        unit/test_autoreset unit/writer/test_autoreset
        unit/test_late unit/writer/test_late_columns
        unit/test_publish unit/writer/test_partial_publish
        unit/test_runs unit/writer/test_runs
    """,
    "device": """
        unit/test_device_data unit/device/test_device_data
        unit/test_device_online unit/device/test_device_online
        unit/test_device_replay unit/device/test_device_replay
        unit/test_device_trace unit/device/test_device_trace
    """,
    "replay": """
        unit/test_feedback unit/replay/test_priority_updates
        unit/test_late_reports unit/replay/test_async_priority_updates
        unit/test_placing unit/replay/test_device_transfer
        unit/test_preview unit/replay/test_rank_preview
        unit/test_replay_mixture unit/replay/test_replay_mixture
        unit/test_views unit/replay/test_views
    """,
    "actors": """
        unit/test_board unit/actors/test_policy_board
        unit/test_collect unit/actors/test_start_actors
        unit/inference/conftest unit/actors/inference/conftest
        unit/inference/test_deaths unit/actors/inference/test_deaths
        unit/inference/test_serving unit/actors/inference/test_serving
    """,
    "remote": """
        unit/test_remote unit/remote/test_remote
    """,
    "engine": """
        unit/test_resume unit/engine/test_engine_checkpoint
    """,
    "cli": """
        unit/test_clean unit/cli/test_clean
        unit/test_doctor unit/cli/test_doctor
        unit/test_init unit/cli/test_init
        unit/test_inspect unit/cli/test_inspect
        unit/test_inspect_stores unit/cli/test_inspect_stores
        unit/test_report unit/cli/test_report
    """,
}

# Classes, functions and constants: old -> new. Each is one name in the whole checkout.
NAMES: dict[str, str] = {}


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(line.split()[0], line.split()[1]) for line in text.splitlines() if line.strip()]


def _dotted(path: str) -> str:
    return f"{PACKAGE}.{path.replace('/', '.')}".removesuffix(".__init__")


class Rewriter:
    """Rewrites text for a set of moved modules.

    Args:
        moves: Old path -> new path, under deepspeed_gear/, without suffix.
    """

    def __init__(self, moves: list[tuple[str, str]]) -> None:
        self.modules = {_dotted(old): _dotted(new) for old, new in moves}
        paths = sorted(moves, key=lambda pair: -len(_dotted(pair[0])))
        self._dotted = [
            (re.compile(rf"(?<![\w.]){re.escape(_dotted(old))}(?!\w|\.\w)"), _dotted(new))
            if old.endswith("__init__")
            else (re.compile(rf"(?<![\w.]){re.escape(_dotted(old))}(?!\w)"), _dotted(new))
            for old, new in paths
        ]
        self._slashed = [
            (re.compile(rf"(?<![\w/])((?:{PACKAGE}/)?){re.escape(old)}\.py\b"), rf"\g<1>{new}.py")
            for old, new in paths
        ]

    def text(self, text: str) -> str:
        """Rewrite dotted names and paths of files."""
        for pattern, new in [*self._dotted, *self._slashed]:
            text = pattern.sub(new, text)
        return text

    def python(self, source: str, module: str | None = None, is_package: bool = False) -> str:
        """Rewrite a Python file; `module` is its old dotted name if it lies in the package."""
        tree = ast.parse(source)
        is_moved = module in self.modules
        edits: list[tuple[int, int, int, int, str]] = []
        renamed: dict[str, str] = {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.level and module is None:
                continue
            parts = module.split(".") if module else []
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            whole = ".".join([*base, *filter(None, [node.module])])
            if whole.split(".")[0] != PACKAGE:
                continue
            lines = self._import(node, whole, renamed, is_moved)
            if lines is not None:
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                text = ("\n" + " " * node.col_offset).join(lines)
                edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, text))
        if renamed:  # a variable or a field may have the module's name: only `module.name` is the module
            used = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
            stored = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
            stored |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
            for node in ast.walk(tree):
                if not isinstance(node, ast.Name) or node.id not in renamed:
                    continue
                if node.id in stored and (node not in used or not isinstance(node.ctx, ast.Load)):
                    print(f"look at {module}:{node.lineno}: {node.id} is not renamed", file=sys.stderr)
                    continue
                end = node.col_offset + len(node.id.encode())
                edits.append((node.lineno, node.col_offset, node.lineno, end, renamed[node.id]))
        lines_ = [line.encode() for line in source.splitlines(keepends=True)]
        for first, column, last, end, text in sorted(edits, reverse=True):
            head, tail = lines_[first - 1][:column], lines_[last - 1][end:]
            lines_[first - 1 : last] = [head + text.encode() + tail]
        return self.text(b"".join(lines_).decode())

    def _import(
        self, node: ast.ImportFrom, whole: str, renamed: dict[str, str], is_moved: bool
    ) -> list[str] | None:
        targets = {a.name: self.modules.get(f"{whole}.{a.name}") for a in node.names}
        if whole in self.modules and not any(targets.values()):
            names = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in node.names)
            return [f"from {self.modules[whole]} import {names}"]
        if not any(targets.values()) and not (is_moved and node.level):
            return None
        lines = []
        for alias in node.names:
            target = targets[alias.name]
            if target is None:
                lines.append(
                    f"from {whole} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                )
                continue
            package, name = target.rsplit(".", 1)
            if alias.asname:
                lines.append(f"from {package} import {name} as {alias.asname}")
                continue
            lines.append(f"from {package} import {name}")
            if name != alias.name:
                renamed[alias.name] = name
        return lines


def _files() -> list[Path]:
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    skipped = (".png", ".hdf5", ".npz", ".svg", ".log")
    return [ROOT / n for n in names if n and not n.endswith(skipped) and "/results/" not in n]


def _git_mv(old: Path, new: Path) -> None:
    new.parent.mkdir(parents=True, exist_ok=True)
    subprocess.check_call(["git", "mv", str(old), str(new)], cwd=ROOT)


def move(packages: Iterable[str]) -> None:
    """Move the modules of packages, and their tests, in the checkout."""
    for package in packages:
        moves = _pairs(MODULES.get(package, ""))
        rewriter = Rewriter(moves)
        for file in _files():
            if file == Path(__file__).resolve() or not file.is_file():
                continue
            source = file.read_text(encoding="utf-8")
            if file.suffix == ".py":
                inside = file.is_relative_to(ROOT / PACKAGE)
                name = _dotted(str(file.relative_to(ROOT / PACKAGE).with_suffix(""))) if inside else None
                if name == PACKAGE + ".__init__":
                    name = PACKAGE
                result = rewriter.python(source, name, file.name == "__init__.py")
            else:
                result = rewriter.text(source)
            if result != source:
                file.write_text(result, encoding="utf-8")
        for old, new in moves:
            _git_mv(ROOT / PACKAGE / f"{old}.py", ROOT / PACKAGE / f"{new}.py")
        for old, new in _pairs(TESTS.get(package, "")):
            _git_mv(ROOT / "tests" / f"{old}.py", ROOT / "tests" / f"{new}.py")


def rename(files: Iterable[Path], names: dict[str, str]) -> None:
    """Rename whole words; those after a dot too."""
    pattern = re.compile(rf"\b({'|'.join(sorted(names, key=len, reverse=True))})\b")
    for file in files:
        if file == Path(__file__).resolve() or not file.is_file():
            continue
        source = file.read_text(encoding="utf-8")
        result = pattern.sub(lambda match: names[match.group(1)], source)
        if result != source:
            file.write_text(result, encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Run a command of the module's docstring."""
    if arguments[:1] == ["--move"]:
        move(arguments[1:])
    elif arguments == ["--names"]:
        rename([file for file in _files() if file.suffix in (".py", ".pyi")], NAMES)
    else:
        rewriter = Rewriter([pair for text in MODULES.values() for pair in _pairs(text)])
        for name in arguments:
            file = Path(name)
            file.write_text(rewriter.python(file.read_text(encoding="utf-8")), encoding="utf-8")
        rename(map(Path, arguments), NAMES)


if __name__ == "__main__":
    main(sys.argv[1:])
