"""`tune --gpus` with simulated GPUs: the test that they agree, and whole tunes by real worker processes."""

import io
import os
import sys
from pathlib import Path

import pytest
from tuner_fakes import FAKE, H200, FakeBuilder, synthetic_us

from autotune import kernels, tune
from autotune.core.gpu import by_name
from autotune.core.problem import Problem
from autotune.tuner import TuneError, many, run

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
PROBLEMS = [Problem.parse(f"forward-bf16-b{n}-h4x4-q512-k512-d128-causal") for n in range(1, 4)]
A100 = by_name("nvidia-a100-sxm-80gb")


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    """A machine with four H200s, of which the third is slow and the fourth broken, and an A100. Gives the devices of workers
    started."""
    import contextlib

    from cupy.cuda import runtime

    for name in reversed(list(kernels.KERNELS)):
        monkeypatch.delitem(kernels.KERNELS, name)
    monkeypatch.setitem(kernels.KERNELS, FAKE.name, FAKE)
    monkeypatch.setattr("autotune.database.lookup._TABLES", {})  # other tests' have the kernels that were there
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "db"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: 5)
    monkeypatch.setattr(many, "detect", lambda device: A100 if device == 4 else H200)
    monkeypatch.setattr(many, "EVALUATOR", "tuner_targets:Paced")
    monkeypatch.setattr(many, "gpu_lock", lambda device, say: contextlib.nullcontext())
    monkeypatch.setattr(run, "Builder", lambda gpu: FakeBuilder())
    started = []

    def command(device, where, threads):
        started.append(device)
        assert threads >= 1
        return [sys.executable, str(TESTS / "tuner_worker.py"), where, "1.0"]

    monkeypatch.setattr(many, "command", command)
    return started


def test_a_tune_on_all_gpus_leaves_out_the_slow_the_broken_and_the_other_model(four_gpus):
    output = io.StringIO()
    records = tune(PROBLEMS, gpus="all", stream=output)
    said = output.getvalue()
    assert four_gpus == [0, 1] and [record.problem for record in records] == PROBLEMS
    assert all(record.time_us == pytest.approx(synthetic_us(record.config)) for record in records)
    assert "device 2 is left out: the reference kernel takes" in said and "device 3 is left out" in said and "ECC" in said
    assert "device 4 is left out: it is of another model" in said


def test_a_gpu_whose_worker_ends_costs_the_others_nothing(four_gpus, monkeypatch, capsys):
    usual = many.command

    def command(device, where, threads):
        mine = usual(device, where, threads)
        return [sys.executable, "-c", "import sys; sys.exit('GPU is lost')"] if device == 1 else mine

    monkeypatch.setattr(many, "command", command)
    records = tune(PROBLEMS[:2], gpus="0,1", stream=io.StringIO())
    assert len(records) == 2 and "the worker of device 1 ended with exit code 1: GPU is lost" in capsys.readouterr().err


def test_when_every_worker_ends_the_tune_ends_and_says_what_is_left(four_gpus, monkeypatch):
    monkeypatch.setattr(many, "command", lambda *_: [sys.executable, "-c", "import sys; sys.exit('GPU is lost')"])
    output = io.StringIO()
    assert tune(PROBLEMS[:2], gpus="0", stream=output) == []
    assert "no worker is left; 2 problems are not tuned" in output.getvalue()


@pytest.mark.parametrize("wanted, said", [("0;1", "must be all, or indices"), ("0,7", "names device 7; this machine has 5"),
                                          ("-1", "names device -1"), ("", "must be all, or indices")])
def test_a_list_that_names_no_gpus_is_refused(four_gpus, wanted, said):
    with pytest.raises(TuneError, match=said):
        many.devices_of(wanted, None, 5)


def test_the_fastest_half_is_the_measure_of_who_is_slow():
    assert many.outliers({0: 100.0, 1: 101.9}) == {}
    assert list(many.outliers({0: 100.0, 1: 102.1})) == [1]
    assert list(many.outliers({0: 100.0, 1: 100.5, 2: 93.0})) == [2]  # too fast to share its results, too
    assert many.outliers({}) == {}
