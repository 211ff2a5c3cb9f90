"""Reads the config.json facts of tests/data/model-configs.yaml and counts which are read right: results/model-configs.yaml.

    python benchmarks/model_configs.py [--out FILE]

Needs no GPU and takes seconds. `wrong` is a reading that differs from the right one; `refused` one that the reader declines.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from autotune.models.catalogue import LayerKind, ModelError
from autotune.models.derive import Derived, derive

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "data" / "model-configs.yaml"


def configs() -> dict[str, dict]:
    """name -> {config, and what is right: read, left_out, dtype, lengths, or refused}."""
    data = yaml.load(CONFIGS.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: {**entry, "config": expanded(entry["config"])} for name, entry in data.items()}


def expanded(value: object) -> object:
    """`value` with lists written out that repeat: {"x*": [[a, 2], [[b, c], 1]]} is {"x": [a, a, b, c]}."""
    if isinstance(value, dict):
        return {name.removesuffix("*"): _repeated(item) if name.endswith("*") else expanded(item) for name, item in value.items()}
    return value


def _repeated(runs: list) -> list:
    return [item for what, times in runs for item in (what if isinstance(what, list) else [what]) * times]


def line(kind: LayerKind) -> str:
    """One kind of layer as the file of right readings writes it: "32 x 32/8 d128 causal"."""
    dims = str(kind.head_dim) if kind.head_dim == kind.head_dim_v else f"{kind.head_dim}x{kind.head_dim_v}"
    return f"{kind.layers} x {kind.heads_q}/{kind.heads_kv} d{dims} {kind.features}"


def faults(entry: dict, derived: Derived) -> list[str]:
    """In what a reading differs from the right one."""
    left_out = entry.get("left_out", [])
    wanted = [text.split() for text in (left_out if isinstance(left_out, list) else [left_out])]
    differing = []
    if [line(kind) for kind in derived.kinds] != entry["read"]:
        differing.append(f"read {[line(kind) for kind in derived.kinds]}, right is {entry['read']}")
    named = (all(word in said for word in words) for words, said in zip(wanted, derived.left_out))
    if len(wanted) != len(derived.left_out) or not all(named):
        differing.append(f"left out {list(derived.left_out)}, right is {left_out}")
    if derived.dtype != entry.get("dtype", "bf16"):
        differing.append(f"dtype {derived.dtype}, right is {entry.get('dtype', 'bf16')}")
    if "lengths" in entry and [kind.longest or derived.longest for kind in derived.kinds] != entry["lengths"]:
        differing.append(f"lengths {[kind.longest or derived.longest for kind in derived.kinds]}, right is {entry['lengths']}")
    return differing


def verdict(entry: dict) -> tuple[str, str]:
    """("right" | "refused" | "wrong", why)."""
    try:
        derived = derive(entry["config"])
    except ModelError as error:
        return "refused", str(error)
    if "refused" in entry:
        return "wrong", f"read {[line(kind) for kind in derived.kinds]}, but it must be refused"
    differing = faults(entry, derived)
    return ("wrong", "; ".join(differing)) if differing else ("right", "; ".join(map(line, derived.kinds)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "model-configs.yaml")
    out = parser.parse_args().out
    verdicts = {name: verdict(entry) for name, entry in configs().items()}
    count = {word: sum(found == word for found, _ in verdicts.values()) for word in ("right", "refused", "wrong")}
    data = {"command": "python benchmarks/model_configs.py", "summary": {"configs": len(verdicts), **count},
            "refused": {name: why for name, (found, why) in verdicts.items() if found == "refused"},
            "wrong": {name: why for name, (found, why) in verdicts.items() if found == "wrong"}}
    out.write_text(yaml.safe_dump(data, sort_keys=False, width=130, allow_unicode=True), encoding="utf-8")
    print(f"{data['summary']} -> {out}")
    return 1 if count["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
