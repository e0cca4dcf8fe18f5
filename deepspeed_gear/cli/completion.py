"""`gear completion SHELL`: a script that completes subcommands and options, for bash, zsh or fish.

The script lists them, so that a completion starts no Python; the commands' own modules import torch.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator, Mapping

from deepspeed_gear.cli import main

_BASH = """\
_gear() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{commands}"
    elif [[ $current == -* ]]; then
        case ${{COMP_WORDS[1]}} in
{options}
        esac
    else
        return  # a file
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _gear gear"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `gear completion`."""
    parser.description = (
        'Print a completion script. bash and zsh: eval "$(gear completion bash)" in ~/.bashrc or, with zsh, '
        "~/.zshrc; fish: gear completion fish > ~/.config/fish/completions/gear.fish."
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    options = {name: _options(name) for name in main.COMMANDS}
    print("\n".join(_fish(options)) if args.shell == "fish" else _bash(options, args.shell == "zsh"))
    return 0


def _options(command: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"{__package__}.{command}").add_arguments(parser)
    return [one for one in parser._actions if one.option_strings and one.help is not argparse.SUPPRESS]


def _bash(options: Mapping[str, list[argparse.Action]], is_zsh: bool) -> str:
    cases = []
    for name, actions in options.items():
        words = " ".join(action.option_strings[-1] for action in actions)
        cases.append(f'            {name}) words="{words}" ;;')
    script = _BASH.format(commands=" ".join(options), options="\n".join(cases))
    return f"{_ZSH}\n{script}" if is_zsh else script


def _fish(options: Mapping[str, list[argparse.Action]]) -> Iterator[str]:
    for name, actions in options.items():
        yield f"complete -c gear -f -n __fish_use_subcommand -a {name} -d {shlex.quote(main.COMMANDS[name])}"
        for action in actions:
            flag = action.option_strings[-1].removeprefix("--") + (" -r" if action.nargs != 0 else "")
            help_line = shlex.quote((action.help or "").replace("%%", "%"))
            yield f"complete -c gear -n '__fish_seen_subcommand_from {name}' -l {flag} -d {help_line}"
