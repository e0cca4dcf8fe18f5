"""`gear ingest`: turn one or more sources into a data set that training maps in place."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deepspeed_gear.cli import Options, listed
from deepspeed_gear.errors import ConfigError, show_bytes

_PAIRS = {  # options that are repeated: form, example, help
    "split": (
        "NAME=SHARE",
        "eval=0.05",
        "hold out a share of the trajectories; statistics are those of the rest",
    ),
    "rename": ("OLD=NEW", "state=observation", "name of a column in the data set"),
    "dtype": ("COLUMN=DTYPE", "observation=float32", "stored dtype of a column"),
    "tokenize": (
        "COLUMN=MODULE:FUNCTION",
        "messages=chat:encode",
        "function that makes token ids of a text or a chat of a table",
    ),
    "role": ("COLUMN=ROLE", "score=reward", "role of a column"),
}

OPTIONS: Options = {
    "SOURCE": (
        "file or folder, or its address: hf://, s3://, gs:// or https://; for shards of WebDataset "
        "also a pattern, 'part-{000..012}.tar'",
        {"nargs": "+"},
    ),
    "DEST": "folder to make",
    "--format FORMAT": (
        "auto (by the content, default), one of docs/how-to/formats.md, or module:Class",
        {"default": "auto"},
    ),
    "--columns PATTERN[,PATTERN]": (
        "optional columns to keep, e.g. infos.qpos,observation.*; '' for none; !PATTERN to leave "
        "out",
        {"action": "append"},
    ),
    **{
        f"--{option} {form}": (f"{text}, e.g. {example}", {"action": "append", "default": []})
        for option, (form, example, text) in _PAIRS.items()
    },
    "--reward RULE": (
        "rewards of a source without any: none, last=1.0 (at the last step, 0 before) or each=-1"
    ),
    "--episode-id COLUMN": "column of a table of steps with a value for each episode",
    "--group-scope SCOPE": (
        "what group numbers that several files have mean: other groups (file) or the same ones "
        "(all)"
    ),
    "--allow-nan": "allow NaN and infinities, and record it",
    "--split-by-flags": "divide episodes after each step with an end flag, which is refused "
    "inside otherwise",
    "--max-expansion N": (
        "most bytes of arrays for each byte of a source's files, above 256 MiB (default 100)",
        {"type": float, "default": 100.0},
    ),
    "--allow-pickle": (
        "read pickles, of which only arrays and builtins are made",
        {"default": None},
    ),
    "--episode-length N": (
        "time limit of the environment, of a source without flags of it: an episode ends after N "
        "steps",
        {"type": int},
    ),
    "--last-step MEANING": (
        "what the last row of an episode holds, by is_last or another end flag: transition (a step "
        "as any other), observation (only the one after the last step), reward (as observation, "
        "and each row has the reward of the step before it), or action (as reward, and each row "
        "has that step's action, too)"
    ),
    "--images COLUMN[,COLUMN]": (
        "columns of a table with paths of images, or one image as bytes; objects of bytes and path "
        "are found without it",
        {"action": "append"},
    ),
    "--mask NAME": "filter of robomimic's demonstrations, e.g. train",
    "--compress COLUMN[,COLUMN]": (
        "columns of images to store as a zstd frame a row (needs the package zstandard)",
        {"action": "append"},
    ),
    "--threads N": (
        "threads that read sources, write and compute statistics (default: all cores)",
        {"type": int},
    ),
    "--overwrite": "replace a data set at DEST",
    "--append": "add to the data set at DEST",
    "--quiet": "no progress bar and no notes",
}


def run(args: argparse.Namespace) -> int:
    """Ingest the sources, and print the size of the data set."""
    from deepspeed_gear.data.ingest import READERS, ingest, open_source
    from deepspeed_gear.data.ingest.side_by_side import without_surplus
    from deepspeed_gear.data.partial_folder import check_destination
    from deepspeed_gear.data.sources import check_local

    if args.overwrite and args.append:
        raise ConfigError(
            "--append", "must not be given together with --overwrite", None, "drop one"
        )
    check_local("DEST", args.dest)
    check_destination(Path(args.dest), args.overwrite or args.append)
    columns = listed(args.columns)
    own = {name: getattr(args, name, None) for reader in READERS.values() for name in reader.takes}
    pairs = {option: _pairs(args, option) for option in _PAIRS}
    own["images"] = listed(args.images)
    own["tokenize"] = pairs.pop("tokenize") or None
    with ConfigError.on(
        "--split", "must be NAME=SHARE", ValueError, remedy="for example eval=0.05"
    ):
        split = {name: float(share) for name, share in pairs.pop("split").items()}
    names = "reward", "group_scope", "allow_nan", "overwrite", "append", "split_by_flags", "threads"
    options: dict[str, Any] = {**pairs, **{name: getattr(args, name) for name in names}}
    options["compress"] = listed(args.compress)
    naming = {name: pairs[name] or None for name in ("rename", "role")}
    opened = (
        open_source(
            path,
            args.format,
            columns,
            args.max_expansion,
            show_progress=not args.quiet,
            **naming,
            **own,
        )
        for path in args.source
    )
    sources = [*without_surplus(opened)]
    dataset = ingest(sources, args.dest, split=split or None, progress=not args.quiet, **options)
    size = show_bytes(dataset.num_bytes)
    print(f"{dataset.path}: {len(dataset):,} trajectories, {dataset.num_steps:,} steps, {size}")
    return 0


def _pairs(args: argparse.Namespace, option: str) -> dict[str, str]:
    form, example, _ = _PAIRS[option]
    pairs: dict[str, str] = {}
    for pair in getattr(args, option):
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ConfigError(f"--{option}", f"must be {form}", pair, f"for example {example}")
        if name in pairs:
            raise ConfigError(
                f"--{option}", "must give every name once", pair, "remove one of them"
            )
        pairs[name] = value
    return pairs
