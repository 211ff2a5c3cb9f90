"""What survives bad luck and bad will: kills, writers and compilers at once, hostile files, full disks, folders of other users.

    python benchmarks/robustness.py [--kills N] [--files N] [--seed S] [--out FILE]

Needs no GPU, and NVRTC for a few compiles. Every step runs in forked children with a limit of time. `lost` counts what was
acknowledged and could not be read afterwards; `tracebacks` everything but a result or one sentence, crashes of the process
included; `hangs` what was not done in time. Exit code 1 if any is not 0.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Callable

import yaml
from hostile import mutated, no_files

from autotune.cli.main import main as autotune
from autotune.core.gpu import by_name
from autotune.cuda import cache, compile
from autotune.database import view
from autotune.database.file import dump
from autotune.database.lookup import lookup
from autotune.database.record import GpuKey, Record
from autotune.kernels import KERNELS, default_config
from autotune.core.problem import Problem
from autotune.models.catalogue import ModelError
from autotune.models.hf import read_config
from autotune.models.lists import WorkloadError, read_workload

RESULTS = Path(__file__).parent / "results"
GPU = by_name("nvidia-h200")
KEY = GpuKey.of(GPU)
STEP_S = 60.0  # a child that is not done by then hangs
READ_S = 20  # the same of one file
NOBODY = 65534
BATCH = 50  # files a child reads
WRITES = 8  # of each of 8 writers at once: all are done within the time that one waits for the lock
WORKLOAD = """title: T
summary: {all: [a, b]}
groups:
  a: [forward-bf16-b1-h2x2-q64-k64-d64, forward-bf16-b1-h2x2-q128-k128-d64]
  b: [decode-bf16-b1-h8x1-q1-k4096-d128]
"""
CONFIG = """{"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
 "num_hidden_layers": 32, "max_position_embeddings": 8192, "sliding_window": null,
 "torch_dtype": "bfloat16", "layer_types": null}
"""


def record(number: int) -> Record:
    problem = Problem.parse(f"forward-bf16-b1-h2x2-q{64 + number}-k{64 + number}-d64")
    return Record(
        problem,
        KEY,
        default_config(problem, GPU),
        "measured",
        10.0 + number,
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        9,
        "13.0.88",
        "0" * 64,
        "0.1.0",
    )


def forked(work: Callable[[int], None], kill_after: float | None = None, uid: int = 0) -> tuple[str, bytes]:
    """Runs `work(write end of a pipe)` in a child. Returns (how it ended: done, killed, failed, hung; what it wrote)."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        code = 1
        try:
            if uid:
                os.setgroups([]), os.setgid(uid), os.setuid(uid)
            work(into)
            code = 0
        except BaseException as error:  # whatever it is, it is counted
            os.write(into, f"\n!{type(error).__name__}: {error}"[:500].encode(errors="replace"))
        os._exit(code)
    os.close(into)
    began, killed, written = time.monotonic(), False, b""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        spent = time.monotonic() - began
        if not killed and spent > (STEP_S if kill_after is None else kill_after):
            os.kill(child, signal.SIGKILL)
            killed = True
        time.sleep(0.001)
    while part := os.read(out, 1 << 16):
        written += part
    os.close(out)
    if killed:
        return ("hung" if kill_after is None else "killed"), written
    return ("done" if status == 0 else "failed"), written


class Tally:
    def __init__(self):
        self.summary = Counter(kills=0, lost=0, hostile_files=0, tracebacks=0, hangs=0)
        self.parts: dict[str, dict] = {}
        self.seen: list[str] = []

    def ended(self, how: str, written: bytes = b"") -> None:
        self.summary["tracebacks"] += how == "failed"
        self.summary["hangs"] += how == "hung"
        if how in ("failed", "hung"):
            self.seen.append(f"{how}: {written[-300:].decode(errors='replace')}")


def kill_writers(tally: Tally, folder: Path, count: int, draw: random.Random) -> None:
    """Writers of one database, killed at random; every record that a child acknowledged must be there afterwards."""
    acknowledged, number = set(), 0
    for _ in range(count):

        def work(into: int, first: int = number) -> None:
            for n in range(first, first + 1000):
                view.write([record(n % 400)], folder)
                os.write(into, b"%d " % (n % 400))

        how, written = forked(work, draw.uniform(0.01, 0.4))
        tally.ended(how, written)
        acknowledged |= {int(n) for n in written.split()}
        number += written.count(b" ")
        tally.summary["kills"] += 1
    view.write([record(401)], folder)  # the lock is free
    file = view.read(folder / GPU.name / "forward.yaml")
    there = {r.problem.seqlen_q - 64 for r in file.records}
    left = [p.name for p in (folder / GPU.name).iterdir() if p.name.endswith(".new")]
    tally.summary["lost"] += len(acknowledged - there) + bool(file.error) + len(file.quarantined)
    tally.parts["writers killed"] = {"kills": count, "acknowledged": len(acknowledged), "left behind": len(left)}


def kill_compilers(tally: Tally, folder: Path, count: int, draw: random.Random) -> None:
    """Processes that compile and keep binaries, killed at random; what was kept must be served, unchanged."""
    os.environ["AUTOTUNE_CACHE"] = str(folder)
    kept = set()
    for turn in range(count):

        def work(into: int, turn: int = turn) -> None:
            for n in range(1000):
                name = f"{(turn * 7 + n) % 60:032x}"
                cache.keep(
                    folder / name,
                    {"kernel.cu": name.encode(), "kernel.cubin": name.encode() * 900},
                    cache.Trust.of(folder),
                )
                os.write(into, name.encode() + b" ")

        def real(into: int, turn: int = turn) -> None:
            compile.cached(f'extern "C" __global__ void f(float* x) {{ *x = {turn}; }}', "sm_90")

        how, written = forked(real if turn % 5 == 0 else work, draw.uniform(0.002, 0.05))
        tally.ended(how, written)
        kept |= set(written.decode().split())
        tally.summary["kills"] += 1
    for name in kept:
        files = cache.read_entry(folder / name, ("kernel.cu", "kernel.cubin"), cache.Trust.of(folder))
        tally.summary["lost"] += files != {"kernel.cu": name.encode(), "kernel.cubin": name.encode() * 900}
    tally.parts["compilers killed"] = {"kills": count, "kept": len(kept)}


def kill_tunes(tally: Tally, folder: Path, count: int, draw: random.Random) -> None:
    """Whole predicted tunes, killed at random; the database can be read, and a last tune, left alone, records its winner."""
    command = [
        sys.executable,
        "-m",
        "autotune",
        "tune",
        "--problem",
        "forward-fp32-b1-h1x1-q20-k40-d16",
        "--gpu",
        GPU.name,
    ]
    env = {**os.environ, "AUTOTUNE_DB": str(folder / "db"), "AUTOTUNE_CACHE": str(folder / "cache")}
    for turn in range(count + 1):
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as tune:
            try:
                _, said = tune.communicate(timeout=draw.uniform(0.3, 6) if turn < count else 300)
                tally.summary["tracebacks"] += b"Traceback" in said
            except subprocess.TimeoutExpired:
                tune.kill()
                tally.summary["hangs"] += turn == count
        tally.summary["kills"] += turn < count
        for path in view.paths(folder / "db"):
            tally.summary["lost"] += bool(view.read(path).error)
    found = sum(len(view.read(path).records) for path in view.paths(folder / "db"))
    tally.summary["lost"] += found != 1
    tally.parts["tunes killed"] = {"kills": count, "records": found}


def together(tally: Tally, folder: Path) -> None:
    """8 writers of one database and 8 keepers of the same entries at once."""
    os.environ["AUTOTUNE_CACHE"] = str(folder / "cache")
    gate, children = time.time() + 1, []
    for child in range(8):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                warnings.simplefilter("error")
                cache.tell = lambda *said: (_ for _ in ()).throw(RuntimeError(said))
                for n in range(WRITES):
                    view.write([record(child * WRITES + n)], folder / "db")
                for n in range(100):
                    while time.time() < gate + 3 + n * 0.01:
                        pass
                    cache.keep(folder / "cache" / f"{n:032x}", {"kernel.cu": b"x" * 3000}, cache.Trust(None))
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    tally.summary["tracebacks"] += sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
    records = len(view.read(folder / "db" / GPU.name / "forward.yaml").records)
    entries = sum(
        cache.read_entry(folder / "cache" / f"{n:032x}", ("kernel.cu",), cache.Trust(None)) is not None
        for n in range(100)
    )
    tally.summary["lost"] += (8 * WRITES - records) + (100 - entries)
    tally.parts["together"] = {"writers": 8, "records": records, "keepers": 8, "entries": entries}


class Late(BaseException):
    """A file is not read in time; no reader takes it for an error of its own."""


def _judge(reader: Callable, path: Path, errors: tuple) -> None:
    """Reads one file. Raises whatever is no result and no sentence, `Late` if it takes too long."""

    def late(*_):
        raise Late(f"{path} was not read in {READ_S} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(READ_S)
    try:
        said = reader(path)
    except errors as error:
        said = str(error)
    finally:
        signal.alarm(0)
    if isinstance(said, str) and (len(said) > 3000 or "\x1b" in said.replace(str(path), "")):
        raise AssertionError(f"no sentence: {said[:200]!r}")


def _database(path: Path) -> str:
    file = view.read(path)
    return "; ".join([file.error, *(bad.said for bad in file.quarantined[:2])])


def hostile_files(tally: Tally, folder: Path, count: int, draw: random.Random) -> None:
    shapes = {
        "database": (dump(KEY, "forward", map(record, range(3))), _database, ()),
        "workload": (WORKLOAD, read_workload, WorkloadError),
        "config.json": (CONFIG, read_config, ModelError),
    }
    sizes = Counter()
    names = list(shapes) * (-(-count // len(shapes)))
    for begin in range(0, count, BATCH):
        files = []
        for number in range(begin, min(begin + BATCH, count)):
            text, reader, errors = shapes[names[number]]
            path = folder / f"{names[number]}-{number}"
            path.write_bytes(mutated(text, draw))
            files.append((reader, path, errors or (KeyboardInterrupt,)))
            sizes[names[number]] += 1
        read_all(tally, files)
    things = [
        (reader, path, errors or (KeyboardInterrupt,))
        for path in no_files(folder)
        for _, reader, errors in shapes.values()
    ]
    read_all(tally, things)
    sizes["no file"] = len(things)
    tally.summary["hostile_files"] += sizes.total()
    tally.parts["hostile files"] = dict(sizes) | {"commands": commands(tally, folder, draw)}


def read_all(tally: Tally, files: list) -> None:
    """In a child; if one ends it, the rest are read in another."""
    while files:

        def work(into: int, files: list = files) -> None:
            for reader, path, errors in files:
                _judge(reader, path, errors)
                os.write(into, b".")

        how, written = forked(work)
        tally.ended(how, written)
        files = [] if how == "done" else files[written.split(b"\n")[0].count(b".") + 1 :]


def commands(tally: Tally, folder: Path, draw: random.Random) -> int:
    """The same through the command line, for a sample: exit code 0, 1 or 2, and no traceback."""
    count = 0
    for number in range(24):
        root = folder / f"db-{number}"
        (root / GPU.name).mkdir(parents=True)
        (root / GPU.name / "forward.yaml").write_bytes(mutated(dump(KEY, "forward", map(record, range(3))), draw))
        (root / "workload.yaml").write_bytes(mutated(WORKLOAD, draw))

        def work(into: int, root: Path = root) -> None:
            os.environ["AUTOTUNE_DB"] = str(root)
            for line in (
                ["lookup", str(record(1).problem), "--gpu", GPU.name],
                ["db", "list"],
                [
                    "verify",
                    "--simulate",
                    "--workload",
                    str(root / "workload.yaml"),
                    "--config",
                    "none",
                    "--gpu",
                    GPU.name,
                ],
            ):
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
                    if autotune(line) not in (0, 1, 2) or "\x1b" in said.getvalue():
                        raise AssertionError(line)

        tally.ended(*forked(work))
        count += 3
    return count


def full_disks(tally: Tally, folder: Path) -> None:
    """A database and a cache on disks of 4 to 256 KB: a file system of that size, or a limit on files."""
    outcomes = Counter()
    for size in (4, 8, 16, 32, 64, 128, 256):
        place = folder / f"disk-{size}"
        place.mkdir()
        mounted = (
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}k,mode=755", "none", str(place)], capture_output=True
            ).returncode
            == 0
        )

        def work(into: int, size: int = size, place: Path = place, mounted: bool = mounted) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            if not mounted:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size << 10, size << 10))
            warnings.simplefilter("ignore")
            cache.keep(place / "cache" / ("0" * 32), {"kernel.cu": b"x" * 60_000}, cache.Trust(None))
            for n in range(120):
                try:
                    view.write([record(n)], place / "db")
                except view.DatabaseError:
                    break
                os.write(into, b".")

        try:
            how, written = forked(work)
            tally.ended(how, written)
            path = place / "db" / GPU.name / "forward.yaml"
            there = len(view.read(path).records) if path.exists() else 0
            tally.summary["lost"] += max(written.split(b"\n")[0].count(b".") - there, 0)
            outcomes["mounted" if mounted else "limited"] += 1
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(place)])
    tally.parts["full disks"] = dict(outcomes)


def foreign_folders(tally: Tally, folder: Path) -> None:
    """Another user's cache and database: a call is served, a writer says one sentence. Only root can try it."""
    if os.getuid() != 0:
        tally.parts["foreign folders"] = {"tried": 0, "why": "only root can become another user"}
        return
    source = 'extern "C" __global__ void f(float* x) { *x = 1; }'
    os.environ["AUTOTUNE_CACHE"] = str(folder / "cache")
    compile.cached(source, "sm_90")
    view.write([record(0)], folder / "db")
    tried = 0
    for mode in (0o755, 0o555, 0o700, 0o000, 0o777, 0o1777):
        (folder / "cache").chmod(mode), (folder / "db").chmod(mode)

        def work(into: int) -> None:
            warnings.simplefilter("ignore")
            assert compile.cached(source, "sm_90").image[:4] == b"\x7fELF"
            os.environ["AUTOTUNE_DB"] = str(folder / "db")
            lookup(record(0).problem, GPU)
            try:
                view.write([replace(record(1), time_us=1.0)], folder / "db")
            except view.DatabaseError:
                pass

        tally.ended(*forked(work, uid=NOBODY))
        tried += 1
    tally.parts["foreign folders"] = {"tried": tried}


def run(kills: int, files: int, seed: int) -> Tally:
    tally, draw = Tally(), random.Random(seed)
    compile.nvrtc_version(), lookup(record(0).problem, GPU), len(KERNELS)  # loaded before the forks
    root = Path(tempfile.mkdtemp(prefix="autotune-robustness-"))
    root.chmod(0o755)
    tunes = min(12, kills // 25)
    steps = {
        "writers": lambda at: kill_writers(tally, at, (kills - tunes) * 3 // 5, draw),
        "compilers": lambda at: kill_compilers(tally, at, kills - tunes - (kills - tunes) * 3 // 5, draw),
        "tunes": lambda at: kill_tunes(tally, at, tunes, draw),
        "together": lambda at: together(tally, at),
        "files": lambda at: hostile_files(tally, at, files, draw),
        "disks": lambda at: full_disks(tally, at),
        "foreign": lambda at: foreign_folders(tally, at),
    }
    try:
        for name, step in steps.items():
            began = time.monotonic()
            (root / name).mkdir()
            step(root / name)
            print(f"{name}: {time.monotonic() - began:.0f} s, {dict(tally.summary)}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=320)
    parser.add_argument("--files", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "robustness.yaml")
    args = parser.parse_args()
    began = time.monotonic()
    tally = run(args.kills, args.files, args.seed)
    result = {
        "command": f"python benchmarks/robustness.py --kills {args.kills} --files {args.files} --seed {args.seed}",
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "seconds": round(time.monotonic() - began),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "summary": dict(tally.summary),
        "parts": tally.parts,
    }
    if tally.seen:
        result["seen"] = tally.seen[:20]
    args.out.write_text(yaml.safe_dump(result, sort_keys=False, width=130), encoding="utf-8")
    print(yaml.safe_dump(result["summary"], sort_keys=False), end="")
    return 1 if tally.summary["lost"] or tally.summary["tracebacks"] or tally.summary["hangs"] else 0


if __name__ == "__main__":
    sys.exit(main())
