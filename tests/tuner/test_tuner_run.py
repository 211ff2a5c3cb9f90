import contextlib
import io
import os
import sys

import pytest
from tuner_fakes import FAKE, H200, PROBLEM, FakeBuilder

from autotune.cuda import compile
from autotune.database import view
from autotune import kernels, tune
from autotune.core.gpu import GpuError
from autotune.core.problem import Problem, ProblemError
from autotune.tuner import TuneError, builder, predict, replay, run
from autotune.tuner.builder import Builder, Built
from autotune.tuner.progress import Progress
from autotune.tuner.worker import WorkerError

pytestmark = pytest.mark.slow

SMALL = Problem.parse("forward-bf16-b1-h4x4-q512-k512-d128-causal")
PLAIN = Problem.parse("forward-fp32-b1-h4x4-q512-k512-d64-causal")  # compiles fast: only forward_simt serves it


@pytest.fixture
def at_hand(monkeypatch, tmp_path):
    """An H200 with the fake kernel and the fake worker."""
    monkeypatch.syspath_prepend(os.path.dirname(os.path.dirname(__file__)))
    for name in reversed(list(kernels.KERNELS)):  # put back in reverse, and so in their order of preference
        monkeypatch.delitem(kernels.KERNELS, name)
    monkeypatch.setitem(kernels.KERNELS, FAKE.name, FAKE)
    monkeypatch.setattr("autotune.database.lookup._TABLES", {})  # other tests' have the kernels that were there
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "db"))
    monkeypatch.setattr(run, "detect", lambda device: H200)
    monkeypatch.setattr(run, "Builder", lambda gpu: FakeBuilder())
    monkeypatch.setattr(run, "EVALUATOR", "tuner_targets:FakeEvaluator")
    monkeypatch.setattr(run, "gpu_lock", lambda device, say: contextlib.nullcontext())


def test_tune_measures_writes_and_returns_in_order(at_hand, tmp_path):
    stream = io.StringIO()
    records = tune([PROBLEM, SMALL.text, PROBLEM], stream=stream)
    assert [r.problem for r in records] == [PROBLEM, SMALL] and {r.evidence for r in records} == {"measured"}
    assert {r.problem: r for r in view.open_view(H200, roots=[tmp_path / "db"]).records} == {r.problem: r for r in records}
    lines = stream.getvalue()
    assert lines.index(f"] {SMALL.text}") < lines.index(f"] {PROBLEM.text}")  # small ones first
    assert (tmp_path / "db" / "trials" / H200.name / f"{SMALL}.journal").is_file()


def test_records_can_go_elsewhere(at_hand, tmp_path):
    tune(SMALL, root=tmp_path / "checkout", trials_root=tmp_path / "trials", stream=io.StringIO())
    assert view.paths(tmp_path / "checkout") and not view.paths(tmp_path / "db")
    assert list((tmp_path / "trials").rglob("*.journal"))


def test_a_problem_that_fails_does_not_stop_the_others(at_hand):
    stream = io.StringIO()
    records = tune([SMALL, "forward-bf16-b13-h4x4-q16-k16-d128-causal"], stream=stream)
    assert [r.problem for r in records] == [SMALL] and "out of memory" in stream.getvalue()


def test_an_interrupt_keeps_finished_problems(at_hand, monkeypatch, tmp_path):
    real = run.Session.tune

    def second_is_interrupted(session, problem, known, share):
        if problem == PROBLEM:
            raise KeyboardInterrupt
        return real(session, problem, known, share)

    monkeypatch.setattr(run.Session, "tune", second_is_interrupted)
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        tune([PROBLEM, SMALL], stream=stream)
    assert run.INTERRUPTED in stream.getvalue()
    assert [r.problem for r in view.open_view(H200, roots=[tmp_path / "db"]).records] == [SMALL]


def test_a_worker_that_cannot_start_is_one_sentence(at_hand, monkeypatch):
    monkeypatch.setattr(run, "EVALUATOR", "tuner_targets:Missing")
    with pytest.raises(WorkerError, match="cannot start: AttributeError"):
        tune(SMALL, stream=io.StringIO())


@pytest.mark.parametrize("arguments, error, said", [
    (dict(problems="forward-bf16"), ProblemError, "malformed"),
    (dict(problems=SMALL, effort="huge"), TuneError, "effort is 'huge'; allowed are instant, quick, full"),
    (dict(problems=SMALL, gpu="h2000"), GpuError, "no GPU is called"),
    (dict(problems="forward-bf16-b1-h4x4-q0-k512-d128"), TuneError, "computes nothing"),
    (dict(problems="decode-fp32-b1-h4x4-q1-k64-d128-kve4m3", gpu="nvidia-h200"), kernels.ConfigError, "no kernel can serve"),
])
def test_bad_input_is_refused_before_anything_is_written(monkeypatch, tmp_path, arguments, error, said):
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "db"))
    monkeypatch.setattr(run, "detect", lambda device: H200)
    with pytest.raises(error, match=said):
        tune(**arguments)
    assert not (tmp_path / "db").exists()


def test_bounds_that_hide_nothing_are_dropped():
    problem = Problem.parse("forward-bf16-b1-h4x4-q64-k64-d128-causal")
    assert run.parsed(f"{problem}-left900") == [problem]


@pytest.mark.parametrize("detected", [GpuError("none"), H200])
def test_without_the_gpu_records_are_predicted(monkeypatch, tmp_path, detected):
    """Real kernels, real compiler."""
    def detect(device):
        if isinstance(detected, Exception):
            raise detected
        return detected

    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "db"))
    monkeypatch.setattr(run, "detect", detect)
    monkeypatch.setattr(predict, "WANTED", 2)
    gpu = "nvidia-h200" if isinstance(detected, Exception) else "nvidia-a100-sxm-80gb"
    record, = tune(PLAIN, gpu=gpu, stream=io.StringIO())
    assert record.evidence == "predicted" and record.default_time_us and record.time_us <= record.default_time_us
    assert record.trials >= 2 and record.gpu.name == gpu
    assert compile.build(PLAIN.static, record.config, run.resolve(gpu)).sha256 == record.cubin_sha256


def test_prediction_out_of_time_still_ranks_the_default(monkeypatch):
    monkeypatch.setattr(predict, "SECONDS_ALL", 0.0)
    kept = []
    predict.predict([PLAIN], H200, Builder(H200), Progress(1, 1.0, io.StringIO()), kept.append, lambda problem, ranked: ranked)
    assert kept[0].config == kernels.default_config(PLAIN, H200)


def test_builder_compiles_once_and_types_failures(monkeypatch):
    make = Builder(H200)
    default = kernels.default_config(PLAIN, H200)
    built = make.build(PLAIN.static, default)
    assert isinstance(built, Built) and built.source_sha256 == make.source_sha256(PLAIN.static, default)
    monkeypatch.setattr(compile, "cached", lambda source, target: pytest.fail("compiled twice"))
    other = kernels.kernel_of(default).config(PLAIN.static, {**default.values, "head_group": 4})
    assert make.build(PLAIN.static, other).binary is built.binary

    def refuse(source, target):
        raise compile.CompileError("expected a ';'", "log")

    monkeypatch.setattr(compile, "cached", refuse)
    failed = Builder(H200).build(PLAIN.static, default)
    assert (failed.outcome, failed.message) == ("compile_failed", "expected a ';'")
    monkeypatch.setattr(compile, "cached", lambda source, target: built.binary)
    monkeypatch.setattr(compile, "flaw", lambda binary: ("spilled", "spills 8 bytes"))
    assert Builder(H200).build(PLAIN.static, default).outcome == "spilled"


def test_threads_leave_a_core_for_the_gpu():
    assert 1 <= builder.threads() <= builder.threads(spare=0) <= builder.MAX_THREADS


def test_recorded_trials_replay_from_the_command_line(at_hand, tmp_path, capsys, monkeypatch):
    tune(SMALL, trials_root=tmp_path, stream=io.StringIO())
    journal = next(tmp_path.rglob("*.journal"))
    assert replay.main([str(journal), "--repeats", "2"]) == 0
    output = capsys.readouterr().out
    assert output.count("seed") == 2 and "within 5% after" in output
    assert replay.main([str(tmp_path / "absent.journal")]) == 2
    assert "is not there" in capsys.readouterr().err


def test_the_package_is_light():
    """The worker imports it, and so does the command line."""
    import subprocess

    code = "import sys, autotune.tuner, autotune.tuner.worker; assert not {'optuna', 'numpy', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unwritable_database_is_said_before_the_search(at_hand, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(run, "_measure", lambda *_: pytest.fail("it searched first"))
    with pytest.raises(view.DatabaseError, match="cannot be written"):
        tune(PROBLEM, root=tmp_path / "file")
