"""`autotune tune --dry-run`: what a model, a config.json or a workload comes down to, before any GPU time."""

from __future__ import annotations

import json

import pytest

from autotune.cli.main import main
from benchmarks.model_configs import configs

CONFIGS = configs()


def config_file(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]["config"]))
    return str(path)


@pytest.fixture(autouse=True)
def no_gpu_and_no_tuner(monkeypatch):
    from autotune.core import gpu
    from autotune import tuner

    def forbidden(*_, **__):
        raise AssertionError("a dry run must not look for a GPU or tune")

    monkeypatch.setattr(gpu, "detect", forbidden)
    monkeypatch.setattr(tuner, "tune", forbidden)


def test_a_model_config_shows_its_layer_kinds_what_is_left_out_and_the_problems(tmp_path, capsys):
    assert main(["tune", "--model-config", config_file(tmp_path, "google/gemma-4-31b-it"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "60 layers attend" in out and "not read, models of their own: vision_config" in out
    sliding, causal = (line.split() for line in out.splitlines() if line.startswith(("sliding", "causal")))
    assert sliding[1:6] == ["50", "32", "over", "16", "256"] and "left 1023" in " ".join(sliding)
    assert causal[1:6] == ["10", "32", "over", "4", "512"]
    assert "8 problems to tune:" in out and "  forward-bf16-b1-h32x4-q8192-k8192-d512-causal\n" in out

    assert main(["tune", "--model-config", config_file(tmp_path, "Qwen/Qwen3-Next-80B-A3B-Instruct"), "--dry-run",
                 "--decode"]) == 0
    out = capsys.readouterr().out
    assert "36 layers of kind linear_attention are left out" in out and "  decode-bf16-b1-h16x2-q1-k4096-d256\n" in out


def test_a_model_and_a_workload(tmp_path, capsys):
    assert main(["tune", "--model", "gpt-oss-20b", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "gpt-oss 20b: 24 layers attend" in out and "left 127, sinks" in out and "6 problems to tune:" in out

    path = tmp_path / "mine.yaml"
    path.write_text("title: Mine\ngroups: {short: [forward-bf16-b1-h8x8-q64-k64-d64-causal], two: "
                    "[forward-bf16-b1-h8x8-q64-k64-d64, forward-bf16-b1-h8x8-q128-k128-d64]}\n")
    assert main(["tune", "--workload", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "Mine: 3 problems" in out and "two" in out and "3 problems to tune:" in out


@pytest.mark.parametrize("name, words", [
    ("MiniMaxAI/MiniMax-M2", None),
    ("XiaomiMiMo/MiMo-V2-Flash", "keys and values of different head dims"),
    ("deepseek-ai/DeepSeek-V3", "decodes over compressed keys"),
    ("google-bert/bert-base-uncased", "is not causal"),
])
def test_decode_says_why_there_is_nothing_to_decode(tmp_path, capsys, name, words):
    code = main(["tune", "--model-config", config_file(tmp_path, name), "--decode", "--dry-run"])
    assert code == (2 if words else 0) and (words or "") in capsys.readouterr().err


def test_an_encoder_becomes_problems_without_a_causal_mask(tmp_path, capsys):
    assert main(["tune", "--model-config", config_file(tmp_path, "google/vit-base-patch16-224"), "--dry-run"]) == 0
    assert "1 problem to tune:\n  forward-bf16-b1-h12x12-q197-k197-d64\n" in capsys.readouterr().out


def test_a_config_that_is_refused_is_one_sentence(tmp_path, capsys):
    assert main(["tune", "--model-config", config_file(tmp_path, "google-t5/t5-11b"), "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "bias of position" in captured.err
