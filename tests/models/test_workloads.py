"""Lists of problems in YAML files: the one that ships, and files that cannot be meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.problem import EXAMPLE, Problem
from autotune.models.lists import WorkloadError, read_workload

ROOT = Path(__file__).parents[2]
ONE, TWO = "forward-bf16-b1-h8x8-q128-k128-d64-causal", "forward-bf16-b1-h8x8-q256-k256-d64-causal"


def file(tmp_path, text) -> Path:
    path = tmp_path / "workload.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_groups_and_what_the_summary_names(tmp_path):
    workload = read_workload(file(tmp_path, f"title: T\nsummary: {{a: x, both: [x, y]}}\n"
                                            f"groups:\n  x: [{ONE}, {ONE}]\n  y: [{TWO}-left500, {ONE}]\n"))
    one, two = Problem.parse(ONE), Problem.parse(TWO)
    assert workload.title == "T" and workload.groups == {"x": (one,), "y": (two, one)}  # left500 of 256 keys hides nothing
    assert workload.problems == (one, two) and workload.summary == {"a": (one,), "both": (one, two)}


def test_the_forward_workload_has_every_row_that_is_published():
    workload = read_workload(ROOT / "benchmarks" / "forward-h200.yaml")
    assert len(workload.problems) == 24 and {"d64_geomean", "window"} <= workload.summary.keys()
    assert {p.head_dim for p in workload.problems} == {32, 64, 80, 96, 128, 160, 192, 256}
    assert all(p.head_dim == 64 and p.mask != "window" for p in workload.summary["d64_geomean"])
    window, = workload.summary["window"]
    assert window.sinks and window.window_left == 127 and window.seqlen_q == 65536
    assert set(workload.summary["without_window_geomean"]) == set(workload.problems) - {window}


def test_the_decode_workload_pairs_pages_and_8_bit_caches_with_the_same_keys():
    workload = read_workload(ROOT / "benchmarks" / "decode-h200.yaml")
    assert {name: len(problems) for name, problems in workload.summary.items()} == {"contiguous_geomean": 11, "paged_geomean": 8}
    paged, e4m3 = workload.groups["paged"], workload.groups["e4m3"]
    assert {p.page_size for p in paged} == {1, 16, 64, 256} and all(p.kv_dtype == "e4m3" for p in e4m3)
    assert {replace(p, kv="dense", page_size=0) for p in paged} == set(workload.groups["beside_paged"])
    plain = [replace(p, kv_dtype="bf16") for p in e4m3]
    assert set(plain) <= set(workload.problems) and all(p.cache_bytes >= 400e6 for p in plain)


@pytest.mark.parametrize("text, words", [
    (b"\xff\xfe", "is not YAML"),
    ("groups: [", "is not YAML: line "),
    ("[" * 5000, "is not YAML"),
    ("groups: !!python/object/apply:os.system [true]", "is not YAML: line 1: could not determine a constructor"),
    ("", "must be a mapping with groups"),
    ("[1, 2]", f"must be a mapping with groups, .* such as `groups: {{mine: \\[{EXAMPLE}\\]}}`"),
    (f"problems: [{ONE}]", "must be a mapping with groups"),
    (f"groups: [{ONE}]", "groups is .* must be a mapping of names"),
    ("groups: {}", "groups is"),
    ("groups: {x: []}", "group x is .* must be a list of problems"),
    ("groups: {x: [llama]}", "group x: problem 'llama' is malformed"),
    ("groups: {x: [[1]]}", "group x"),
    ("groups: {x: [7]}", "group x: 7 is no problem"),
    (f"groups: {{x: [{ONE}]}}\nsummary: {{a: z}}", "summary a names 'z'; the groups are x"),
    (f"groups: {{x: [{ONE}]}}\nsummary: {{a: [[x]]}}", "summary a names"),
    (f"groups: {{x: [{ONE}]}}\nsummary: [x]", "summary is .* must be a mapping"),
])
def test_a_file_that_cannot_be_meant_is_one_sentence(tmp_path, text, words):
    with pytest.raises(WorkloadError, match=words) as error:
        read_workload(file(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_too_large(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        read_workload(tmp_path / "nowhere.yaml")
    with pytest.raises(WorkloadError, match="cannot be read: Is a directory"):
        read_workload(tmp_path)
    with pytest.raises(WorkloadError, match="larger than 1 MB"):
        read_workload(file(tmp_path, "#" * (1 << 20) + "\n"))


def test_calls_of_a_group_are_its_problems_and_add_up(tmp_path):
    path = tmp_path / "calls.yaml"
    one, other = "forward-bf16-b1-h4x4-q64-k64-d64", "forward-bf16-b2-h4x4-q64-k64-d64"
    path.write_text(f"groups: {{a: [{one}], both: [{one}, {other}]}}\ncalls: {{a: 3, both: 0.5}}")
    assert read_workload(path).calls == {Problem.parse(one): 3.5, Problem.parse(other): 0.5}
    for calls in ("{c: 1}", "{a: 0}", "{a: -1}", "{a: many}", "{a: .inf}", "[1]"):
        path.write_text(f"groups: {{a: [{one}]}}\ncalls: {calls}")
        with pytest.raises(WorkloadError, match="calls"):
            read_workload(path)
