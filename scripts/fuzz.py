"""Feeds damaged files to every reader: each must accept the file, or refuse it by name.

    python scripts/fuzz.py --count 10000 --seed 0

Each case takes a whole file of one kind, mutates it by a fixed seed (cut, bytes flipped, sizes
forged, pieces swapped, doubled or dropped) and reads it as the program would. It fails on a crash,
on an exception other than Anysize's own, on a message that does not name the file, on more than 2 s
of computing, and on more than 256 MB of memory. Failing files are kept in `--keep`.

It prints a line a kind, and exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import re
import resource
import shutil
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from fuzz_kinds import KINDS, Kind

from anysize.errors import AnysizeError

MOST_SECONDS = 2.0
MOST_MEMORY_BYTES = 256 << 20
SILENCE_S = 30.0
"""Of a worker that has hung: wall clock, so well above `MOST_SECONDS` on a busy machine."""


def main() -> int:
    """Runs the cases and prints the table; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", choices=[k.name for k in KINDS])
    parser.add_argument("--keep", type=Path, default=None, help="folder for files that failed")
    parsed = parser.parse_args()
    kinds = [k for k in KINDS if not parsed.kinds or k.name in parsed.kinds]
    outcomes: Counter[tuple[str, str]] = Counter()
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in kinds:
            (folder / kind.name).mkdir()
            whole = kind.make(folder / kind.name)
            kind.read(whole)  # A reader that refuses the whole file would pass everything.
        failures = _run_all(kinds, folder, parsed, outcomes, slowest)
    print(f"{'kind':<16} {'files':>6} {'accepted':>9} {'refused':>8} {'failed':>7} {'slowest':>9}")
    for kind in kinds:
        counts = {o: outcomes[kind.name, o] for o in ("accepted", "refused", "failed")}
        print(
            f"{kind.name:<16} {sum(counts.values()):>6} {counts['accepted']:>9} "
            f"{counts['refused']:>8} {counts['failed']:>7} {slowest.get(kind.name, 0):>7.2f} s"
        )
    total = sum(outcomes.values())
    print(f"{total} mutated files, {len(failures)} failures.")
    for failure in failures[:40]:
        print(failure)
    return 1 if failures else 0


def _run_all(
    kinds: list[Kind],
    folder: Path,
    parsed: argparse.Namespace,
    outcomes: Counter[tuple[str, str]],
    slowest: dict[str, float],
) -> list[str]:
    """One forked worker at a time goes through the cases; a new one goes on where one died."""
    failures: list[str] = []
    case = 0
    context = multiprocessing.get_context("fork")
    while case < parsed.count:
        ours, theirs = context.Pipe()
        worker = context.Process(
            target=_work, args=(theirs, kinds, folder, case, parsed.count, parsed.seed)
        )
        worker.start()
        theirs.close()
        while case < parsed.count:
            verdict = _next_verdict(ours, worker)
            kind = kinds[case % len(kinds)]
            slowest[kind.name] = max(slowest.get(kind.name, 0.0), verdict.seconds)
            outcomes[kind.name, verdict.outcome] += 1
            if verdict.outcome == "failed":
                failures.append(f"case {case} ({kind.name}): {verdict.message}")
                if parsed.keep:
                    parsed.keep.mkdir(parents=True, exist_ok=True)
                    path = _write_case(kind, folder, case, parsed.seed)
                    shutil.copy(path, parsed.keep / f"{case}-{path.name}")
            case += 1
            if verdict.died:
                break
        ours.close()
        worker.join()
    return failures


@dataclass(frozen=True, slots=True)
class _Verdict:
    outcome: str
    message: str
    seconds: float
    died: bool = False


def _next_verdict(connection: Connection, worker: multiprocessing.process.BaseProcess) -> _Verdict:
    try:
        if connection.poll(SILENCE_S):
            return connection.recv()
        worker.kill()
        return _Verdict("failed", f"hung for {SILENCE_S:g} s", SILENCE_S, died=True)
    except EOFError:
        worker.join()
        return _Verdict("failed", f"the process died with {worker.exitcode}", 0.0, died=True)


def _work(
    connection: Connection, kinds: list[Kind], folder: Path, first: int, count: int, seed: int
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in range(first, count):
        kind = kinds[case % len(kinds)]
        connection.send(_judge(kind, _write_case(kind, folder, case, seed)))


def _judge(kind: Kind, path: Path) -> _Verdict:
    before = _peak_bytes()
    started = time.process_time()
    try:
        kind.read(path)
        outcome, message = "accepted", ""
    except AnysizeError as error:
        outcome, message = "refused", str(error)
        if path.name not in message and kind.named not in message:
            outcome, message = "failed", f"the refusal does not name the file: {message}"
    except BaseException as error:  # noqa: BLE001 (what is looked for)
        outcome, message = "failed", f"{type(error).__name__}: {error}"
    seconds = time.process_time() - started
    grown = _peak_bytes() - before
    if seconds > MOST_SECONDS:
        outcome, message = "failed", f"{seconds:.1f} s of computing; {message}"
    if grown > MOST_MEMORY_BYTES:
        outcome, message = "failed", f"{grown / 2**20:.0f} MB of memory; {message}"
    return _Verdict(outcome, message[:500], seconds)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _write_case(kind: Kind, folder: Path, case: int, seed: int) -> Path:
    """Writes mutant `case` of a kind in place of its whole file; a pure function of the seed."""
    place = folder / kind.name
    pristine = place.with_suffix(".whole")
    if not pristine.exists():
        shutil.copytree(place, pristine)
    rng = np.random.default_rng((seed, case))
    targets = kind.targets(pristine)
    target = targets[int(rng.integers(len(targets)))]
    for file in sorted(pristine.rglob("*")):
        if file.is_file():
            shutil.copy(file, place / file.relative_to(pristine))
    mutated = place / target.relative_to(pristine)
    data = target.read_bytes()
    for _ in range(int(rng.integers(1, 4))):
        data = MUTATIONS[int(rng.integers(len(MUTATIONS)))](data, rng)
    mutated.write_bytes(data)
    return mutated


def _cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(0, len(data) + 1))]


def _flip(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        if changed:
            changed[int(rng.integers(len(changed)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _flip_near_the_start(data: bytes, rng: np.random.Generator) -> bytes:
    """Headers are short and rule over everything; plain flips would seldom meet them."""
    return _flip(data[:128], rng) + data[128:]


def _forge_binary_size(data: bytes, rng: np.random.Generator) -> bytes:
    """Writes a huge, negative or zero number over some bytes."""
    if len(data) < 8:
        return data
    at = int(rng.integers(0, min(len(data) - 8, 4096) + 1))
    form = str(rng.choice(["<I", ">I", "<H", ">H", "<Q"]))
    largest = 2 ** (8 * struct.calcsize(form)) - 1
    number = int(rng.choice([0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**63]))
    forged = struct.pack(form, min(number, largest))
    return data[:at] + forged + data[at + len(forged) :]


def _forge_text_number(data: bytes, rng: np.random.Generator) -> bytes:
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?", data[:20000]))
    if not numbers:
        return _forge_binary_size(data, rng)
    found = numbers[int(rng.integers(len(numbers)))]
    forged = (b"-1", b"0", b"99999999", b"1e400", b"9" * 30, b"NaN", b"null", b"[]", b'"x"', b"0.5")
    return data[: found.start()] + forged[int(rng.integers(len(forged)))] + data[found.end() :]


def _swap(data: bytes, rng: np.random.Generator) -> bytes:
    a, b, c, d = sorted(int(i) for i in rng.integers(0, len(data) + 1, 4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _double(data: bytes, rng: np.random.Generator) -> bytes:
    a, b = sorted(int(i) for i in rng.integers(0, len(data) + 1, 2))
    return data[:b] + data[a:b] + data[b:]


def _drop(data: bytes, rng: np.random.Generator) -> bytes:
    a, b = sorted(int(i) for i in rng.integers(0, len(data) + 1, 2))
    return data[:a] + data[b:]


def _png_chunks(data: bytes, rng: np.random.Generator) -> bytes:
    """Forges the header of a PNG, or swaps chunks, with checksums that are right."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _swap(data, rng)
    chunks: list[tuple[bytes, bytes]] = []
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    if not chunks:
        return data
    if rng.random() < 0.5 and len(chunks[0][1]) == 13:
        extents = [0, 1, 7, 64, 65536, 1 << 20, (1 << 31) - 1]
        width, height = (int(e) for e in rng.choice(extents, 2))
        depth, colour = int(rng.choice([1, 2, 4, 8, 16, 3])), int(rng.integers(0, 8))
        chunks[0] = (b"IHDR", struct.pack(">IIBB", width, height, depth, colour) + b"\0\0\0")
    else:
        i, j = (int(k) for k in rng.integers(0, len(chunks), 2))
        chunks[i], chunks[j] = chunks[j], chunks[i]
    out = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    out.seek(8)
    for kind, body in chunks:
        out.write(struct.pack(">I", len(body)) + kind + body)
        out.write(struct.pack(">I", zlib.crc32(kind + body)))
    return out.getvalue()


def _safetensors_header(data: bytes, rng: np.random.Generator) -> bytes:
    """Changes a number in the header, and keeps its length right."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        json.loads(data[8 : 8 + length])
    except (struct.error, ValueError, UnicodeDecodeError, OverflowError):
        return _forge_text_number(data, rng)
    header = _forge_text_number(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


MUTATIONS: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (
    _cut,
    _flip,
    _flip_near_the_start,
    _forge_binary_size,
    _forge_text_number,
    _swap,
    _double,
    _drop,
    _png_chunks,
    _safetensors_header,
)


if __name__ == "__main__":
    sys.exit(main())
