"""Comparisons with other libraries: which peers take part, what a run keeps, what the report says. Timing itself needs a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import yaml

from autotune.compare import comparison as bench, report as benchreport
from autotune.compare.comparison import BenchError, Report, Row, Timing, peers_of
from autotune.core.gpu import by_name
from autotune.kernels import default_config
from autotune.compare.peers import PEERS, Peer
from autotune.core.problem import Problem

GPU = by_name("nvidia-h200")
CAUSAL = Problem.parse("forward-bf16-b1-h32x8-q8192-k8192-d128-causal")
SHORT = Problem.parse("forward-bf16-b16-h32x8-q128-k128-d128-causal")
WINDOW = Problem.parse("forward-bf16-b1-h64x8-q8192-k8192-d64-causal-left127-sinks")

DECODE, PAGED, E4M3 = (Problem.parse(f"decode-bf16-b32-h32x8-q1-k8192-d128{cache}") for cache in ("", "-page16", "-kve4m3"))
TINY = Problem.parse("decode-bf16-b1-h32x8-q1-k1024-d128")

KERNEL = default_config(CAUSAL, GPU).kernel


def timing(time_us: float) -> Timing:
    return Timing(time_us, 0.001, 21, 1980, 0.4, "graph over 4 input sets", (time_us, time_us + 1, time_us + 2), 84_000_000)


def row(problem: Problem, ours: float, **peers: float) -> Row:
    return Row(problem, default_config(problem, GPU), "default, predicted", timing(ours),
               {name.replace("_", "-"): timing(time) for name, time in peers.items()}, "nothing better is known")


def report(*rows: Row, skipped=(), groups=None) -> Report:
    return Report("nvidia-h200", rows, tuple(skipped), {"driver": "580.1", "other_processes": 0}, {"torch": "2.9.0"},
                  "autotune bench ...", "2026-01-31 12:00:00 UTC", groups or {})


def test_a_ratio_is_against_the_fastest_peer_of_the_row():
    one = row(CAUSAL, 1000.0, sdpa_flash=2000.0, sdpa_cudnn=1100.0)
    assert one.best_peer == "sdpa-cudnn" and one.ratio == pytest.approx(1.1)


def test_the_summary_is_the_geometric_mean_and_the_worst_of_all_and_of_each_group():
    both = report(row(CAUSAL, 100.0, sdpa_flash=200.0), row(SHORT, 100.0, sdpa_flash=50.0),
                  groups={"short": (SHORT,), "window": (WINDOW,)})
    assert both.summary == {"geomean": pytest.approx(1.0), "worst": 0.5, "short": pytest.approx(0.5), "window": None}


def test_a_row_without_a_peer_has_no_ratio_and_counts_nowhere():
    alone = row(SHORT, 100.0)
    assert alone.ratio is None and alone.best_peer is None and report(alone).summary == {"geomean": None, "worst": None}
    assert report(alone, row(CAUSAL, 100.0, fa3=150.0)).geomean == pytest.approx(1.5)


def test_the_file_has_summary_versions_conditions_and_command(tmp_path):
    path = tmp_path / "result.yaml"
    benchreport.write(report(row(CAUSAL, 1000.0, sdpa_flash=1234.56789), row(SHORT, 10.0),
                             skipped=[(SHORT, "sdpa-cudnn", "it fails"), (WINDOW, "autotune", "our result is wrong")]), path)
    data = yaml.safe_load(path.read_text())
    assert data["summary"] == {"geomean": 1.235, "worst": 1.235, "failed": 1}
    assert data["versions"]["torch"] == "2.9.0" and data["conditions"]["driver"] == "580.1"
    assert data["command"] == "autotune bench ..." and list(data["problems"]) == [CAUSAL.text]
    entry = data["problems"][CAUSAL.text]
    assert entry["sdpa-flash"]["time_us"] == 1235.0 and entry["autotune"]["tflops"] == pytest.approx(549.8, abs=1)
    assert entry["config"]["kernel"] == KERNEL and isinstance(entry["autotune"]["spread"], float)
    assert entry["best_peer"] == "sdpa-flash" and entry["autotune"]["runs_us"] == [1000.0, 1001.0, 1002.0]
    assert data["left_out"][0] == {"problem": SHORT.text, "who": "sdpa-cudnn", "reason": "it fails"}


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(BenchError, match="cannot be written"):
        benchreport.write(report(row(CAUSAL, 1.0, sdpa_flash=1.0)), tmp_path / "missing" / "result.yaml")
    with pytest.raises(BenchError, match="no row has a peer"):
        benchreport.write(report(row(CAUSAL, 1.0)), tmp_path / "result.yaml")
    assert not list(tmp_path.iterdir())


def test_the_table_shows_what_people_ask_for_and_what_was_left_out():
    text = benchreport.show(report(row(CAUSAL, 1000.0, sdpa_flash=1500.0), skipped=[(CAUSAL, "sdpa-cudnn", "it fails")]), GPU)
    ours, peers, summary, why, skipped = text.split("\n\n")
    # 549.8 TFLOP/s of 1070.5; q and out 64 MB each, k and v 16 MB each; 8192 tokens in a millisecond
    assert ours.splitlines()[2].split() == [CAUSAL.text, "1000", "550", "51%", "168", "8.19e+06", "84", KERNEL, "default,",
                                            "predicted"]
    assert peers.splitlines()[2].split() == [CAUSAL.text, "1000", "1500", "1.500"]
    assert summary.startswith("geomean 1.500, worst 1.500:")
    assert why == f"{CAUSAL} ran {KERNEL}: nothing better is known"
    assert skipped == f"not shown: {CAUSAL} by sdpa-cudnn: it fails"


def decode_rows() -> tuple[Row, ...]:
    """1.07 GB in 256 us, or half of it in 150; a cache of 4 MB."""
    reads = {DECODE: 248.0, PAGED: 248.0, E4M3: 124.0, TINY: 2.0}
    ours = {DECODE: 256.0, PAGED: 260.0, E4M3: 150.0, TINY: 5.0}
    peers = {DECODE: {"fa3": 270.0}, PAGED: {"fa3": 280.0}, E4M3: {}, TINY: {"sdpa_cudnn": 9.0}}
    return tuple(replace(row(problem, ours[problem], **peers[problem]), read=timing(reads[problem])) for problem in ours)


def test_decode_steps_stand_beside_a_kernel_that_only_reads():
    both = report(*decode_rows(), groups={"paged_geomean": (PAGED,)})
    assert both.pairs == {"paged_speed": {PAGED: pytest.approx(256 / 260)}, "e4m3_speed": {E4M3: pytest.approx(256 / 150)}}
    assert both.summary == {"geomean": pytest.approx((270 / 256 * 280 / 260 * 9 / 5) ** (1 / 3)),
                            "worst": pytest.approx(270 / 256), "paged_geomean": pytest.approx(280 / 260),
                            "least_read_share": pytest.approx(124 / 150), "least_paged_speed": pytest.approx(256 / 260),
                            "least_e4m3_speed": pytest.approx(256 / 150)}
    ours, peers, summary, pairs, _ = benchreport.show(both, GPU).split("\n\n")
    # 32 * 8192 * 8 * 128 * 2 * 2 = 1.074 GB of keys and values; 32 tokens in 256 us
    assert ours.splitlines()[2].split()[:7] == [DECODE.text, "256.0", "4.19", "248.0", "97%", "1.25e+05", "84"]
    assert len(peers.splitlines()) == 5 and "on 3 problems" in summary
    assert pairs.splitlines() == [f"speed over a contiguous cache: 0.985 x for {PAGED}",
                                  f"speed over a cache of 16 bits: 1.707 x for {E4M3}"]


def test_decode_steps_are_written_without_a_peer_too(tmp_path):
    path = tmp_path / "decode.yaml"
    benchreport.write(report(*decode_rows()), path)
    assert "least_read_share" in path.read_text().split("summary:")[0]
    data = yaml.safe_load(path.read_text())
    assert list(data["problems"]) == [p.text for p in (DECODE, PAGED, E4M3, TINY)]
    assert data["summary"]["least_e4m3_speed"] == 1.707
    entry = data["problems"][E4M3.text]
    assert "ratio" not in entry and entry["e4m3_speed"] == 1.707 and entry["read_share"] == 0.8267
    assert entry["autotune"]["tb_per_s"] == 3.579 and entry["autotune"]["tokens_per_s"] == 213300.0
    assert entry["read"]["time_us"] == 124.0 and entry["read"]["tb_per_s"] == 4.33
    assert data["problems"][PAGED.text]["ratio"] == 1.077 and data["problems"][PAGED.text]["paged_speed"] == 0.9846


def test_a_peer_that_computed_less_says_so():
    less = Timing(1500.0, 0.001, 21, 1980, 0.4, "graph", note="no sink")
    tuned = Row(WINDOW, default_config(WINDOW, GPU), "exact, measured", timing(1000.0), {"fa3": less})
    text = benchreport.show(report(tuned), GPU)
    assert "1500 (no sink)" in text and " ran " not in text


@pytest.mark.parametrize("text, reason", [
    ("forward-bf16-b1-h32x8-q8192-k8192-d128-causal", None),
    ("forward-fp16-b2-h16x16-q512-k4096-d64", None),
    ("forward-bf16-b1-h32x8-q512-k8192-d128-causal", "top-left"),
    ("forward-bf16-b1-h64x8-q8192-k8192-d64-causal-left127", "no windows"),
    ("forward-bf16-b1-h64x8-q8192-k8192-d64-causal-sinks", "no sinks"),
    ("forward-fp32-b1-h8x8-q512-k512-d64", "no fp32"),
    ("decode-bf16-b1-h32x8-q1-k4096-d128", None),
    ("decode-bf16-b1-h32x8-q4-k4096-d128-causal", "top-left"),
    ("decode-bf16-b1-h32x8-q1-k4096-d128-page16", "not paged ones"),
    ("decode-bf16-b1-h32x8-q1-k4096-d128-kve4m3", "no e4m3 cache under bf16 queries"),
])
def test_what_sdpa_cannot_compute(text, reason):
    for name in ("sdpa-flash", "sdpa-cudnn"):
        said = PEERS[name].reject(Problem.parse(text))
        assert said is None if reason is None else reason in said


@pytest.mark.parametrize("name, text, reason", [
    ("fa3", "forward-bf16-b1-h32x8-q512-k8192-d128-causal", None),
    ("fa3", "forward-bf16-b2-h16x16-q8192-k8192-d192x128-causal", None),
    ("fa3", "forward-bf16-b1-h64x8-q8192-k8192-d64-causal-sinks", "no sinks"),
    ("fa3", WINDOW.text, None),
    ("fa4", "forward-bf16-b1-h64x8-q8192-k8192-d64-causal-sinks", None),
    ("fa4", "forward-bf16-b1-h16x8-q8192-k8192-d256-causal-softcap50", None),
    ("fa4", "forward-bf16-b1-h16x8-q8192-k8192-d128-causal-alibi", "no alibi"),
    ("fa3", "forward-bf16-b1-h16x8-q8192-k8192-d260-causal", "head dims to 256"),
    ("fa4", "forward-bf16-b1-h16x8-q8192-k8192-d100-causal", "multiples of 8"),
    ("fa3", "forward-bf16-b4-h16x8-q8192-k8192-d64-causal-varlen", None),
    ("fa4", "forward-bf16-b4-h16x8-q8192-k8192-d64-causal-varlen", "dense keys"),
    ("fa3", "decode-bf16-b32-h32x8-q4-k8192-d128-causal-page16", None),
    ("fa4", "decode-bf16-b32-h32x8-q1-k8192-d128-page16", "dense keys"),
    ("fa3", "decode-bf16-b32-h32x8-q1-k8192-d128-page16-kve4m3", "no e4m3 cache"),
    ("fa3", "forward-bf16-b1-h16x8-q8192-k8192-d64-causal-page16", None),
])
def test_what_flash_attention_cannot_compute(name, text, reason):
    said = PEERS[name].reject(Problem.parse(text))
    assert said is None if reason is None else reason in said


def test_fa3_computes_a_window_with_sinks_without_them_and_says_so():
    served, note = PEERS["fa3"].serves(WINDOW)
    assert note == "no sink" and not served.sinks and served.window_left == 127 and WINDOW.sinks
    assert PEERS["fa3"].serves(CAUSAL) == (CAUSAL, "") and PEERS["fa4"].serves(WINDOW) == (WINDOW, "")


def fake_library(monkeypatch, name: str, result, function: str = "flash_attn_func") -> list:
    """A module called `name` whose `function` records its calls and returns `result`."""
    calls = []
    for part in ("flash_attn", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    setattr(sys.modules[name], function, lambda *arrays, **options: calls.append((arrays, options)) or result)
    return calls


def test_how_fa3_is_called(monkeypatch):
    calls = fake_library(monkeypatch, "flash_attn_interface", ("out", "lse"))
    assert PEERS["fa3"].make(PEERS["fa3"].serves(WINDOW)[0], None, {})("q", "k", "v") == "out"
    assert PEERS["fa3"].make(Problem(seqlen_q=8, seqlen_k=8, softcap=30.0), None, {})("q", "k", "v") == "out"
    assert calls == [(("q", "k", "v"), {"causal": True, "window_size": (127, 0)}),
                     (("q", "k", "v"), {"causal": False, "window_size": (-1, -1), "softcap": 30.0})]


def test_fa3_decodes_over_caches(monkeypatch):
    calls = fake_library(monkeypatch, "flash_attn_interface", ("out", "lse"), "flash_attn_with_kvcache")
    cache = {"cache_seqlens": "lengths", "page_table": "table"}
    assert PEERS["fa3"].make(PAGED, None, cache)("q", "k", "v") == "out"
    assert PEERS["fa3"].make(replace(DECODE, window_left=127), None, {})("q", "k", "v") == "out"
    assert calls == [(("q", "k", "v"), {"causal": False, "window_size": (-1, -1), **cache}),
                     (("q", "k", "v"), {"causal": False, "window_size": (127, -1)})]


@pytest.mark.parametrize("source, function", [("varlen", "flash_attn_varlen_func"), ("page16", "flash_attn_with_kvcache")])
def test_fa3_is_called_with_packed_sequences(monkeypatch, source, function):
    calls = fake_library(monkeypatch, "flash_attn_interface", (["out"],), function)
    problem = Problem.parse(f"forward-bf16-b4-h4x2-q40-k60-d64-causal-{source}")
    places, one = {"cu_seqlens_q": "starts", "max_seqlen_q": 40}, [["q"], ["k"], ["v"]]

    class Out(list):
        def __getitem__(self, index):
            return "whole" if index is None else super().__getitem__(index)

    setattr(sys.modules["flash_attn_interface"], function, lambda *arrays, **options: calls.append((arrays, options)) or (Out(),))
    assert PEERS["fa3"].make(problem, None, places)(*one) == "whole"
    keys = ("k", "v") if source == "varlen" else (["k"], ["v"])
    assert calls == [(("q", *keys), {"causal": True, "window_size": (-1, 0), **places})]


def test_how_fa4_is_called(monkeypatch):
    calls = fake_library(monkeypatch, "flash_attn.cute", "out")
    torch = ModuleType("torch")
    torch.bfloat16 = "bfloat16"
    monkeypatch.setitem(sys.modules, "torch", torch)

    class Sinks:
        def to(self, dtype):
            return f"sinks as {dtype}"

    assert PEERS["fa4"].make(WINDOW, Sinks(), {})("q", "k", "v") == "out"
    assert PEERS["fa4"].make(CAUSAL, None, {})("q", "k", "v") == "out"
    assert calls == [(("q", "k", "v"), {"causal": True, "window_size": (127, 0), "learnable_sink": "sinks as bfloat16"}),
                     (("q", "k", "v"), {"causal": True, "window_size": (None, 0)})]


def fake_run(monkeypatch, rows: dict):
    """`bench.run` with a GPU part that knows its rows: problem -> Row, or an exception."""
    part = ModuleType("autotune.compare.run")

    def measure_row(problem, peers, gpu, config=None):
        part.configs.append(config)
        result = rows[problem]
        if isinstance(result, Exception):
            raise result
        return result, []

    part.measure_row, part.release, part.get_ready = measure_row, lambda: None, lambda problems, peers: None
    part.versions, part.configs = lambda peers: {}, []
    monkeypatch.setitem(sys.modules, "autotune.compare.run", part)
    monkeypatch.setattr("autotune.compare.run", part, raising=False)
    monkeypatch.setattr("autotune.timing.conditions.conditions", lambda: {})
    peer = Peer("sdpa-flash", "sys", "", PEERS["sdpa-flash"].reject, None)
    monkeypatch.setattr(Peer, "missing", lambda self: None)
    return lambda **options: bench.run(list(rows), [peer], GPU, lambda text: None, **options)


def test_a_row_of_ours_that_fails_does_not_cost_the_others(monkeypatch):
    from autotune.device.arrays import AttentionError

    run = fake_run(monkeypatch, {CAUSAL: row(CAUSAL, 1.0, sdpa_flash=2.0), SHORT: AttentionError("no kernel\nfits")})
    result = run()
    assert [r.problem for r in result.rows] == [CAUSAL] and result.failed == ((SHORT, "autotune", "no kernel fits"),)
    assert result.summary["worst"] == 2.0


def test_a_config_can_be_given_for_a_problem(monkeypatch):
    rows = {CAUSAL: row(CAUSAL, 1.0, sdpa_flash=2.0), SHORT: row(SHORT, 1.0, sdpa_flash=2.0)}
    fake_run(monkeypatch, rows)(configs={SHORT: "a config"})
    assert sys.modules["autotune.compare.run"].configs == [None, "a config"]


def test_an_error_that_is_no_sentence_keeps_its_traceback_and_does_not_cost_the_others(monkeypatch, capsys):
    result = fake_run(monkeypatch, {SHORT: RuntimeError("out of\nmemory"), CAUSAL: row(CAUSAL, 1.0, sdpa_flash=2.0)})()
    assert [r.problem for r in result.rows] == [CAUSAL] and result.failed[0][2] == "RuntimeError: out of memory"
    assert "Traceback" in capsys.readouterr().err


def test_problems_without_a_peer_are_left_out_or_stand_alone(monkeypatch):
    run = fake_run(monkeypatch, {CAUSAL: row(CAUSAL, 1.0, sdpa_flash=2.0), WINDOW: row(WINDOW, 3.0)})
    compared = run()
    assert [r.problem for r in compared.rows] == [CAUSAL] and compared.skipped == ((WINDOW, "sdpa-flash", "it has no sinks"),)
    assert not compared.failed
    assert [r.problem for r in run(alone=True).rows] == [CAUSAL, WINDOW]
    run = fake_run(monkeypatch, {E4M3: decode_rows()[2]})
    assert [r.problem for r in run().rows] == [E4M3]
    with pytest.raises(BenchError, match="nothing could be measured: sdpa-flash and .*: it has no sinks"):
        fake_run(monkeypatch, {WINDOW: row(WINDOW, 3.0)})()


def test_unknown_and_missing_peers(monkeypatch):
    with pytest.raises(BenchError, match="no peer is called 'fa9'; known are sdpa-flash, sdpa-cudnn, fa3, fa4"):
        peers_of("sdpa-flash,fa9")
    with pytest.raises(BenchError, match="no peer is called"):
        peers_of(",")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BenchError, match="pip install torch"):
        bench.run([CAUSAL], peers_of("sdpa-flash"), GPU, print)


@pytest.mark.gpu
def test_a_comparison_on_the_gpu(tmp_path):
    pytest.importorskip("torch")
    from autotune.core.gpu import detect

    small = Problem.parse("forward-bf16-b2-h8x2-q1024-k1024-d128-causal")
    sinks = Problem.parse("forward-bf16-b2-h8x2-q1024-k1024-d128-causal-sinks")
    result = bench.run([small, sinks], peers_of("sdpa-flash"), detect(), print)
    assert [row.problem for row in result.rows] == [small] and result.skipped[0][2] == "it has no sinks"
    assert result.rows[0].ours.time_us > 0 and result.rows[0].ratio > 0.2
    benchreport.write(result, tmp_path / "result.yaml")
    assert yaml.safe_load((tmp_path / "result.yaml").read_text())["summary"]["worst"] > 0.2


@pytest.mark.gpu
def test_ours_alone_on_the_gpu_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "autotune.compare.run", raising=False)
    from autotune.core.gpu import detect

    problem = Problem.parse("forward-bf16-b2-h8x2-q1024-k1024-d128-causal-sinks")
    result = bench.run([problem], [], detect(), print, alone=True)
    monkeypatch.delitem(sys.modules, "autotune.compare.run", raising=False)
    assert result.rows[0].ours.time_us > 0 and result.rows[0].ours.error_ratio <= 1
    assert result.rows[0].ours.peak_bytes >= problem.compulsory_bytes
