"""The `gear` command: subcommands, misspelt and empty arguments, errors and the exit status."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from deepspeed_gear import __version__
from deepspeed_gear.cli import add_options
from deepspeed_gear.cli.interrupts import identity, one_interrupt
from deepspeed_gear.errors import ConfigError, GearError, known_names, near_name

COMMANDS = {
    "ingest": "turn an offline data set into the format that gear trains from",
    "export": "write trajectories as Minari, Parquet, JSON lines or npz",
    "split": "divide a data set into parts that nodes keep on their own disks",
    "inspect": "show what a data set, a checkpoint or a running process holds",
    "watch": "show a running job: its tables, its ranks, and what they wait for",
    "preview": "show the batches of every rank of a run, without starting it",
    "simulate": "predict the pace, lag and waste of rollout workers and ranks",
    "init": "write a config and a training script that fit a data set",
    "report": "show the native ops beside DeepSpeed's, and what they are built with",
    "doctor": "check that a machine, or all hosts of a hostfile, are fit to train together",
    "serve": "add trajectories of actors on other machines to this node's store",
    "clean": "remove stores of ended runs from shared memory",
}

_TAKES_EMPTY = ("--columns",)  # '' for no column


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser; only the module of `command` is imported for its arguments."""
    parser = argparse.ArgumentParser(prog="gear", description="Experience replay for DeepSpeed.")
    parser.add_argument("--version", action="version", version=f"gear {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_line in COMMANDS.items():
        module = importlib.import_module(f"{__package__}.{name}") if name == command else None
        text = str(getattr(module, "__doc__", "")).partition("`: ")[2]
        subparser = subparsers.add_parser(
            name, help=help_line, description=text[:1].upper() + text[1:]
        )
        if module is not None:
            add_options(subparser, module.OPTIONS)
            known = [name for action in subparser._actions for name in action.option_strings]
            subparser.set_defaults(run=module.run, known=known)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit status.

    It is 2 after an error that names its remedy, 130 after Ctrl-C, and 141 where the reader of the
    output has exited.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # For "module:Class" in options and configs; appended, so that installed modules come first.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    dest: str | None = None
    before: tuple[int, ...] | None = None
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        if command is not None and command not in COMMANDS:
            raise ConfigError(
                f"gear {command}", "is not a command", None, known_names(command, COMMANDS)
            )
        for number, argument in enumerate(arguments):
            is_empty = not argument or (argument.startswith("--") and argument.endswith("="))
            option = argument[:-1] if argument else arguments[max(0, number - 1)]
            if is_empty and option not in _TAKES_EMPTY:
                name = f"{argument[:-1] or f'argument {number}'} of gear {command}"
                raise ConfigError(
                    name,
                    "must not be empty",
                    None,
                    "a variable of the shell may be unset; the current folder is '.'",
                )
        options, others = build_parser(command).parse_known_args(arguments)
        if others:
            remedy = near_name(others[0], options.known) or f"gear {command} --help lists them"
            raise ConfigError(others[0], f"is not an argument of gear {command}", None, remedy)
        dest = getattr(options, "dest", None)
        before = identity(dest)
        with one_interrupt():
            status: int = options.run(options)
        sys.stdout.flush()
        return status
    except GearError as error:
        print(f"gear: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = ", nothing was kept" if dest else ""
        if identity(dest) != before:
            kept = f", {dest} is complete"
        print(f"gear: interrupted{kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, as in `gear inspect | head`, has exited. Python flushes at exit, which would
        # raise the error a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
