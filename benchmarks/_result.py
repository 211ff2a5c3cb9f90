"""What the scripts here begin and end with: their options, the GPU at hand, and a result file with the command that makes it
again."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

import yaml

from autotune.core.gpu import Gpu, GpuError, detect

RESULTS = Path(__file__).parent / "results"


def parser(doc: str, name: str) -> argparse.ArgumentParser:
    """A parser with `--out`, by default the file `name` of results/. `doc` is the script's; its first paragraph is shown."""
    made = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    made.add_argument("--out", type=Path, default=RESULTS / name)
    return made


def gpu_at_hand(otherwise: str = "") -> Gpu:
    """The GPU at hand. Exits with 2 and the reason, and `otherwise`, if there is none."""
    try:
        return detect()
    except GpuError as error:
        print(f"{error}{otherwise}", file=sys.stderr)
        raise SystemExit(2) from None


def write(out: Path, gpu: Gpu, summary: dict, facts: dict, header: str = "", **layout) -> None:
    """Writes a result and prints its summary. `layout` is for `yaml.safe_dump`."""
    from autotune.timing.conditions import conditions

    whole = {"summary": summary, "gpu": gpu.name, "conditions": conditions(), "date": date(), "command": command(), **facts}
    out.write_text(header + yaml.safe_dump(whole, **{"sort_keys": False, "default_flow_style": None, "width": 130, **layout}))
    print(summary)


def date() -> str:
    """Now, as results say it."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def command() -> str:
    """The command line that runs, without --out: the file is at its place when people read it."""
    words = sys.argv[1:]
    kept = [word for before, word in zip(["", *words], words) if "--out" not in (before, word) and not word.startswith("--out=")]
    return " ".join(["python benchmarks/" + Path(sys.argv[0]).name, *map(shlex.quote, kept)])
