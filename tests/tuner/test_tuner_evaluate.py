import random
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
        self.rounds, self._time = [], time
        self.noise = 0.0  # of a capture: all its samples are off together
        self.random = random.Random(0)

    def time(self, candidate, seconds, best_us, error_ratio):
        candidate.launch(0)
        return Measurement.of_samples([self._time] * 3, error_ratio=error_ratio)

    def interleave(self, candidates, rounds):
        self.rounds.append(rounds)
        return [Measurement.of_samples([(self._time + i) * (1 + self.random.gauss(0, self.noise))] * rounds)
                for i, _ in enumerate(candidates)]


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
    results = evaluator.final(PROBLEM, [(CONFIG, "a"), (CONFIG, "b"), (CONFIG, "c")], 1.0)
    assert [m.outcome for m in results] == ["ok", "wrong", "ok"] and [results[0].time_us, results[2].time_us] == [10.0, 11.0]
    assert evaluator._bench.rounds == [module.FINAL_ROUNDS] * module.FINAL_CAPTURES[0]  # nothing is in doubt
    assert evaluator.log[-3:] == ["unload a", "unload b", "unload c"]


def test_a_final_goes_on_until_it_is_decided_or_time_is_up(make):
    """Captures that differ by 1 % leave 10 and 10.03 us undecided for long, 10 and 11 us not."""
    entries = [(CONFIG, "a"), (CONFIG, "b")]
    evaluator = make(Checker())
    evaluator._bench.noise = 0.003
    evaluator.final(PROBLEM, entries, 10.0)
    assert len(evaluator._bench.rounds) == module.FINAL_CAPTURES[0]
    close = make(Checker(), 1000.0)
    close._bench.noise = 0.01
    results = close.final(PROBLEM, entries, 10.0)
    count = len(close._bench.rounds)
    assert 10 < count <= module.FINAL_CAPTURES[1]
    assert len(results[0].samples_us) == count * module.FINAL_ROUNDS
    hasty = make(Checker(), 1000.0)
    hasty._bench.noise = 0.01
    hasty.final(PROBLEM, entries, 0.0)
    assert len(hasty._bench.rounds) == module.FINAL_CAPTURES[0]


def test_failures_of_a_final(make):
    assert [m.outcome for m in make(Checker(full=BAD)).final(PROBLEM, [(CONFIG, "a")], 1.0)] == ["wrong"]
    failed = make(Checker(full=CudaError("gone"))).final(PROBLEM, [(CONFIG, "a"), (CONFIG, "b")], 1.0)
    assert [m.outcome for m in failed] == ["launch_failed"] * 2
