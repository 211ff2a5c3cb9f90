"""`prepare(measure=True)`: what is measured first, and what is not."""

import pytest

import autotune
from autotune import tuner
from autotune.calls import dense
from autotune.core.gpu import by_name
from autotune.core.problem import Problem
from autotune.tuner import warmup

H200 = by_name("nvidia-h200")
TUNED = "forward-bf16-b1-h32x8-q8192-k8192-d128-causal"
NEW = "decode-bf16-b17-h28x4-q1-k777-d128"


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr("autotune.core.gpu.detect", lambda device=0: H200)
    monkeypatch.setattr(dense, "prepare", lambda problems, gpu=None: made.append(("prepare", problems)) or [])
    monkeypatch.setattr(tuner, "tune", lambda problems, **options: made.append(("tune", problems, options)))
    return made


def test_only_what_was_not_measured_is_timed_and_then_all_is_loaded(calls):
    assert autotune.prepare is warmup.prepare
    warmup.prepare([TUNED, NEW], gpu=0, measure=True)
    assert calls == [("tune", [Problem.parse(NEW).bucketed()], {"effort": "instant", "device": 0}), ("prepare", [TUNED, NEW])]


def test_without_measure_nothing_is_timed(calls):
    warmup.prepare([NEW])
    assert calls == [("prepare", [NEW])]


def test_a_gpu_that_is_not_here_cannot_measure(calls):
    with pytest.raises(tuner.TuneError, match="measuring needs a GPU that is here"):
        warmup.prepare(NEW, gpu="nvidia-l4", measure=True)
    assert not calls
