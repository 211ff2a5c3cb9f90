from types import SimpleNamespace

import pytest
from tuner_fakes import FAKE, H200, PROBLEM

from autotune.device import launch
from autotune.check.verdict import Verdict
from autotune.core.measurement import Measurement
from autotune.tuner import evaluate as module
from autotune.tuner.evaluate import Evaluator

CONFIG = FAKE.default(PROBLEM, H200)
GOOD, BAD = Verdict(True, 0.5), Verdict(False, float("inf"), "out is wrong in batch 0")


class CudaError(RuntimeError):
    pass


class Checker:
    def __init__(self, quick=GOOD, full=GOOD):
        self.quick, self.full, self.calls = quick, full, []

    def check_kind(self, run, kind):
        self.calls.append(kind)
        return self._answer(self.quick)

    def __call__(self, run):
        self.calls.append("all")
        return self._answer(self.full)

    def _answer(self, answer):
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Bench:
    sets = [SimpleNamespace(inputs="inputs", out="out")]

    def __init__(self, time):
        self.seconds, self.rounds, self._time = None, None, time

    def time(self, candidate, seconds, best_us, error_ratio):
        candidate.launch(0)
        return Measurement.of_samples([self._time] * 3, error_ratio=error_ratio)

    def interleave(self, candidates, rounds, captures):
        self.rounds = rounds
        assert captures == module.FINAL_CAPTURES > 1
        return [Measurement.of_samples([self._time + i] * 3) for i, _ in enumerate(candidates)]


@pytest.fixture
def make(monkeypatch):
    """make(checker, time) -> an `Evaluator` with everything of the GPU faked; launches and unloads are in `.log`."""
    def of(checker, time=10.0):
        log = []
        runtime = SimpleNamespace(CUDARuntimeError=CudaError)
        cuda = SimpleNamespace(runtime=runtime, driver=SimpleNamespace(CUDADriverError=CudaError),
                               Device=lambda: SimpleNamespace(synchronize=lambda: log.append("synchronize")))
        monkeypatch.setattr(module, "runner", lambda problem, config, binary, device: lambda *args: log.append(args))
        monkeypatch.setattr(launch, "load", lambda binary, device: SimpleNamespace(unload=lambda: log.append(f"unload {binary}")))
        evaluator = Evaluator.__new__(Evaluator)
        evaluator._cupy, evaluator._device, evaluator._problem = SimpleNamespace(cuda=cuda), 0, PROBLEM
        evaluator._checker, evaluator._bench, evaluator.log = checker, Bench(time), log
        return evaluator
    return of


def test_a_wrong_config_is_not_timed(make):
    evaluator = make(Checker(quick=BAD))
    measurement = evaluator.evaluate(PROBLEM, CONFIG, "binary", None)
    assert (measurement.outcome, measurement.message) == ("wrong", BAD.message)
    assert evaluator.log == ["synchronize", "unload binary"]


def test_a_promising_config_is_checked_in_full_and_a_slow_one_is_not(make):
    checker = Checker()
    measurement = make(checker, 10.0).evaluate(PROBLEM, CONFIG, "binary", 9.9)
    assert measurement.ok and checker.calls == ["mixed", "all"] and measurement.error_ratio == 0.5
    checker = Checker()
    assert make(checker, 10.0).evaluate(PROBLEM, CONFIG, "binary", 5.0).time_us == 10.0 and checker.calls == ["mixed"]


def test_a_fast_config_that_fails_the_full_check_is_wrong(make):
    assert make(Checker(full=BAD)).evaluate(PROBLEM, CONFIG, "binary", None).outcome == "wrong"


@pytest.mark.parametrize("error", [CudaError("cudaErrorIllegalAddress: an illegal memory access"), launch.LaunchError("refused")])
def test_errors_of_cuda_are_outcomes(make, error):
    measurement = make(Checker(quick=error)).evaluate(PROBLEM, CONFIG, "binary", None)
    assert (measurement.outcome, measurement.message) == ("launch_failed", str(error))


def test_other_errors_pass_through(make):
    with pytest.raises(KeyError):
        make(Checker(quick=KeyError("bug"))).evaluate(PROBLEM, CONFIG, "binary", None)
    with pytest.raises(RuntimeError, match="was not opened"):
        make(Checker()).evaluate(None, CONFIG, "binary", None)


def test_the_final_times_those_that_pass(make):
    evaluator = make(Checker(full=[GOOD, BAD, GOOD]))
    results = evaluator.final(PROBLEM, [(CONFIG, "a"), (CONFIG, "b"), (CONFIG, "c")], 100.0, 1.0)
    assert [m.outcome for m in results] == ["ok", "wrong", "ok"] and [results[0].time_us, results[2].time_us] == [10.0, 11.0]
    assert evaluator._bench.rounds == module.FINAL_ROUNDS[1]
    assert evaluator.log[-3:] == ["unload a", "unload b", "unload c"]


def test_a_slow_final_has_fewer_rounds_and_one_without_any_able_has_none(make):
    evaluator = make(Checker())
    evaluator.final(PROBLEM, [(CONFIG, "a"), (CONFIG, "b")], 50_000.0, 1.0)
    assert evaluator._bench.rounds == 10
    assert [m.outcome for m in make(Checker(full=BAD)).final(PROBLEM, [(CONFIG, "a")], 1.0, 1.0)] == ["wrong"]
    failed = make(Checker(full=CudaError("gone"))).final(PROBLEM, [(CONFIG, "a"), (CONFIG, "b")], 1.0, 1.0)
    assert [m.outcome for m in failed] == ["launch_failed"] * 2
