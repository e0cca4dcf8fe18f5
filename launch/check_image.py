"""Check the Dockerfile where there is no Docker, and run the steps of a stage in a chroot.

    python launch/check_image.py
    python launch/check_image.py --run cpu --base FOLDER --work FOLDER  # as root

Without `--run`: base images have a tag, copied files are in git and not in .dockerignore, stages
and variables are declared, RUN steps are valid shell and their programs exist. With `--run`: the
steps of the stage and of those that it needs, each stage in an overlay of its base, in mount and
process namespaces of their own; then the image's command. The base is an unpacked one of the image
that FROM names, such as that of `debootstrap --variant=minbase bookworm FOLDER`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NESTED = "GEAR_CHECK_IMAGE"  # set where the namespaces have been made
SETTINGS = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
# Programs that steps of the Dockerfile install, or that its base has and other systems lack.
INSTALLED = {"gear", "pip", "apt-get"}
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")]
VARIABLE = re.compile(r"\$\{?(\w+)\}?")


class Step(NamedTuple):
    """An instruction; `mount` has the parts of RUN --mount=type=bind."""

    line: int
    word: str
    text: str
    mount: dict[str, str]

    def pairs(self) -> dict[str, str]:
        """Return the names and values of ARG or ENV."""
        return dict(pair.split("=", 1) for pair in shlex.split(self.text))


class Stage(NamedTuple):
    """A stage, and the image or earlier stage that it begins with."""

    name: str
    base: str
    steps: list[Step]


def read_stages(text: str) -> list[Stage]:
    """Parse a Dockerfile of named stages. Flags other than --mount stay in the text."""
    stages: list[Stage] = []
    # Comments become blank, so that lines keep their numbers; a continued line is one instruction.
    text = re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)
    for match in re.finditer(r"^([A-Z]+) ((?:.*\\\n+)*.*)$", text, re.MULTILINE):
        word = match[1]
        rest = re.sub(r"\\\n+", " ", match[2])
        if word == "FROM":
            base, name = rest.split(" AS ")
            stages.append(Stage(name, base, []))
            continue
        flag = re.match(r"--mount=type=bind,(\S+)\s+", rest)
        mount = dict(part.split("=", 1) for part in flag[1].split(",")) if flag else {}
        line = text.count("\n", 0, match.start()) + 1
        stages[-1].steps.append(Step(line, word, rest[flag.end() if flag else 0 :].strip(), mount))
    return stages


def context_files(root: Path) -> list[str]:
    """List the files that the build may copy: those in git which .dockerignore does not exclude."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=root, text=True).splitlines()
    ignored: set[str] = set()
    for rule in re.findall(r"^[^#\n]+", (root / ".dockerignore").read_text(), re.MULTILINE):
        pattern = re.escape(rule.lstrip("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        matching = {name for name in names if re.fullmatch(f"{pattern}(/.*)?", name)}
        ignored = (
            ignored - matching if rule.startswith("!") else ignored | matching
        )  # the last rule decides
    return [name for name in names if name not in ignored]


def below(files: list[str], source: str) -> list[str]:
    """List the files of a COPY source: itself, or all in the folder."""
    return [name for name in files if name == source or name.startswith(f"{source}/")]


def is_program(word: str) -> bool:
    """Return whether a shell finds a program, or has a builtin, of this name."""
    return (
        word in INSTALLED
        or not subprocess.run(["sh", "-c", 'command -v "$0" >&2', word], stderr=-3).returncode
    )


def programs_of(script: str) -> list[str]:
    """Return the first word of each command of a script."""
    words = shlex.shlex(f"; {script}", posix=True, punctuation_chars=True)
    words.whitespace_split = True
    kept = [word for word in words if not re.match(r"\w+=", word)]
    return [word for before, word in itertools.pairwise(kept) if set(before) <= set("();|&")]


def problems_of(text: str, files: list[str]) -> list[str]:
    """Return what is wrong with a Dockerfile."""
    problems: list[str] = []
    known: dict[str, dict[str, str]] = {}  # environment of each stage
    for stage in read_stages(text):
        if stage.base not in known and not re.fullmatch(r"[\w./-]+:(?!latest$)[\w.-]+", stage.base):
            problems.append(f"FROM {stage.base}: must be an earlier stage, or an image with a tag")
        environment = known.get(stage.base, SETTINGS).copy()
        arguments = dict[str, str]()
        for step in stage.steps:
            wrong = []
            if step.mount and step.mount["from"] not in known:
                wrong.append(f"must name an earlier stage, got {step.mount['from']}")
            own = re.findall(r"(?:^|[\s;&|])(\w+)=", step.text) if step.word == "RUN" else []
            declared = {*environment, *arguments, *own}
            wrong += [
                f"${name} is not declared"
                for name in VARIABLE.findall(step.text)
                if name not in declared
            ]
            if step.word in ("ARG", "ENV"):
                (environment if step.word == "ENV" else arguments).update(step.pairs())
            elif step.word == "COPY":
                missing = [name for name in step.text.split()[:-1] if not below(files, name)]
                wrong += [f"{name} is not in the context (git, .dockerignore)" for name in missing]
            elif step.word in ("RUN", "CMD"):
                script = step.text if step.word == "RUN" else shlex.join(json.loads(step.text))
                parsed = subprocess.run(["sh", "-n", "-c", script], capture_output=True, text=True)
                wrong += parsed.stderr.splitlines()
                wrong += [
                    f"there is no program {word}"
                    for word in programs_of(script)
                    if not is_program(word)
                ]
            elif step.word != "WORKDIR":
                wrong.append("is not known to this check")
            problems += [f"line {step.line}: {step.word}: {each}" for each in wrong]
        known[stage.name] = environment
    return problems


def mount(*arguments: str | Path) -> None:
    """Mount as the program of this name does."""
    subprocess.run(["mount", *arguments], check=True)


def make_root(folder: Path, layers: list[Path], bound: list[str]) -> Path:
    """Mount an overlay with what Docker gives a container: devices, /proc, 64 MB of /dev/shm."""
    upper, root, work = (folder / each for each in ("upper", "root", "work"))
    for each in (upper, root, work):
        each.mkdir(parents=True)
    options = f"lowerdir={':'.join(map(str, layers))},upperdir={upper},workdir={work}"
    mount("-t", "overlay", "overlay", "-o", options, root)
    mount("-t", "proc", "proc", root / "proc")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "dev")
    for path in [*DEVICES, "/etc/resolv.conf", "/etc/hosts", *bound]:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if Path(path).is_dir() else target.touch()
        mount("--bind", path, target)
        if path not in DEVICES:  # a step must not change the files of this machine
            mount("-o", "remount,bind,ro", target)
    (root / "dev" / "shm").mkdir()
    mount("-t", "tmpfs", "-o", "mode=1777,size=64m", "tmpfs", root / "dev" / "shm")
    return root


class Build:
    """Stages that run in overlays, in one folder; mounted in this process's namespace only."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.files = context_files(ROOT)
        self.work = Path(options.work).absolute()
        self.stages = {
            stage.name: stage for stage in read_stages((ROOT / "Dockerfile").read_text())
        }
        self.layers: dict[str, list[Path]] = {}  # of finished stages, the newest first
        self.places: dict[
            str, tuple[dict[str, str], str]
        ] = {}  # their environment and working directory

    def run(self, name: str) -> None:
        """Run a stage after the ones that it needs."""
        stage = self.stages[name]
        for needed in [stage.base, *(step.mount["from"] for step in stage.steps if step.mount)]:
            if needed in self.stages and needed not in self.layers:
                self.run(needed)
        layers = self.layers.get(stage.base, [Path(self.options.base).absolute()])
        root = make_root(self.work / name, layers, self.options.bind)
        environment, workdir = self.places.get(stage.base, (SETTINGS, "/"))
        given = dict(pair.split("=", 1) for pair in self.options.build_arg)
        arguments = {key: os.environ[key] for key in self.options.env}
        for step in stage.steps:
            start = time.monotonic()
            values = {**arguments, **environment}
            if step.word in ("ARG", "ENV"):
                pairs = {
                    key: VARIABLE.sub(lambda m: values[m[1]], text)  # noqa: B023
                    for key, text in step.pairs().items()
                }
                if step.word == "ENV":
                    environment = {**environment, **pairs}
                else:
                    arguments |= pairs | {key: given[key] for key in pairs if key in given}
            elif step.word == "WORKDIR":
                workdir = step.text
                (root / workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif step.word == "COPY":
                *sources, target = step.text.split()
                for source in sources:
                    for file in below(self.files, source):
                        inner = (
                            os.path.basename(file)
                            if file == source
                            else os.path.relpath(file, source)
                        )
                        to = root / workdir.lstrip("/") / target / inner
                        to.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(ROOT / file, to)
            elif step.word == "RUN":
                if step.mount:
                    (target := root / step.mount["target"].lstrip("/")).mkdir(
                        parents=True, exist_ok=True
                    )
                    mount(
                        "--bind",
                        self.work / step.mount["from"] / "root" / step.mount["source"].lstrip("/"),
                        target,
                    )
                self.chroot(root, step.text, values, workdir)
                if step.mount:
                    subprocess.run(["umount", target], check=True)
            print(
                f"check_image: {time.monotonic() - start:.0f} s, {name}: {step.word} {step.text}",
                flush=True,
            )
        self.layers[name] = [root.with_name("upper"), *layers]
        self.places[name] = (environment, workdir)

    def chroot(self, root: Path, script: str, environment: dict[str, str], workdir: str) -> None:
        """Run a script in a stage's root; a failure ends the build."""
        command = [
            "chroot",
            root,
            "/bin/sh",
            "-c",
            'cd "$0" && exec /bin/sh -c "$1"',
            workdir,
            script,
        ]
        if status := subprocess.run(command, env=environment).returncode:
            sys.exit(f"check_image: exit status {status} of: {script}")

    def show(self, name: str) -> None:
        """Run the image's command, whose status does not count, and print the sizes of
        its layers.
        """
        (command,) = (
            step.text
            for stage in self.stages.values()
            for step in stage.steps
            if step.word == "CMD"
        )
        self.chroot(
            self.work / name / "root",
            f"{shlex.join(json.loads(command))} || true",
            *self.places[name],
        )
        for layer in self.layers[name][:-1]:  # without the base
            size = int(subprocess.check_output(["du", "-xsb", layer], text=True).split()[0])
            print(f"{size / 1e6:7.0f} MB  {layer}")


def main() -> int:
    """Check, then run if that is asked for; the status is 1 where there is a problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", metavar="STAGE", help="run the steps of this stage")
    parser.add_argument("--base", metavar="DIR", help="root file system of the base image")
    parser.add_argument(
        "--work", metavar="DIR", help="folder for the layers, which stay; it must be empty"
    )
    parser.add_argument(
        "--build-arg", metavar="NAME=VALUE", action="append", default=[], help="as docker's"
    )
    parser.add_argument(
        "--env", metavar="NAME", action="append", default=[], help="pass this variable to RUN"
    )
    parser.add_argument(
        "--bind", metavar="PATH", action="append", default=[], help="a path for RUN, read-only"
    )
    options = parser.parse_args()
    if options.run and not (options.base and options.work):
        parser.error("--run needs --base and --work")
    problems = problems_of((ROOT / "Dockerfile").read_text(), context_files(ROOT))
    print(*problems, f"{len(problems)} problems", sep="\n")
    if problems or not options.run:
        return int(bool(problems))
    if NESTED not in os.environ:
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.execvpe("unshare", [*unshare, sys.executable, *sys.argv], {**os.environ, NESTED: "1"})
    build = Build(options)
    build.run(options.run)
    build.show(options.run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
