"""The part of bench that runs on the GPU, on a GPU made of numpy: what is judged, what is timed, and what is left out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy")

from autotune.compare import run  # noqa: E402
from autotune.compare.comparison import OURS  # noqa: E402
from autotune.core.gpu import by_name  # noqa: E402
from autotune.check.inputs import make_inputs  # noqa: E402
from autotune.kernels import candidates, default_config  # noqa: E402
from autotune.core.measurement import Measurement  # noqa: E402
from autotune.check.numerics import from_float32  # noqa: E402
from autotune.compare.peers import Peer  # noqa: E402
from autotune.core.problem import Problem  # noqa: E402
from autotune.check.reference import expect  # noqa: E402

GPU = by_name("nvidia-h200")
PROBLEM = Problem.parse("forward-bf16-b1-h4x2-q96-k96-d32-causal-left20-sinks")


def exact(inputs):
    """The right answer, as an array like a kernel's output."""
    expected = expect(inputs)
    p = inputs.problem
    out = np.zeros((*inputs.layout.rows, p.heads_q, p.head_dim_v), np.float32)
    outer, rows, heads = (np.broadcast_to(index, expected.skip.shape) for index in expected.index)
    out[outer[~expected.skip], rows[~expected.skip], heads[~expected.skip]] = expected.out[~expected.skip]
    return from_float32(np, out, p.out_dtype)


UNCAPTURABLE: list = []  # not empty: nothing can be captured


class FakeBench:
    """Two input sets; a candidate takes as many microseconds as its name has letters. Keeps the order of the runs."""

    orders: list = []

    def __init__(self, problem, gpu, sequences=None):
        first = make_inputs(problem, "random", 0, np, sequences)
        self.sets = [SimpleNamespace(inputs=first), SimpleNamespace(inputs=replace(first, q=first.q.copy()))]
        self.stream, self.graph = nullcontext(), True

    def can_capture(self, launch):
        launch(0)
        return len(self.sets) == 2 and not UNCAPTURABLE

    def interleave(self, candidates, rounds):
        self.orders.append([candidate.name for candidate in candidates])
        assert all(candidate.capturable != bool(UNCAPTURABLE) for candidate in candidates)
        for candidate in candidates:
            candidate.launch(1)
        run = len(self.orders)
        return [Measurement.of_samples([len(candidate.name) + run] * rounds, policy="fake") for candidate in candidates]


@pytest.fixture
def gpu(monkeypatch):
    """`gpu.ours` is what our kernel returns for PROBLEM."""
    state = SimpleNamespace(ours=exact)
    match = SimpleNamespace(config=default_config(PROBLEM, GPU), tier="default", evidence="predicted", why="because")
    FakeBench.orders = []
    monkeypatch.setattr(run, "torch", None)
    monkeypatch.setattr(run, "Bench", FakeBench)
    monkeypatch.setattr(run, "prepare", lambda problem: [match])
    monkeypatch.setattr(run, "_peak_bytes", lambda function, arrays: 1000)
    monkeypatch.setattr(run, "_as_torch", lambda array, dtype: array)
    monkeypatch.setattr(run.cupy.cuda, "get_current_stream", lambda: SimpleNamespace(synchronize=lambda: None))

    def attention(q, k, v, *, causal, window, softcap, sinks, alibi_slopes, config):
        assert (causal, window, softcap, alibi_slopes) == (True, (20, 0), 0.0, None)
        state.config = config
        assert not (sinks.view(np.uint32) & 0xFFFF).any()  # bfloat16 values
        inputs = make_inputs(PROBLEM, "random", 0, np)
        return state.ours(replace(inputs, q=q, k=k, v=v, sinks=sinks))

    monkeypatch.setattr(run, "attention", attention)
    return state


def peer(name: str, function=None, serves=lambda problem: (problem, "")) -> Peer:
    def make(problem, sinks, places):
        def attend(q, k, v):
            return (function or exact)(replace(make_inputs(problem, "random", 0, np), q=q, k=k, v=v, sinks=sinks))

        return attend

    return Peer(name, "sys", "", lambda problem: None, make, serves)


def test_ours_runs_with_the_config_that_is_given(gpu):
    config = candidates(PROBLEM, GPU)[-1].default(PROBLEM, GPU)
    row, failed = run.measure_row(PROBLEM, [peer("one")], GPU, config=config)
    assert gpu.config == row.config == config and row.match == "exact, predicted" and not failed
    run.measure_row(PROBLEM, [peer("one")], GPU)
    assert gpu.config is None


def test_all_are_timed_in_turning_order_and_a_time_is_the_median_of_the_runs(gpu):
    row, failed = run.measure_row(PROBLEM, [peer("one"), peer("other")], GPU)
    assert FakeBench.orders == [[OURS, "one", "other"], ["other", "one", OURS], [OURS, "one", "other"]] and not failed
    assert row.ours.time_us == len(OURS) + 2 and row.ours.runs_us == (9.0, 10.0, 11.0)
    assert {name: timing.time_us for name, timing in row.peers.items()} == {"one": 5.0, "other": 7.0}
    assert row.best_peer == "one" and row.ours.error_ratio <= 1 and row.why == "because"
    used = sum(array.nbytes for array in make_inputs(PROBLEM, "random", 0, np).__dict__.values() if isinstance(array, np.ndarray))
    assert row.ours.peak_bytes == used - 4 * PROBLEM.heads_q + 1000  # q, k and v; not the sinks
    assert row.ours.samples == 3 * run.ROUNDS


def test_a_peer_without_sinks_is_judged_by_what_it_computes(gpu):
    less = peer("less", serves=lambda problem: (replace(problem, sinks=False), "no sink"))
    row, failed = run.measure_row(PROBLEM, [less], GPU)
    assert row.peers["less"].note == "no sink" and row.peers["less"].error_ratio <= 1 and not failed


def test_a_peer_that_fails_or_computes_something_else_is_left_out(gpu):
    def raises(inputs):
        raise NotImplementedError("not on this arch\nat all")

    other = peer("other", lambda inputs: exact(replace(inputs, problem=replace(PROBLEM, window_left=21))))
    row, failed = run.measure_row(PROBLEM, [peer("broken", raises), other, peer("good")], GPU)
    assert list(row.peers) == ["good"] and failed[0] == ("broken", "it fails: not on this arch")
    assert failed[1][0] == "other" and "computes something else" in failed[1][1]


def test_a_wrong_result_of_ours_is_no_row(gpu):
    gpu.ours = lambda inputs: exact(replace(inputs, problem=replace(PROBLEM, window_left=19)))
    row, failed = run.measure_row(PROBLEM, [peer("good")], GPU)
    assert row is None and failed[0][0] == OURS and "is wrong in batch 0" in failed[0][1] and not FakeBench.orders


def test_what_cannot_be_captured_is_timed_all_the_same(gpu, monkeypatch):
    monkeypatch.setitem(globals(), "UNCAPTURABLE", [True])
    row, failed = run.measure_row(PROBLEM, [peer("one")], GPU)
    assert row.peers["one"].time_us == 5.0 and not failed


def test_decode_steps_are_called_with_their_cache_and_timed_beside_a_read(gpu, monkeypatch):
    problem = Problem.parse("decode-bf16-b2-h4x2-q1-k40-d32-page16-kve4m3")
    wanted = make_inputs(problem, "random", 0, np)
    calls = []

    def attention_with_kvcache(q, k, v, *, cache_seqlens, page_table, k_scale, v_scale, causal, window, softcap, sinks,
                               alibi_slopes, config):
        assert (cache_seqlens == 40).all() and (page_table == wanted.layout.table).all() and not causal and sinks is None
        assert (k_scale == wanted.k_scales).all() and (v_scale == wanted.v_scales).all()
        return exact(wanted)

    monkeypatch.setattr(run, "attention_with_kvcache", attention_with_kvcache)
    monkeypatch.setattr(run, "readers", lambda problem, sets, sms: [calls.append] * 2)

    def make(problem, sinks, places):
        assert set(places) == {"cache_seqlens", "page_table"}
        return lambda q, k, v: exact(wanted)

    row, failed = run.measure_row(problem, [Peer("one", "sys", "", lambda problem: None, make)], GPU)
    assert not failed and FakeBench.orders[0] == [OURS, "one", "read 0", "read 1"] and set(row.peers) == {"one"}
    assert calls == [1] * 6 and row.read.time_us == len("read 0") + 2 and row.read_share == row.read.time_us / row.ours.time_us


@pytest.mark.parametrize("source", ["varlen", "page16"])
def test_packed_sequences_are_called_with_where_they_begin(gpu, monkeypatch, source):
    problem = Problem.parse(f"forward-bf16-b4-h4x2-q40-k60-d32-causal-{source}")
    wanted = make_inputs(problem, "random", 0, np)
    starts = ["cu_seqlens_q"] + (["cu_seqlens_k"] if source == "varlen" else ["cache_seqlens", "page_table"])
    sizes = {"max_seqlen_q": 40, **({"max_seqlen_k": 60} if source == "varlen" else {})}

    def call(q, k, v, *, causal, window, softcap, sinks, alibi_slopes, config, k_scale=None, v_scale=None, **places):
        assert q.shape == wanted.q.shape[1:] and k.ndim == (3 if source == "varlen" else 4) and causal and sinks is None
        assert set(places) == {*starts, *sizes} and {name: places[name] for name in sizes} == sizes
        assert (places["cu_seqlens_q"] == wanted.layout.query_starts).all()
        return exact(wanted)[0]

    monkeypatch.setattr(run, "attention_varlen" if source == "varlen" else "attention_with_kvcache", call)

    def make(problem, sinks, places):
        assert set(places) == {*starts, *sizes}
        return lambda q, k, v: exact(wanted)

    row, failed = run.measure_row(problem, [Peer("one", "sys", "", lambda problem: None, make)], GPU)
    assert not failed and set(row.peers) == {"one"} and row.ours.error_ratio <= 1 and row.read is None


def test_long_problems_take_fewer_rounds():
    assert run._rounds(PROBLEM, GPU, 4) == run.ROUNDS
    long = Problem.parse("forward-bf16-b1-h64x8-q65536-k65536-d64-causal")  # 33 ms at the roofline
    assert run._rounds(long, GPU, 4) == run.LEAST_ROUNDS


def test_peak_memory_is_what_is_held_at_once():
    hook = run._Peak()
    for size, pointer in ((100, 1), (50, 2)):
        hook.malloc_postprocess(mem_size=size, mem_ptr=pointer, device_id=0, size=size, pmem_id=0)
    hook.free_preprocess(mem_ptr=1, mem_size=100, device_id=0, pmem_id=0)
    hook.free_preprocess(mem_ptr=9, mem_size=100, device_id=0, pmem_id=0)  # allocated before
    hook.malloc_postprocess(mem_size=60, mem_ptr=3, device_id=0, size=60, pmem_id=0)
    assert (hook.now, hook.peak) == (110, 150)
