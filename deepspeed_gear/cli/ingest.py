"""`gear ingest SOURCE... DEST`: turn D4RL or Minari files into a data set."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepspeed_gear.errors import ConfigError, show_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `gear ingest`."""
    parser.description = "Turn one or more sources into a data set that training maps in place."
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="D4RL HDF5 file, Minari folder or HDF5")
    parser.add_argument("dest", metavar="DEST", help="folder to make")
    parser.add_argument(
        "--format", default="auto", help="auto (by the content, default), d4rl, minari or module:Class"
    )
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="NAME=SHARE",
        help="hold out a share of the trajectories, e.g. eval=0.05; statistics are those of the rest",
    )
    parser.add_argument(
        "--columns",
        action="append",
        metavar="PATTERN[,PATTERN]",
        help="optional columns to keep, e.g. infos.qpos,observation.*; '' for none; default: all",
    )
    parser.add_argument("--allow-nan", action="store_true", help="allow NaN and infinities, and record it")
    parser.add_argument(
        "--split-by-flags",
        action="store_true",
        help="divide episodes after each step with an end flag, which is refused inside otherwise",
    )
    parser.add_argument(
        "--max-expansion",
        type=float,
        default=100.0,
        metavar="N",
        help="most bytes of arrays for each byte of a source's files, above 256 MiB (default 100)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a data set at DEST")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no notes")


def run(args: argparse.Namespace) -> int:
    """Ingest and print one line about the result."""
    from deepspeed_gear.data.dataset_writer import check_destination
    from deepspeed_gear.data.ingest import ingest, open_source

    check_destination(Path(args.dest), args.overwrite)
    split: dict[str, float] = {}
    for option in args.split:
        name, _, share = option.partition("=")
        try:
            value = float(share)
        except ValueError:
            raise ConfigError("--split", "must be NAME=SHARE", option, "for example eval=0.05") from None
        if name in split:
            raise ConfigError("--split", "must name every part once", option)
        split[name] = value
    columns = None
    if args.columns is not None:
        patterns = (pattern.strip() for option in args.columns for pattern in option.split(","))
        columns = [pattern for pattern in patterns if pattern]
    dataset = ingest(
        [open_source(path, args.format, columns, args.max_expansion) for path in args.source],
        args.dest,
        split=split,
        allow_nan=args.allow_nan,
        overwrite=args.overwrite,
        progress=not args.quiet,
        split_by_flags=args.split_by_flags,
    )
    size = show_bytes(dataset.num_bytes)
    print(f"{dataset.path}: {len(dataset):,} trajectories, {dataset.num_steps:,} steps, {size}")
    return 0
