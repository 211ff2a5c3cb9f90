"""The command line: every bad input is one sentence and exit code 2 with nothing written; good input prints what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import main as cli
from autotune.cli.main import COMMANDS, main

LLAMA = "forward-bf16-b1-h32x8-q8192-k8192-d128-causal"
SMALL = "forward-fp16-b1-h2x2-q64-k64-d64"


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """An empty database and cache folder that only this test sees; neither exists until something is written."""
    folders = tmp_path / "db", tmp_path / "cache"
    monkeypatch.setenv("AUTOTUNE_DB", str(folders[0]))
    monkeypatch.setenv("AUTOTUNE_CACHE", str(folders[1]))
    _forget_lookups()
    yield folders
    _forget_lookups()


def _forget_lookups():
    from autotune.database.lookup import refresh

    refresh()


@pytest.fixture
def no_gpu(monkeypatch):
    """As on a machine without a GPU, whatever this one has."""
    from autotune.cli import gpus  # noqa: F401  modules that hold `detect` by name must be there to be changed
    from autotune.core.gpu import GpuError
    from autotune.database.lookup import refresh  # noqa: F401

    def detect(device=0):
        raise GpuError("no GPU can be used: there is no driver. `nvidia-smi` shows whether a driver is loaded")

    for name, module in list(sys.modules.items()):
        if name.startswith("autotune.") and hasattr(module, "detect"):
            monkeypatch.setattr(module, "detect", detect)


def run(*arguments: str) -> int:
    """The exit code of `autotune ARGUMENTS`."""
    return main(arguments)


def refuses(capsys, homes, *arguments: str, saying: str) -> None:
    """Asserts exit code 2, one line on stderr that contains `saying`, nothing on stdout, nothing written."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert saying in captured.err and captured.err.startswith("autotune")
    assert not any(folder.exists() for folder in homes)


MALFORMED = [
    ("llama", "is malformed"),
    ("forward-bf16-b1-h32x8-q8192-k8192-d128-causal-causal", "contradicts"),
    ("forward-bf16-b1-h32x8-q8192-k8192-d128-sparse", "unknown feature 'sparse'"),
    ("forward-bf16-b1-h32x5-q8192-k8192-d128", "heads_q must be a multiple of heads_kv"),
    ("forward-bf16-b1-h32x8-q\u0663-k8192-d128", "is malformed"),  # a digit, but not one of ours
    ("forward-bf16-b1-h32x8-q99999999999999-k8192-d128", "seqlen_q is 999999999999; allowed is 0 to"),
    ("forward-bf8-b1-h32x8-q8192-k8192-d128", "dtype one of bf16, fp16, fp32"),
]


@pytest.mark.parametrize("command", [("tune", "--problem"), ("lookup",), ("source",), ("verify",), ("db", "show"),
                                     ("bench", "--against", "sdpa-flash")])
@pytest.mark.parametrize("text, saying", MALFORMED)
def test_a_malformed_problem(capsys, homes, command, text, saying):
    refuses(capsys, homes, *command, text, saying=saying)


@pytest.mark.parametrize("seed", ["-1", "1.5", "x", ""])
def test_a_seed_that_is_none(capsys, homes, seed):
    refuses(capsys, homes, "verify", LLAMA, "--simulate", f"--seed={seed}", saying=f"'{seed}' is not an int of at least 0")


@pytest.mark.parametrize("command", [("tune",), ("verify",), ("bench", "--against", "sdpa-flash")])
def test_an_unknown_model(capsys, homes, command):
    refuses(capsys, homes, *command, "--model", "llama-9", saying="known are llama-3-8b, llama-3-70b")


@pytest.mark.parametrize("command", [("tune", "--problem"), ("lookup",), ("source",), ("verify", "--simulate")])
@pytest.mark.parametrize("name", ["h200", "", "NVIDIA-H200"])
def test_an_unknown_gpu(capsys, homes, command, name):
    refuses(capsys, homes, *command, LLAMA, "--gpu", name, saying=f"no GPU is called '{name}'; known are nvidia-h200")


@pytest.mark.parametrize("command", [("tune", "--problem"), ("lookup",), ("source",)])
def test_a_head_dim_that_no_kernel_takes(capsys, homes, command):
    text = "forward-bf16-b1-h8x8-q128-k128-d4096"
    refuses(capsys, homes, *command, text, "--gpu", "nvidia-h200", saying="head_dim is 4096")


@pytest.mark.parametrize("config, saying", [
    ("forward_magic block_m=128", "kernel is 'forward_magic'; known are forward_wgmma, forward_mma, forward_simt"),
    ("forward_mma block_m", "is not NAME=VALUE"),
    ("forward_mma block_m=7", "block_m"),
    ("forward_mma block_m=128;system(1)", "legal values are"),
])
def test_a_config_that_no_kernel_declares(capsys, homes, config, saying):
    refuses(capsys, homes, "source", LLAMA, "--gpu", "nvidia-h200", "--config", config, saying=saying)


def test_a_declared_config_that_is_illegal_here(capsys, homes):
    from autotune.core.gpu import by_name
    from autotune.kernels import default_config
    from autotune.core.problem import Problem

    config = default_config(Problem.parse(LLAMA), by_name("nvidia-h200"))
    illegal = config.text.replace(f"smem_bytes={config['smem_bytes']}", "smem_bytes=16")
    refuses(capsys, homes, "source", LLAMA, "--gpu", "nvidia-h200", "--config", illegal,
            saying=f"cannot serve {LLAMA} on nvidia-h200: smem_bytes is 16")


@pytest.mark.parametrize("command", [("verify", SMALL), ("bench", SMALL, "--against", "sdpa-flash"), ("lookup", SMALL),
                                     ("source", SMALL)])
def test_no_gpu_where_one_is_needed(capsys, homes, no_gpu, command):
    refuses(capsys, homes, *command, saying="no GPU can be used")


@pytest.mark.parametrize("arguments, saying", [
    ((), "COMMAND"),
    (("tunes",), "invalid choice: 'tunes'"),
    (("tune",), "--model --model-config --workload --problem"),
    (("tune", "--model", "llama-3-8b", "--effort", "huge"), "'quick', 'full'"),
    (("tune", "--model", "llama-3-8b", "--problem", LLAMA), "not allowed with"),
    (("verify",), "name at least one problem"),
    (("source", LLAMA, "--ptx", "--sass"), "not allowed with"),
    (("bench", LLAMA, "--against", "cublas"), "known are sdpa-flash, sdpa-cudnn, fa3, fa4"),
    (("bench", LLAMA, "--decode"), "--decode needs a model"),
    (("bench", "--model", "deepseek-v3", "--decode"), "compressed keys"),
    (("tune", "--model", "deepseek-v3", "--decode"), "compressed keys"),
    (("bench", LLAMA, "--out", "/nowhere/result.yaml"), "the folder /nowhere does not exist"),
    (("bench", LLAMA, "--plot", "result.txt"), "its name must end in .png, .svg, .pdf"),
    (("verify", "--workload", "/nowhere.yaml"), "/nowhere.yaml cannot be read"),
    (("tune", "--workload", "pyproject.toml"), "is not YAML"),
    (("tune", "--model-config", "/nowhere/config.json"), "name a model's config.json or the folder it is in"),
    (("bench", "--model-config", "pyproject.toml"), "is not JSON"),
    (("db",), "ACTION"),
    (("db", "check", "/nowhere/forward.yaml"), "/nowhere/forward.yaml does not exist"),
    (("db", "show", "forward-bf16-b3-h7x7-q77-k77-d72"), "no record of"),
    (("db", "list", "--gpu", "h200"), "no record is of a GPU called 'h200', and none is known; known are nvidia-a10"),
    (("db", "list", "--gpu", ""), "called ''"),
    (("db", "show", LLAMA, "--gpu", "x"), "autotune db show: unrecognized arguments: --gpu x; see `autotune db show --help`"),
    (("gpus", "all"), "see `autotune gpus --help`"),
    (("db", "check", "docs"), "docs holds no database file"),
    (("verify", LLAMA, "--simulate", "--gpu", "nvidia-h200", "--config", ""), "config '': kernel is ''"),
])
def test_arguments_that_cannot_be_meant(capsys, homes, arguments, saying):
    refuses(capsys, homes, *arguments, saying=saying)


# Broken databases

GPU = "gpu: {name: nvidia-h200, arch: 90, sms: 132, l2_bytes: 62914560, memory_clock_mhz: 3201}"
TRUNCATED = f"schema: 1\n{GPU}\nop: forward\nrecords:\n  {SMALL}: {{config: {{kernel: forward_mma, block"
ILLEGAL = f"""schema: 1
{GPU}
op: forward
records:
  {SMALL}:
    config: {{kernel: forward_simt, block_m: "64; }} evil(); {{"}}
    evidence: measured
    time_us: 10.0
    date: 2026-01-31 12:00:00 UTC
    trials: 5
    nvrtc: 13.0.88
    cubin_sha256: {'0' * 64}
    autotune: 0.1.0
"""


@pytest.fixture(params=[(TRUNCATED, "not YAML"), (b"\xff\xfe\x00", "not UTF-8"), (ILLEGAL, "block_m"),
                        ("schema: 99\n", "schema 99 is newer"), ("[1, 2]\n", "not a tuning database")],
                ids=["truncated", "binary", "illegal", "newer", "list"])
def broken(request, homes):
    """(database file that cannot be used, words that say why)."""
    content, words = request.param
    path = homes[0] / "nvidia-h200" / "forward.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path, words


@pytest.mark.slow
@pytest.mark.parametrize("command", [("db", "check"), ("db", "list")])
def test_a_database_that_cannot_be_used(capsys, homes, broken, command, monkeypatch):
    from autotune.cuda import compile

    monkeypatch.setattr(compile, "compile_source", lambda *_: pytest.fail("an unusable database reached the compiler"))
    before = broken[0].read_bytes()
    assert run(*command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and broken[1] in error and str(broken[0]) in error
    assert broken[0].read_bytes() == before and os.listdir(broken[0].parent) == [broken[0].name]
    assert not homes[1].exists()


@pytest.mark.slow
def test_a_broken_database_does_not_stop_a_lookup(homes, broken):
    done = autotune("source", SMALL, "--gpu", "nvidia-h200")
    assert done.returncode == 0 and "__global__" in done.stdout and "evil" not in done.stdout
    assert broken[1] in done.stderr and "autotune db check" in done.stderr


# Things that are missing


def test_no_cupy(capsys, homes, no_gpu, monkeypatch):
    from autotune.cuda import compile

    def missing():
        raise compile.CompilerMissing("CuPy is not installed; pip install 'cupy-cuda13x[ctk]' brings CuPy and NVRTC")

    monkeypatch.setattr(compile, "_nvrtc", missing)
    compile.nvrtc_version.cache_clear()
    refuses(capsys, homes, "source", SMALL, "--gpu", "nvidia-h200", "--resources", saying="pip install 'cupy-cuda13x[ctk]'")
    refuses(capsys, homes, "source", SMALL, "--gpu", "nvidia-h200", "--ptx", saying="pip install 'cupy-cuda13x[ctk]'")
    refuses(capsys, homes, "tune", "--problem", SMALL, "--gpu", "nvidia-h200", saying="pip install 'cupy-cuda13x[ctk]'")


@pytest.mark.slow
def test_cupy_that_cannot_be_imported(homes):
    code = "import sys; sys.modules['cupy'] = None; from autotune.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for arguments in (["source", SMALL, "--gpu", "nvidia-h200", "--resources"], ["verify", SMALL]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert "cupy" in done.stderr.lower() and not any(folder.exists() for folder in homes)


# What works


def autotune(*arguments: str) -> subprocess.CompletedProcess:
    """`python -m autotune ARGUMENTS` in its own process."""
    return subprocess.run([sys.executable, "-m", "autotune", *arguments], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])


def test_tune_says_that_a_prediction_hides_no_measurement(capsys, homes, no_gpu, monkeypatch):
    from autotune import tuner
    from test_docs import record_defaults

    monkeypatch.setattr(tuner, "tune", record_defaults)
    assert run("tune", "--problem", LLAMA, "--problem", SMALL.replace("fp16", "fp32")) == 0
    assert "so for 1 of these it goes on taking measured records" in capsys.readouterr().out


def test_the_commands_to_try_next_can_be_pasted(homes, monkeypatch, tmp_path):
    from autotune.cli.tune import next_steps
    from autotune.core.gpu import by_name

    monkeypatch.setattr(sys, "argv", [str(tmp_path / "my checkout" / "autotune")])
    assert f"  '{tmp_path}/my checkout/autotune' lookup {SMALL}\n" in next_steps(SMALL, by_name("nvidia-h200"), True, "user")


def test_a_warning_is_a_sentence(homes, capsys):
    import warnings

    assert cli._warning_line("x\ny", UserWarning, cli.__file__, 7) == "autotune: x y\n"
    assert cli._warning_line("x", UserWarning, os.__file__, 7) == f"{os.__file__}:7: UserWarning: x\n"
    plain = warnings.formatwarning
    assert run("gpus") == 0 and warnings.formatwarning is plain


@pytest.mark.parametrize("ok, code", [(True, 0), (False, 1)])
def test_verify_says_what_is_wrong(capsys, homes, monkeypatch, ok, code):
    from autotune.check import verify
    from autotune.cli import verify as command
    from autotune.core.gpu import by_name

    checked = []

    def judged(problem, config, gpu, seed):
        checked.append((problem.text, config.kernel))
        return verify.Result(config, ok, 0.5 if ok else 7.0, "" if ok else "random inputs: out is wrong in batch 0, head 1")

    monkeypatch.setattr(command, "needed_gpu", lambda why: by_name("nvidia-h200"))
    monkeypatch.setattr(verify, "verify", judged)
    assert run("verify", SMALL) == code
    out = capsys.readouterr().out
    assert {kernel for _, kernel in checked} == {"forward_wgmma", "forward_mma", "forward_simt"}
    assert ("all are correct" in out) == ok and ("out is wrong in batch 0, head 1" in out) != ok


@pytest.mark.gpu
def test_verify_on_the_gpu(capsys):
    for problem in (SMALL, "forward-bf16-b2-h6x2-q100-k260-d128-causal-left65-sinks", "forward-fp32-b1-h2x1-q33-k70-d40-causal"):
        assert run("verify", problem) == 0, capsys.readouterr().out


@pytest.mark.gpu
def test_tune_on_the_gpu_measures_and_lookup_finds_it(capsys, homes):
    assert run("tune", "--problem", "forward-bf16-b1-h8x2-q1024-k1024-d64-causal") == 0
    assert "measured" in capsys.readouterr().out
    assert run("lookup", "forward-bf16-b1-h8x2-q1024-k1024-d64-causal") == 0
    assert "exact, measured" in capsys.readouterr().out


def test_build_says_that_nothing_is_to_be_written(capsys, homes, tmp_path, monkeypatch):
    from autotune.cli import generated as build

    monkeypatch.setattr(build, "write", lambda folder, root: [])
    assert run("build") == 0 and capsys.readouterr().out == "generated/ is up to date, so nothing was written\n"
    monkeypatch.setattr(build, "write", lambda folder, root: [Path("generated/a.cu")])
    assert run("build") == 0 and capsys.readouterr().out == "generated/a.cu\n1 files written\n"


def test_help_keeps_problems_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run("tune", "--help") == 0 and LLAMA in capsys.readouterr().out


@pytest.mark.parametrize("version, said", [(0, "there is no NVIDIA driver"), (12040, "cudaErrorInsufficientDriver")])
def test_why_no_gpu_can_be_used(monkeypatch, version, said):
    runtime = pytest.importorskip("cupy.cuda").runtime
    from autotune.core.gpu import GpuError, detect

    def refuse(device):
        raise runtime.CUDARuntimeError(35)

    monkeypatch.setattr(runtime, "getDeviceProperties", refuse)
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: version)
    with pytest.raises(GpuError, match=said):
        detect.__wrapped__(0)


def test_gpus_lists_the_catalogue(capsys, no_gpu):
    assert run("gpus") == 0
    out = capsys.readouterr().out
    assert "nvidia-h200" in out and "sm_90" in out and "none at hand" in out


def test_help_and_version(capsys):
    for command in COMMANDS:
        assert run(command, "--help") == 0
        assert command in capsys.readouterr().out
    assert run("--version") == 0 and capsys.readouterr().out.startswith("autotune 0.")


def test_a_bug_keeps_its_traceback(monkeypatch):
    from autotune.cli import gpus

    def bug(args):
        raise KeyError("a bug")

    monkeypatch.setattr(gpus, "run", bug)
    with pytest.raises(KeyError):
        main(["gpus"])


def test_interrupted(capsys, monkeypatch):
    from autotune.cli import gpus

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpus, "run", interrupted)
    assert main(["gpus"]) == 130


@pytest.mark.slow
def test_a_reader_that_stops_early_is_no_error():
    done = subprocess.run(f"{sys.executable} -m autotune gpus | true", shell=True, capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command, redirection, sentence", [
    (f"source {SMALL} --gpu nvidia-h200", ">/dev/full",
     "autotune source: standard output cannot be written: No space left on device"),
    ("gpus", ">/dev/full", "autotune gpus: standard output cannot be written: No space left on device"),
    ("gpus", "1</dev/null", "autotune gpus: standard output cannot be written: Bad file descriptor"),
    ("gpus", ">&-", "autotune: standard output is closed; redirect it to /dev/null if it is not wanted"),
])
def test_output_that_cannot_be_written(homes, command, redirection, sentence, unbuffered):
    done = subprocess.run(f"{sys.executable} -m autotune {command} {redirection}", shell=True, capture_output=True, text=True,
                          cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (2, sentence + "\n")


def test_user_errors_are_known_by_name():
    class ProblemError(Exception):
        pass

    from autotune.core.problem import ProblemError as Real

    assert cli.is_user_error(Real("x")) and not cli.is_user_error(ProblemError("x"))
