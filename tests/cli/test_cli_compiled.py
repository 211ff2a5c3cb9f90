"""Commands that compile, or read all that ships."""
# ruff: noqa: F811 (fixtures are imported, and asked for by name)

from __future__ import annotations

from pathlib import Path

import pytest
from test_cli import LLAMA, SMALL, autotune, broken, homes, no_gpu, run  # noqa: F401 (fixtures)

from autotune.cuda import cache

pytestmark = pytest.mark.slow


def test_a_cache_folder_that_cannot_be_written(capsys, homes, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(cache.CacheWarning, match="set AUTOTUNE_CACHE to a folder"):
        assert run("source", SMALL, "--gpu", "nvidia-h200", "--resources") == 0
    assert "registers" in capsys.readouterr().out and (tmp_path / "file").read_text() == "in the way"


def test_a_full_disk(capsys, homes, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    cache._told.clear()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(cache.CacheWarning, match="No space left on device"):
        assert run("source", SMALL, "--gpu", "nvidia-h200", "--resources") == 0
    assert "registers" in capsys.readouterr().out
    assert not [path for path in homes[1].rglob("*") if path.is_file()]


def test_no_disassembler(capsys, homes, monkeypatch):
    from autotune.cuda import listing

    monkeypatch.setattr(listing, "find_nvdisasm", lambda: None)
    assert run("source", SMALL, "--gpu", "nvidia-h200", "--sass") == 2
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().err


def test_lookup_says_which_config_and_why(capsys, homes):
    assert run("lookup", LLAMA, "--gpu", "nvidia-h200") == 0
    out = capsys.readouterr().out
    assert LLAMA in out and "forward_" in out and "match" in out and "why" in out


def test_tune_without_a_gpu_says_so_predicts_and_shows_what_to_try_next(capsys, homes, no_gpu):
    assert run("tune", "--problem", small := SMALL.replace("fp16", "fp32")) == 0  # which no cover serves
    captured = capsys.readouterr()
    assert "no GPU can be used" in captured.err and "Taking the NVIDIA H200 from the catalogue" in captured.err
    assert "predicted" in captured.out and f"autotune source {small} --gpu nvidia-h200" in captured.out
    assert (homes[0] / "nvidia-h200" / "forward.yaml").exists()
    lookup = next(line for line in captured.out.splitlines() if "autotune lookup" in line)
    assert run(*lookup.partition("autotune ")[2].split()) == 0
    assert "match    exact, predicted" in capsys.readouterr().out and "A lookup takes what was measured" not in captured.out
    assert run("db", "list") == 0 and small in capsys.readouterr().out
    assert run("db", "show", small) == 0 and "evidence: predicted" in capsys.readouterr().out
    assert run("db", "check", str(homes[0])) == 0 and "all legal and current" in capsys.readouterr().out


def test_source_forms(capsys, homes):
    outputs = {}
    for form in ((), ("--ptx",), ("--resources",)):
        assert run("source", SMALL, "--gpu", "nvidia-h200", *form) == 0
        outputs[form] = capsys.readouterr().out
    assert "__global__" in outputs[()] and "constexpr" in outputs[()]
    assert ".visible .entry" in outputs[("--ptx",)] and ".target sm_90" in outputs[("--ptx",)]
    assert "registers" in outputs[("--resources",)] and "sha256" in outputs[("--resources",)]


def test_source_as_machine_code(capsys, homes):
    from autotune.cuda.listing import find_nvdisasm

    if find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    assert run("source", SMALL, "--gpu", "nvidia-h200", "--sass") == 0
    assert "EXIT" in capsys.readouterr().out


def test_source_takes_a_config(capsys, homes):
    from autotune.core.gpu import by_name
    from autotune.kernels import KERNELS
    from autotune.core.problem import Problem

    kernel, problem, gpu = KERNELS["forward_mma"], Problem.parse(SMALL), by_name("nvidia-h200")
    config = next(c for c in kernel.space(problem, gpu) if c["block_m"] != kernel.default(problem, gpu)["block_m"])
    assert run("source", SMALL, "--gpu", "nvidia-h200", "--config", config.text) == 0
    assert f"BLOCK_M = {config['block_m']};" in capsys.readouterr().out


def test_doctor_reads_only(capsys, homes):
    assert run("doctor") == 0
    out = capsys.readouterr().out
    assert "python" in out and "nvrtc" in out and "FAIL" not in out
    assert not any(folder.exists() for folder in homes)


def test_doctor_names_what_must_be_mended(capsys, homes, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "file" / "db"))
    assert run("doctor") == 1
    assert "set AUTOTUNE_DB to a folder that can" in capsys.readouterr().out


def test_doctor_says_once_that_a_database_cannot_be_used(capsys, homes, broken):
    assert run("doctor") == 1
    line, = (line for line in capsys.readouterr().out.splitlines() if "FAIL" in line)
    assert "1 part(s) cannot be used; `autotune db check` says which and why" in line and broken[1] in line


def test_the_shipped_database_is_usable(capsys, homes):
    assert run("db", "check") in (0, 1)  # 1: stale, which another test judges
    assert run("db", "list") == 0
