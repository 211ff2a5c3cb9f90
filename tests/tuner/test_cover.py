"""Covers: the grid, the portfolio, and the way through a worker that needs no GPU."""

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from autotune.core.gpu import by_name
from autotune.core.measurement import Measurement
from autotune.core.problem import Problem
from autotune.cuda import compile
from autotune.database import cover as covers
from autotune.database.lookup import Match
from autotune.tuner import cover
from autotune.tuner.builder import Built
from autotune.tuner.grid import COUNT, anchors, grid
from autotune.tuner.portfolio import CANDIDATES, CHOSEN, candidates_of, choose

GPU = by_name("nvidia-h200")
STATICS = [Problem.parse(text).static for text in (
    "forward-bf16-b1-h8x8-q100-k100-d128-causal", "decode-bf16-b1-h8x8-q1-k100-d64-page16",
    "forward-bf16-b1-h8x8-q500-k500-d64-causal-left127-varlen", "decode-bf16-b1-h8x8-q1-k900-d96-left127-kve4m3",
    "forward-fp32-b1-h8x8-q100-k100-d40", "decode-bf16-b1-h8x8-q4-k900-d256-causal-softcap30")]


@pytest.mark.parametrize("static", STATICS, ids=lambda static: static.text)
def test_a_grid_is_of_its_static_part_and_spread(static):
    problems = grid(static, [], 24)
    assert len(set(problems)) == 24 and {problem.static for problem in problems} == {static}
    assert len({problem.batch for problem in problems}) > 5 and len({problem.seqlen_k for problem in problems}) > 15
    assert len(set(anchors(problems, 5))) == 5
    assert all(problem == problem.simplified() for problem in problems)


@pytest.mark.parametrize("static", STATICS, ids=lambda static: static.text)
def test_candidates_are_legal_and_of_different_families(static):
    from autotune.kernels import KERNELS

    configs = candidates_of(static, grid(static, [], 5), [], GPU)
    assert 3 <= len(configs) <= CANDIDATES
    assert len({KERNELS[config.kernel].family(config) for config in configs}) == len(configs)
    assert not [config for config in configs if KERNELS[config.kernel].illegal(static, config, GPU)]


def test_each_problem_has_a_config_near_its_best():
    times = {"a": [1.0, 2.0, 5.0], "b": [2.0, 1.0, 5.0], "c": [1.02, 1.02, 5.0], "d": [9.0, 9.0, 1.0]}
    assert set(choose(times, 2)) == {"c", "d"}
    assert set(choose(times, 4)) >= {"c", "d"} and "d" in choose(times, 1, always=["d"])


def test_what_cannot_be_timed_is_never_the_best():
    assert choose({"a": [None, None], "b": [3.0, 3.0]}, 1) == ["b"]


@pytest.fixture
def surveyed(monkeypatch, tmp_path):
    def build(self, static, config):
        if "num_stages=4" in config.text:
            return Measurement(outcome="spilled", message="too much")
        return Built(config, SimpleNamespace(sha256=config.digest * 8, source_sha256=config.digest * 8), config.digest * 8)

    monkeypatch.setattr(cover, "TARGET", "fake_surveyor:Surveyor")
    monkeypatch.setattr(cover.Builder, "build", build)
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "13.0.88")
    static = STATICS[1]
    said = []
    parts = iter([cover.part(static, [], [], GPU, lambda problem: True)])
    found = cover.measure(parts, GPU, 0, tmp_path, time.monotonic() + 100, said.append)
    return found, tmp_path, said, static


def test_a_cover_is_measured_written_and_read_again(surveyed):
    from fake_surveyor import true_us

    (found,), folder, _, static = surveyed
    assert len(found.problems) == COUNT and 3 <= len(found.configs) <= CHOSEN and found.raced > len(found.configs)
    assert not any("num_stages=4" in config.text for config in found.configs)
    again = covers.read(covers.file_of(folder, "nvidia-h200", static))
    assert (again.configs, again.problems, again.static) == (found.configs, found.problems, static)
    from autotune.kernels import KERNELS
    for problem, row in zip(again.problems, again.times):
        for config, time_us in zip(again.configs, row):
            fitted = KERNELS[config.kernel].fitted(problem, config, GPU)
            assert time_us == pytest.approx(true_us(problem, fitted), rel=1e-3)


def of_schema(cover, schema):
    """The text of `cover` as it was written then: rows were the times."""
    rows = {line: " ".join(f"{time:.4g}" if time else "-" for time in row) for line, row in zip(covers.as_data(cover)["problems"],
                                                                                              cover.times)}
    data = {**covers.as_data(cover), "schema": schema, "problems": rows}
    del data["raced"]
    return yaml.safe_dump(data, sort_keys=False, width=1000)


def test_a_cover_of_schema_2_is_read_and_measured_again(surveyed, monkeypatch):
    (found,), folder, _, static = surveyed
    path = covers.file_of(folder, "nvidia-h200", static)
    assert cover.current(replace(covers.read(path), sources=todays(found)), GPU)
    path.write_text(of_schema(found, 2))
    again = covers.read(path)
    assert (again.configs, again.problems, again.sources, again.raced) == (found.configs, found.problems, found.sources, 0)
    for row, times in zip(again.times, found.times):
        assert row == pytest.approx(times, rel=1e-3)
    assert not cover.current(replace(again, sources=todays(found)), GPU)


def todays(cover):
    return tuple(compile.source_sha256(cover.static, config, GPU)[:covers.DIGITS] for config in cover.configs)


def test_a_cover_of_schema_1_serves_as_stale(surveyed):
    (found,), folder, _, static = surveyed
    path = covers.file_of(folder, "nvidia-h200", static)
    path.write_text(of_schema(found, 1))
    again = covers.read(path)
    assert again.configs == found.configs and again.problems == found.problems and set(again.sources) == {covers.UNKNOWN}
    binary = SimpleNamespace(sha256="a" * 64, source_sha256=found.sources[0] * 6, nvrtc="13.0.88")
    match = Match(found.configs[0], "near", "measured", found.problems[0], GPU, source=again.sources[0])
    assert match.confirmed(binary).evidence == "stale"
    assert replace(match, source=found.sources[0]).confirmed(binary).evidence == "measured"


def test_what_is_damaged_is_said_not_raised(surveyed):
    _, folder, _, static = surveyed
    path = covers.file_of(folder, "nvidia-h200", static)
    text = path.read_text()
    for damage in (text[:len(text) // 2], text.replace("schema: 3", "schema: 9"), text.replace("schema: 3", "schema: 2"),
                   text.replace("raced: ", "raced: -"), re.sub(r"(-page16: \S+) \d+", r"\1 -3", text, count=1),
                   re.sub(r"(-page16:) \S+", r"\1 0", text, count=1), re.sub(r"(-page16: \S+) \S+", r"\1", text, count=1),
                   text.replace("-page16", "-left9-page16", 1),
                   text.replace("decode_mma", "decode_nothing"), "[]", text.replace("configs:", "configs: []\nx:"), "\x00",
                   text.replace("13.0.88", "new"), "- *a"):
        path.write_text(damage)
        assert isinstance(covers.read(path), str)
    path.unlink()
    assert covers.read(path) is None
