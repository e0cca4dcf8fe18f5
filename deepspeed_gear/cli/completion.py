"""`gear completion SHELL`: a script that completes subcommands and options, for bash, zsh or fish.

The script lists them, so that a completion starts no Python; the commands' own modules import torch.
"""

from __future__ import annotations

import argparse
import importlib
import shlex

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `gear completion`."""
    parser.description = (
        'Print a completion script. bash and zsh: eval "$(gear completion bash)" in ~/.bashrc or, with zsh, '
        "~/.zshrc; fish: gear completion fish > ~/.config/fish/completions/gear.fish."
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    commands = {}
    for name in main.COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"{__package__}.{name}").add_arguments(parser)
        actions = parser._actions
        commands[name] = [one for one in actions if one.option_strings and one.help is not argparse.SUPPRESS]
    if args.shell == "fish":
        for name, options in commands.items():
            about = shlex.quote(main.COMMANDS[name])
            print(f"complete -c gear -f -n __fish_use_subcommand -a {name} -d {about}")
            for option in options:
                flag = option.option_strings[-1].removeprefix("--") + (" -r" if option.nargs != 0 else "")
                about = shlex.quote((option.help or "").replace("%%", "%"))
                print(f"complete -c gear -n '__fish_seen_subcommand_from {name}' -l {flag} -d {about}")
        return 0
    cases = []
    for name, options in commands.items():
        words = " ".join(option.option_strings[-1] for option in options)
        cases.append(f'            {name}) words="{words}" ;;')
    if args.shell == "zsh":
        print("autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit")
    print(_BASH.format(commands=" ".join(commands), options="\n".join(cases)))
    return 0
