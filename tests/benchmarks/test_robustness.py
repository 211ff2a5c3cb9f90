"""The script that tries bad luck and bad will, in small, and its committed result."""

import json
import random
from pathlib import Path

import hostile
import pytest
import robustness
import yaml


def test_the_result_is_of_a_whole_run():
    summary = yaml.safe_load((robustness.RESULTS / "robustness.yaml").read_text())["summary"]
    assert summary["kills"] >= 300 and summary["hostile_files"] >= 1000
    assert (summary["lost"], summary["tracebacks"], summary["hangs"]) == (0, 0, 0)


def test_mutations_are_the_same_for_a_seed_and_mostly_break_a_file():
    drawn = [[hostile.mutated(robustness.CONFIG, random.Random(seed)) for seed in range(40)] for _ in range(2)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 35

    def broken(data: bytes) -> bool:
        try:
            return json.loads(data) is None
        except (ValueError, RecursionError):
            return True

    assert sum(map(broken, drawn[0])) > 20


@pytest.mark.parametrize("fault, field", [("crash", "tracebacks"), ("raise", "tracebacks"), ("shout", "tracebacks")])
def test_a_reader_that_fails_is_counted(tmp_path, fault, field):
    import os

    def reader(path: Path):
        if fault == "crash":
            os.kill(os.getpid(), 11)
        if fault == "raise":
            raise KeyError("x")
        return "\x1b[2J"

    tally = robustness.Tally()
    path = tmp_path / "a"
    path.write_text("")
    robustness.read_all(tally, [(reader, path, (KeyboardInterrupt,))] * 3)
    assert tally.summary[field] == 3 and tally.summary["hangs"] == 0


def test_a_record_that_is_lost_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(robustness.view, "write", lambda records, folder: (folder / robustness.GPU.name).mkdir(exist_ok=True))
    tally = robustness.Tally()
    robustness.kill_writers(tally, tmp_path, 2, random.Random(0))
    assert tally.summary["lost"] > 0 and tally.summary["kills"] == 2
