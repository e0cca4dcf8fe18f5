"""The arithmetic that CPU and kernels share, compiled alone, against big integers and known
answers.
"""

import random
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from deepspeed_gear.ops import constants, records
from deepspeed_gear.ops.philox import philox_words
from deepspeed_gear.ops.reference.integers import float_bits, log2, multiply_high, signed
from deepspeed_gear.ops.reference.priorities import mass_of
from deepspeed_gear.ops.reference.select import coordinate

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "ops" / "csrc"
MASK = (1 << 64) - 1
EDGES = [0, 1, 2, 3, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 62) - 1, 1 << 63, MASK - 1, MASK]

# Counter and key -> word of philox4x32-10, from kat_vectors of Random123 (c0 c1 c2 c3, k0 k1 -> r0
# r1 r2 r3).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

Ask = Callable[[Iterable[str]], list[list[int]]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Build the host program; it answers a line of numbers for each question."""
    return build(tmp_path_factory)


def build(tmp_path_factory: pytest.TempPathFactory, *more: str) -> Ask:
    """Build the host program, with further flags of the compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("host") / "arithmetic"
    flags = (
        "-std=c++17 -O2 -Wall -Wextra -Werror -fsanitize=undefined -fno-sanitize-recover".split()
    )
    source = ROOT / "tests" / "host" / "arithmetic.cpp"
    built = subprocess.run(
        [compiler, *flags, *more, f"-I{CSRC}", str(source), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr

    def run(questions: Iterable[str]) -> list[list[int]]:
        lines = "\n".join(questions)
        answers = subprocess.run(
            [str(program)], input=lines, capture_output=True, text=True, check=True
        ).stdout
        return [[int(word) for word in line.split()] for line in answers.splitlines()]

    return run


def words(seed: int, count: int) -> list[int]:
    """Edges, and random words of any magnitude."""
    generator = random.Random(seed)
    return [*EDGES, *(generator.getrandbits(64) >> generator.randrange(64) for _ in range(count))]


def test_upper_half_of_a_product(ask: Ask) -> None:
    pairs = [(a, b) for a in words(0, 30) for b in words(1, 30)]
    expected = [a * b >> 64 for a, b in pairs]
    assert ask(f"mulhi {a} {b}" for a, b in pairs) == [[x] for x in expected]
    a, b = torch.tensor([[signed(a), signed(b)] for a, b in pairs]).unbind(1)
    assert [x & MASK for x in multiply_high(a, b).tolist()] == expected


@pytest.mark.parametrize(("counter", "key", "word"), KNOWN)
def test_philox_known_answers(
    ask: Ask, counter: tuple[int, ...], key: tuple[int, int], word: tuple[int, ...]
) -> None:
    seed = key[1] << 32 | key[0]
    number = counter[1] << 32 | counter[0]
    expected = [word[1] << 32 | word[0], word[3] << 32 | word[2]]
    numbers = [number, *words(2, 50)]
    high, low = philox_words(
        seed, torch.tensor([signed(n) for n in numbers]), counter[2], counter[3]
    )
    both = [[h & MASK, w & MASK] for h, w in zip(high.tolist(), low.tolist(), strict=True)]
    assert both[0] == expected
    assert ask(f"philox {seed} {n} {counter[2]} {counter[3]}" for n in numbers) == both


def test_coordinate_is_the_floor_of_the_exact_product(ask: Ask) -> None:
    generator = random.Random(3)
    cases = [(h, w, t) for h in words(4, 12) for w in words(5, 12) for t in words(6, 12)]
    # Words beside the boundary of a coordinate: one less in the last bit must give one less.
    for _ in range(300):
        total = generator.randrange(1, 1 << 63)
        word = -(-(generator.randrange(total) << 128) // total)
        cases += [
            (w >> 64, w & MASK, total) for w in (word - 1, word, word + 1) if 0 <= w < 1 << 128
        ]
    expected = [((h << 64 | w) * t) >> 128 for h, w, t in cases]
    assert ask(f"coordinate {h} {w} {t}" for h, w, t in cases) == [[x] for x in expected]
    h, w, t = torch.tensor([[signed(x) for x in case] for case in cases]).unbind(1)
    assert [x & MASK for x in coordinate(h, w, t).tolist()] == expected


def test_layout_of_a_tree(ask: Ask) -> None:
    sizes = [
        0,
        1,
        31,
        32,
        33,
        1023,
        1024,
        1025,
        32768,
        32769,
        10**6,
        1 << 25,
        (1 << 40) + 1,
        1 << 50,
    ]
    flat = [
        [constants.tree_size(n), *(x for level in constants.tree_levels(n) for x in level)]
        for n in sizes
    ]
    assert ask(f"tree {n}" for n in sizes) == flat


def test_every_half(ask: Ask) -> None:
    answers = ask(["half"])[0]
    for bits in range(1 << 16):
        wide, back = answers[2 * bits : 2 * bits + 2]
        (value,) = struct.unpack("<e", struct.pack("<H", bits))
        if value != value:
            assert wide & 0x7F800000 == 0x7F800000
            assert wide & 0x7FFFFF
            assert back == 0x7E00
        else:
            assert wide == struct.unpack("<I", struct.pack("<f", value))[0]
            assert back == bits


def test_rounding_to_16_bits(ask: Ask) -> None:
    generator = random.Random(7)
    floats = [generator.getrandbits(32) for _ in range(3000)]
    # Beside every kind of tie: of normal and subnormal halves, of bfloats, of both ends of their
    # ranges.
    ties = [0x3F801000, 0x38801000, 0x33000000, 0x33800000, 0x477FF000, 0x477FE000]
    ties += [0x7F7F8000, 0x3F808000, 0x00008000]
    floats += [tie + d | sign for tie in ties for d in (-1, 0, 1) for sign in (0, 1 << 31)]
    for bits, (half, bfloat) in zip(floats, ask(f"narrow {f}" for f in floats), strict=True):
        (value,) = struct.unpack("<f", struct.pack("<I", bits))
        if value != value:
            assert (half, bfloat) == (0x7E00, 0x7FC0)
            continue
        assert half == half_by_python(value)
        low = bits & 0xFFFF
        up = low > 0x8000 or (low == 0x8000 and bits >> 16 & 1)
        assert bfloat == (bits >> 16) + up


def half_by_python(value: float) -> int:
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00


def priorities_and_exponents(count: int) -> list[tuple[int, int]]:
    """Bits of positive finite floats of any magnitude, and exponents as Q62; the common
    ones often.
    """
    generator = random.Random(8)
    one = constants.ONE_Q62
    alphas = [0, one, round(0.6 * one), one - 1, 1]
    edges = [1, 2, 0x7FFFFF, 0x800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF]
    # Beside the ends of the masses with alpha 1: 2^-25 is rounded to 1, 2^-18 is 2^6, 2^16 is 2^40.
    edges += [0x367FFFFF, 0x36800000, 0x36800001]
    edges += [0x32FFFFFF, 0x33000000, 0x33000001, 0x477FFFFF, 0x47800000, 0x47800001]
    cases = [(bits, alpha) for bits in edges for alpha in alphas]
    for _ in range(count):
        # Half of them within the masses' range, where rounding matters.
        low, end = (1, 0x7F800000) if generator.random() < 0.5 else (0x33000000, 0x47800000)
        alpha = (
            generator.choice(alphas) if generator.random() < 0.5 else generator.randrange(one + 1)
        )
        cases.append((generator.randrange(low, end), alpha))
    return cases


def test_masses_are_the_rounded_exact_powers(ask: Ask) -> None:
    mp = pytest.importorskip("mpmath", reason="mpmath gives the exact powers").mp
    cases = priorities_and_exponents(25_000)
    different = 0
    answers = ask(f"mass {bits} {alpha} 40" for bits, alpha in cases)
    with mp.workprec(200):
        for (bits, alpha), (mass, is_clamped) in zip(cases, answers, strict=True):
            (priority,) = struct.unpack("<f", struct.pack("<I", bits))
            exact = mp.mpf(priority) ** (mp.mpf(alpha) / (1 << 62)) * (1 << 24)
            expected = min(max(int(mp.floor(exact + 0.5)), 1), 1 << 40)
            assert is_clamped == (mass < 1 << constants.EXACT_MASS_BITS or exact > 1 << 40)
            assert abs(mass - expected) <= (0 if alpha == constants.ONE_Q62 else 1)
            different += mass != expected
    assert different <= 3


def test_masses_are_the_same_in_both(ask: Ask) -> None:
    priorities: dict[int, list[int]] = {}  # by exponent
    for bits, alpha in priorities_and_exponents(200):
        priorities.setdefault(alpha, []).append(bits)
    asked = []
    expected = []
    for most_bits, (alpha, some) in product((40, 25), priorities.items()):
        asked += [f"mass {bits} {alpha} {most_bits}" for bits in some]
        expected += torch.stack(mass_of(torch.tensor(some), alpha, most_bits), dim=1).tolist()
    assert ask(asked) == expected
    assert (
        ask(f"mass {b} {a} 40" for b in (0, 1 << 31) for a in (0, 1 << 61, 1 << 62)) == [[0, 0]] * 6
    )


def test_mass_never_falls_while_the_priority_rises(ask: Ask) -> None:
    alphas = [round(alpha * constants.ONE_Q62) for alpha in (0.05, 0.37, 0.5, 0.6, 1.0)]
    for falls, highest in ask(f"falls {alpha} 10007" for alpha in alphas):
        assert falls == 0
        assert highest > 1 << 24


def test_weights_are_half_a_last_place_from_the_exact_powers(ask: Ask) -> None:
    mp = pytest.importorskip("mpmath", reason="mpmath gives the exact powers").mp
    generator = random.Random(9)
    cases = []
    for _ in range(3000):
        numerator, count, mass = (
            generator.getrandbits(generator.randrange(1, 63)) + 1 for _ in range(3)
        )
        beta = generator.choice(
            [0, 1 << 62, round(0.4 * 2**62), generator.randrange((1 << 62) + 1)]
        )
        cases.append((numerator, count, mass, beta))
    answers = ask(" ".join(map(str, ("weight", *case))) for case in cases)
    with mp.workprec(200):
        for (numerator, count, mass, beta), (bits,) in zip(cases, answers, strict=True):
            (weight,) = struct.unpack("<f", struct.pack("<I", bits))
            exact = (mp.mpf(numerator) / count / mass) ** (mp.mpf(beta) / (1 << 62))
            assert abs(weight - exact) <= exact * mp.mpf(2) ** -24 * (1 + mp.mpf(2) ** -20)
    same = [n for n, *_ in cases]
    assert {a for (a,) in ask(f"weight {n} 1 {n} {1 << 61}" for n in same)} == {0x3F800000}


def test_powers_as_floats(ask: Ask) -> None:
    """Ties, carries and both ends of the range, against exact fractions."""
    one = 1 << 62
    generator = random.Random(10)
    ends = [
        one,
        one + (1 << 38),
        one + (3 << 38),
        one + (1 << 38) + 1,
        (1 << 63) - 1,
        (1 << 63) - (1 << 38),
    ]
    cases = [(s, e) for s in ends for e in (-1000, -127, -126, -1, 0, 127, 128, 900)]
    cases += [
        (generator.randrange(one, 2 * one), generator.randrange(-130, 130)) for _ in range(500)
    ]
    answers = [bits for (bits,) in ask(f"float {s} {e + 1000}" for s, e in cases)]
    for (significand, exponent), bits in zip(cases, answers, strict=True):
        if exponent < -126:
            assert bits == 0
        elif exponent > 127:
            assert bits == 0x7F7FFFFF
        else:
            # Python rounds a fraction to even; one of 24 bits is a float32.
            kept = round(Fraction(significand, 1 << 39))
            value = Fraction(kept, 1 << 23) * Fraction(2) ** exponent
            largest = Fraction((1 << 24) - 1, 1 << 23) * 2**127
            assert struct.unpack("<f", struct.pack("<I", bits))[0] == min(value, largest)
    both = float_bits(*torch.tensor(cases).unbind(1))
    assert both.tolist() == answers


def test_logarithms_and_powers_at_their_ends(ask: Ask) -> None:
    numbers = [1 << i for i in range(64)]
    assert ask(f"log2 {n}" for n in numbers) == [[i << 54] for i in range(64)]
    some = [w or 1 for w in words(11, 300)]
    assert [x for (x,) in ask(f"log2 {n}" for n in some if n < 1 << 63)] == log2(
        torch.tensor([n for n in some if n < 1 << 63])
    ).tolist()
    fractions = [0, 1, MASK - 1, MASK, *words(12, 300)]
    answers = [x for (x,) in ask(f"exp2 {n}" for n in fractions)]
    assert answers[0] == constants.ONE_Q62
    assert all(constants.ONE_Q62 <= x < 2 * constants.ONE_Q62 for x in answers)
    assert max(answers) == answers[fractions.index(MASK)]


def test_tables_and_polynomials_are_what_the_header_says() -> None:
    """Entries 1 / (1 + i/64), its logarithm, 2^(i/64); interpolation at the Chebyshev nodes of [0,
    1/64].
    """
    mp = pytest.importorskip("mpmath", reason="mpmath solves for the coefficients").mp
    text = (CSRC / "common" / "power.h").read_text()
    one = constants.ONE_Q62
    size = 64

    def entries(name: str) -> list[int]:
        found = re.search(rf"{name}\[1 << kTableBits\] = \{{([^}}]*)\}}", text)
        assert found is not None
        return [int(x, 0) for x in re.findall(r"0x[0-9A-F]+|\d+", found[1])]

    def coefficients(function: Callable[[object], object], terms: int) -> list[int]:
        nodes = [(1 + mp.cos(mp.pi * (2 * k + 1) / (2 * terms))) / (2 * size) for k in range(terms)]
        powers = mp.matrix([[x**i for i in range(terms)] for x in nodes])
        solved = mp.lu_solve(powers, mp.matrix([function(x) for x in nodes]))
        return [int(abs(c) * one) for c in reversed(list(solved))]

    with mp.workprec(400):
        inverses = [int(mp.ceil(mp.mpf(2 * one) * size / (size + i))) for i in range(size)]
        assert entries("kInverse") == inverses
        assert entries("kLog2") == [
            int(mp.nint(-mp.log(mp.mpf(v) / (2 * one), 2) * one)) for v in inverses
        ]
        assert entries("kPower") == [
            int(mp.floor(mp.mpf(2) ** (mp.mpf(i) / size) * one)) for i in range(size)
        ]
        log = coefficients(lambda x: mp.log1p(x) / x / mp.log(2), 7)
        exp = coefficients(lambda x: mp.expm1(x * mp.log(2)) / x, 6)
    assert [int(x) for x in re.findall(r"\bb = (\d+)u", text)] == log + exp


def test_logarithms_and_powers_beside_the_entries_of_their_tables(ask: Ask) -> None:
    """No step down from one entry to the next, and both sides as near to the exact value as
    anywhere.
    """
    mp = pytest.importorskip("mpmath", reason="mpmath gives the exact values").mp
    least = 1 << (64 - 54)  # fractions of logarithms are multiples of it
    fractions = [(i << 58) + d * least for i in range(64) for d in (-1, 0, 1) if i or d >= 0]
    powers = [x for (x,) in ask(f"exp2 {x}" for x in fractions)]
    assert all(a < b for a, b in pairwise(powers))
    numbers = [(1 << 62) + (i << 56) + d for i in range(64) for d in (-2, -1, 0, 1, 2)]
    logs = [x for (x,) in ask(f"log2 {x}" for x in numbers)]
    assert all(a <= b for a, b in pairwise(logs))
    with mp.workprec(200):
        for fraction, power_of_it in zip(fractions, powers, strict=True):
            assert 0 <= mp.mpf(2) ** (mp.mpf(fraction) / (1 << 64)) * (1 << 62) - power_of_it < 4
        for number, log in zip(numbers, logs, strict=True):
            assert abs(mp.log(number, 2) * (1 << 54) - log) <= 0.52


def test_what_a_priority_is(ask: Ask) -> None:
    good = [0, 1, 0x3F800000, 0x7F7FFFFF, 0x80000000]
    bad = [0x7F800000, 0x7FC00000]
    bad += [0x80000001, 0xBF800000, 0xFF800000]
    assert ask(f"priority {b}" for b in good + bad) == [[1]] * 5 + [[0]] * 5


def test_python_repeats_the_headers_numbers() -> None:
    """Enumerators of the headers against `constants` and `records`."""
    text = "".join(
        (CSRC / name).read_text()
        for name in (
            "common/slot.h",
            "common/philox.h",
            "common/window.h",
            "common/power.h",
            "common/ring_layout.h",
        )
    )
    of_ops = ("draws", "gather", "priorities", "rows")
    text += "".join((CSRC / op / f"{op}.h").read_text() for op in of_ops)
    named = {k: int(v) for k, v in re.findall(r"\b(k\w+) = (\d+)", text)}
    prefixes = {
        records.RandomPurpose: "kFor",
        records.MassUnit: "k",
        records.Align: "k",
        records.Pad: "kPad",
        records.UpdateCount: "k",
        records.RingState: "kRing",
    }
    expected = {
        f"{prefix}{name.title().replace('_', '')}": value
        for record, prefix in prefixes.items()
        for name, value in vars(record).items()
        if name.isupper() and name not in ("NUM_WORDS", "EVICTION")  # which the host draws alone
    }
    expected["kByLength"] = expected.pop("kLength")
    expected |= {
        "kAnchor": records.Follows.ANCHOR,
        "kNStep": records.Follows.N_STEP,
        "kGoal": records.Follows.GOAL,
        "kStepRows": records.Source.STEPS,
        "kStepRowsPlusOne": records.Source.STEPS_PLUS_ONE,
        "kTrajectoryRow": records.Source.TRAJECTORY,
        "kTimestep": records.Source.TIMESTEP,
        "kPosition": records.Source.POSITION,
        "kCommitted": records.SlotState.COMMITTED,
        "kNumUpdateCounts": records.UpdateCount.NUM_WORDS,
        "kRingWords": records.RingState.NUM_WORDS,
        "kNotNormalized": records.Normalize.NONE,
        "kByBatch": records.Normalize.BATCH,
        "kByTable": records.Normalize.TABLE,
        "kMassBits": constants.MASS_BITS,
        "kMostMassBits": constants.MOST_MASS_BITS,
        "kMostTotalBits": constants.MOST_TOTAL_BITS,
        "kMostIndices": constants.MOST_INDICES,
    }
    assert {name: named.get(name) for name in expected} == expected
    assert "kMostSteps = int64_t{1} << 40;" in text
    assert constants.MOST_STEPS == 1 << 40
    for record in (records.Slot, records.Resolution):
        body = re.search(rf"struct {record.__name__} \{{([^}}]*)\}}", text)
        assert body is not None
        members = [name.upper() for name in re.findall(r"\b(\w+)(?=[,;])", body[1])]
        words = {name: word for name, word in vars(record).items() if name.isupper()}
        assert [words[name] for name in members] == list(range(words["NUM_WORDS"]))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("second", "third", "least"),
    [
        (MIB, 32 * MIB, 4 * MIB),  # EPYC: a third level for each few cores
        (2 * MIB, 105 * MIB, 105 * MIB // 8),  # Xeon: one for all cores
        (1280 << 10, 54 * MIB, 54 * MIB // 8),
        (2 * MIB, 12 * MIB, 2 * MIB),  # a laptop: never within a core's own cache
        (512 << 10, 0, 4 * MIB),  # not reported
        (0, 0, 4 * MIB),
    ],
)
def test_batches_are_streamed_from_a_part_of_the_third_level(
    ask: Ask, second: int, third: int, least: int
) -> None:
    assert ask([f"streamed {second} {third}"]) == [[least]]


def test_caches_are_read_from_the_system(ask: Ask, tmp_path: Path) -> None:
    def describe(folder: str, *caches: tuple[int, str, str]) -> str:
        for index, values in enumerate(caches):
            place = tmp_path / folder / f"index{index}"
            place.mkdir(parents=True)
            for name, value in zip(("level", "type", "size"), values, strict=True):
                (place / name).write_text(f"{value}\n")
        return f"caches {tmp_path / folder}"

    first = [(1, "Data", "32K"), (1, "Instruction", "32K")]
    shared = describe("shared", *first, (2, "Unified", "1024K"), (3, "Unified", "32768K"))
    odd = describe("odd", *first, (2, "Instruction", "9M"), (2, "Data", "2M"), (3, "Unified", "?"))
    hidden = f"caches {tmp_path / 'hidden'}"
    assert ask([shared, odd, hidden]) == [[MIB, 32 * MIB], [2 * MIB, 0], [0, 0]]
    (answer,) = ask(["machine"])
    assert len(answer) == 4
    for system, processor in zip(answer[:2], answer[2:], strict=True):
        assert processor in (0, system) or system > 0


@pytest.mark.parametrize("flags", [(), ("-mavx",)])
def test_rows_stored_past_the_caches_are_those_of_memcpy(
    tmp_path_factory: pytest.TempPathFactory, flags: tuple[str, ...]
) -> None:
    if flags and " avx " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("a processor without AVX")
    sizes = (0, 1, 63, 64, 65, 127, 128, 4096, 4097, 10_000)
    questions = [f"copied {a} {b} {size}" for a in (0, 1, 5) for b in (0, 1, 33) for size in sizes]
    for right, total in build(tmp_path_factory, *flags)(questions):
        assert right == total
