"""Runs pickles of a grammar through the unpickler of arrays, in child processes whose death is
seen.

    python tests/crash/programs/fuzz_pickles.py --programs 1000000 --seed 0

A program is made of the opcodes, the globals and the states that the unpickler knows, mostly valid,
and then changed at random: opcodes are left out, repeated, exchanged or replaced by any. Each must
give a value of arrays and builtins, or a DataError. A crash, another error or another value prints
the program; else a line of JSON has the counts.
"""

import argparse
import collections
import json
import mmap
import multiprocessing
import os
import pickle as opcodes
import pickletools
import random
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.data.ingest import source_checks
from deepspeed_gear.data.ingest.decoding.array_pickles import load_pickle
from deepspeed_gear.errors import DataError

FLOOR_BYTES = 16 << 20  # that a program may take
MOST_BYTES = 512 << 20  # that a child may gain in all
BATCH = 5000  # programs of a child
GLOBALS = [
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "list"),
    ("builtins", "dict"),
    ("imitation.data.types", "Trajectory"),
    ("builtins", "eval"),
    ("builtins", "bytearray"),
    ("numpy", "frombuffer"),
    ("numpy", "memmap"),
    ("functools", "partial"),
    ("copyreg", "_reconstructor"),
]
SPECS = [
    "f8",
    "f4",
    "i4",
    "u1",
    "b1",
    "?",
    "O",
    "O8",
    "U3",
    "S5",
    "U999999",
    "S0",
    "f16",
    "c16",
    "V8",
    "U",
    "u8",
]
ORDERS = ["C", "F", "K", "A", "", 0, None]
INTEGERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    255,
    2**31 - 1,
    2**31,
    2**40,
    2**62,
    2**63,
    2**64,
    -1,
    -(2**31),
    10**30,
]
# Every opcode with an argument of its kind, also those that are refused.
ANY = [
    *(
        bytes([code])
        for code in b"(.0123N}])laestu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98bRoQd2"
    ),
    b"K\x05",
    b"M\xff\xff",
    b"J\xff\xff\xff\xff",
    b"\x8a\x09" + bytes(9),
    b"G" + bytes(8),
    b"U\x03abc",
    b"C\x08" + bytes(8),
    b"\x96" + struct.pack("<Q", 16) + bytes(16),
    b"\x96" + struct.pack("<Q", 2**40),
    b"X" + struct.pack("<I", 2**31),
    b"h\x00",
    b"h\x03",
    b"q\x00",
    b"q\x03",
    b"r\xff\xff\xff\x7f",
    b"\x82\x01",
    b"\x84\x01\x00\x00\x00",
    b"Pid\n",
    b"cbuiltins\nlist\n",
    b"inumpy\nndarray\n",
    b"p5\n",
    b"g5\n",
    b"I01\n",
    b"L10L\n",
    b"F1e400\n",
    b"Vtext\n",
    b"S'text'\n",
    b"\x95" + struct.pack("<Q", 2**40),
    b"\x80\x05",
]


class Grammar:
    """Makes programs, each a list of opcodes with their arguments."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.program: list[bytes] = []
        self.num_memos = 0

    def make(self) -> bytes:
        self.program = []
        self.num_memos = 0
        self.value(self.rng.randint(1, 4))
        if self.rng.random() < 0.5:
            for _ in range(self.rng.randint(1, 4)):
                self.change()
        return b"\x80\x04" + b"".join(self.program) + b"."

    def change(self) -> None:
        """Leave an opcode out, repeat or exchange it, or put any one in."""
        place = self.rng.randrange(len(self.program) + 1)
        kind = self.rng.randrange(5)
        other = self.rng.randrange(len(self.program) + 1)
        if kind == 0:
            del self.program[place : place + 1]
        elif kind == 1:
            self.program[place:place] = self.program[other : other + self.rng.randint(1, 6)]
        elif kind == 2:
            self.program[place : place + 1], self.program[other : other + 1] = (
                self.program[other : other + 1],
                self.program[place : place + 1],
            )
        else:
            self.program.insert(place, self.rng.choice(ANY))

    def emit(self, *parts: bytes) -> None:
        self.program += parts

    def memo(self) -> None:
        """Keep the value at the top for later."""
        if self.rng.random() < 0.4:
            self.emit(b"\x94" if self.rng.random() < 0.5 else b"q" + bytes([self.num_memos % 256]))
            self.num_memos += 1

    def recall(self) -> bool:
        if self.num_memos and self.rng.random() < 0.25:
            self.emit(b"h" + bytes([self.rng.randrange(self.num_memos) % 256]))
            return True
        return False

    def text(self, text: Any) -> None:
        if not isinstance(text, str):
            self.constant(text)
            return
        content = text.encode()
        self.emit(b"\x8c" + bytes([len(content)]) + content)

    def content(self, size: int) -> None:
        """Push bytes, as each protocol holds them."""
        rng = self.rng
        size = max(0, min(size, 4096)) if rng.random() < 0.95 else rng.randrange(64)
        content = rng.randbytes(size)
        kind = rng.randrange(5)
        if kind == 0:
            self.emit(b"\x96" + struct.pack("<Q", size) + content)
        elif kind == 1:
            self.of("_codecs", "encode")
            text = content.decode("latin1").encode()
            self.emit(b"X" + struct.pack("<I", len(text)) + text)
            self.text("utf-8" if rng.random() < 0.05 else "latin1")
            self.emit(b"\x86R")
        elif kind == 2:
            self.emit(b"T" + struct.pack("<i", size) + content)
        else:
            self.emit(b"B" + struct.pack("<I", size) + content)
        self.memo()

    def constant(self, value: Any) -> None:
        if value is None:
            self.emit(b"N")
        elif isinstance(value, int) and 0 <= value < 256:
            self.emit(b"K" + bytes([value]))
        else:
            packed = opcodes.encode_long(value)
            self.emit(b"\x8a" + bytes([len(packed)]) + packed)

    def of(self, module: str, name: str) -> None:
        if self.rng.random() < 0.01:
            module, name = self.rng.choice(GLOBALS)
        if self.rng.random() < 0.5:
            self.emit(f"c{module}\n{name}\n".encode())
        else:
            self.text(module)
            self.text(name)
            self.emit(b"\x93")

    def dtype(self, spec: str) -> None:
        if self.recall():
            return
        self.of("numpy", "dtype")
        self.text(self.rng.choice(SPECS) if self.rng.random() < 0.05 else spec)
        self.emit(
            *self.rng.choice([(b"\x89\x88\x87",), (b"\x85",), (b"K\x00", b"K\x01", b"\x87")]), b"R"
        )
        self.memo()
        for _ in range(self.rng.choices([0, 1, 2], [6, 13, 1])[0]):
            fields = b")" if self.rng.random() < 0.02 else b"N"
            self.emit(b"(", b"K\x03")
            self.text("x" if self.rng.random() < 0.02 else self.rng.choice("<>|="))
            self.emit(
                b"N", b"N", fields, b"J\xff\xff\xff\xff", b"J\xff\xff\xff\xff", b"K\x00", b"t", b"b"
            )

    def shape(self) -> int:
        """Push a shape; return its number of values."""
        rng = self.rng
        total = 1
        self.emit(b"(")
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            size = rng.choice(INTEGERS) if rng.random() < 0.03 else rng.randrange(5)
            total *= size
            self.constant(size)
        self.emit(b"t")
        return total

    def array(self, depth: int) -> None:
        rng = self.rng
        spec = self.rng.choice(SPECS if self.rng.random() < 0.05 else SPECS[:9])
        size = {"?": 1, "O": 0, "U": 4}.get(spec[0], 1) * int(spec[1:] or 1)
        if rng.random() < 0.4:  # protocol 5
            self.of("numpy.core.numeric", "_frombuffer")
            self.emit(b"(")
            slot = len(self.program)
            self.dtype(spec)
            count = self.shape()
            tail = self.program[slot:]
            del self.program[slot:]
            if rng.random() < 0.9:
                self.content(count * size)
            else:
                self.value(depth - 1)
            self.emit(*tail)
            self.text(rng.choice(ORDERS[:2] if rng.random() < 0.9 else ORDERS))
            if rng.random() < 0.1:
                self.shape()
            self.emit(b"t", b"R")
            self.memo()
            return
        self.of("numpy.core.multiarray", "_reconstruct")
        self.of("numpy", "ndarray")
        self.emit(b"K\x00", b"\x85", b"C\x01b", b"\x87", b"R")
        self.memo()
        for _ in range(rng.choices([0, 1, 2], [1, 25, 1])[0]):
            self.emit(b"(", b"K\x01")
            count = self.shape()
            self.dtype(spec)
            self.emit(rng.choice([b"\x88", b"\x89"]))
            if spec[0] == "O":
                self.emit(b"]", b"(")
                for _ in range(min(max(count, 0), 30)):
                    self.value(depth - 1)
                self.emit(b"e")
            else:
                self.content(count * size)
            self.emit(b"t", b"b")

    def value(self, depth: int) -> None:
        """Push a value, and perhaps do what must be refused to it."""
        rng = self.rng
        if self.recall():
            return
        kind = rng.randrange(12) if depth > 0 else rng.randrange(4, 7)
        if kind < 4:
            self.array(depth)
        elif kind == 4:
            self.constant(rng.choice([None, *INTEGERS]))
        elif kind == 5:
            self.text(rng.choice(["obs", "acts", "", "f8", "__dict__"]))
        elif kind == 6:
            self.emit(rng.choice([b"]", b"}", b")", b"\x8f", b"N", b"G" + bytes(8)]))
            self.memo()
        elif kind == 7:
            self.emit(b"]")
            self.memo()
            self.emit(b"(")
            self.values(depth)
            self.emit(b"e")
        elif kind == 8:
            self.emit(b"}")
            self.memo()
            self.emit(b"(")
            for number in range(rng.randrange(4)):
                self.value(0) if rng.random() < 0.2 else self.text(f"key{number}")
                self.value(depth - 1)
            self.emit(b"u")
        elif kind == 9:
            self.emit(b"(")
            self.values(depth)
            self.emit(b"t")
            self.memo()
        elif kind == 10:
            self.of("numpy._core.multiarray", "scalar")
            self.dtype(spec := rng.choice(SPECS[:5]))
            self.content({"?": 1}.get(spec, int(spec[1:] or 8)))
            self.emit(b"\x86", b"R")
        else:
            self.of("imitation.data.types", "Trajectory")
            if rng.random() < 0.5:
                self.emit(b"(")
                self.values(depth)
                self.emit(b"t", b"\x81")
            else:
                self.emit(b")", b"\x81")
                self.memo()
                if rng.random() < 0.9:
                    self.emit(b"}", b"(")
                    self.text("obs")
                    self.value(depth - 1)
                    self.emit(b"u")
                else:
                    self.value(depth - 1)
                self.emit(b"b")
        if rng.random() < 0.03:
            self.misuse(depth)

    def values(self, depth: int) -> None:
        for _ in range(self.rng.randrange(4)):
            self.value(depth - 1)

    def misuse(self, depth: int) -> None:
        """Store into, call or look into the value at the top, whatever it is."""
        kind = self.rng.randrange(7)
        if kind == 0:
            self.emit(b"K\x00")
            self.value(depth - 1)
            self.emit(b"s")
        elif kind == 1:
            self.value(depth - 1)
            self.emit(self.rng.choice([b"a", b"b"]))
        elif kind == 2:
            self.emit(b"(")
            self.values(depth)
            self.emit(self.rng.choice([b"e", b"u", b"\x90"]))
        elif kind == 3:
            self.emit(self.rng.choice([b"\x98", b"\x97", b")R", b")\x81", b")}\x92", b"2", b"0"]))
        elif kind == 4 and self.num_memos:  # a view of an array
            self.of("numpy.core.numeric", "_frombuffer")
            self.emit(b"(", b"h" + bytes([self.rng.randrange(self.num_memos) % 256]))
            self.dtype("u8")
            self.shape()
            self.text("C")
            self.emit(b"t", b"R", b"\x86")
        elif kind == 5:
            self.emit(b"(", *self.rng.choices(ANY, k=3), b"t", b"R")
        else:
            self.emit(b"\x85" * self.rng.choice([1, 10, 1000]))


def check(value: Any) -> None:
    """Raise unless a value is of arrays and builtins; use each, so that wrong memory is met."""
    known: dict[int, Any] = {}
    left = [value]
    while left:
        one = left.pop()
        if id(one) in known:
            continue
        known[id(one)] = one
        if isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
        elif isinstance(one, np.ndarray):
            assert type(one) is np.ndarray, type(one)
            left += one.ravel().tolist() if one.dtype.hasobject else ()
            np.array(one, copy=True)
            if not one.dtype.hasobject:
                one.tolist()
                one[...] = one.copy()
        assert isinstance(one, np.generic) or type(one) in (
            *(
                type(None),
                bool,
                int,
                float,
                complex,
                str,
                bytes,
                bytearray,
                list,
                tuple,
                dict,
                set,
                frozenset,
            ),
            np.ndarray,
        ), type(one)


def run(seed: int, count: int, shown: mmap.mmap, report: Any) -> None:
    """Run programs, each of which is in shared memory before it starts."""
    source_checks.FLOOR_BYTES = FLOOR_BYTES
    grammar = Grammar(seed)
    counts = collections.Counter[str]()
    # What asks for more gets a MemoryError, and ends no other process.
    held = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (held + 4 * MOST_BYTES, resource.RLIM_INFINITY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        program = grammar.make()
        shown[:8] = struct.pack("<Q", len(program))
        shown[8 : 8 + len(program)] = program
        try:
            value = load_pickle("it", program, source_checks.Expansion(), len(program))
        except DataError as error:
            counts["too large" if "at most" in error.rule else "refused"] += 1
            continue
        check(value)
        counts["arrays" if b"numpy" in program else "values"] += 1
    gained = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert gained < MOST_BYTES, f"{gained} bytes more"
    report.send(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shown = mmap.mmap(-1, 1 << 22)
    context = multiprocessing.get_context("fork")
    total = collections.Counter[str]()
    for number, first in enumerate(range(0, options.programs, BATCH)):
        receiver, sender = context.Pipe(False)
        seed = options.seed * 1_000_003 + number
        count = min(BATCH, options.programs - first)
        child = context.Process(target=run, args=(seed, count, shown, sender))
        child.start()
        child.join()
        if child.exitcode != 0:
            (size,) = struct.unpack("<Q", shown[:8])
            program = shown[8 : 8 + size]
            print(f"seed {seed}: exit status {child.exitcode}; the program is\n{program!r}")
            try:
                pickletools.dis(program, sys.stdout)
            except ValueError as error:
                print(f"... {error}")
            return 1
        total.update(receiver.recv())
    print(json.dumps({"programs": sum(total.values()), **dict(sorted(total.items()))}))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
