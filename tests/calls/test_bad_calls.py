"""Bad arguments of the calls that take problems, configs and GPUs: one sentence each, and nothing is written."""

import numpy as np
import pytest
from fake_arrays import Tensor, fake_gpu, qkv  # noqa: F401 (a fixture)

import autotune
from autotune.cli.main import is_user_error
from autotune.core.config import Config
from autotune.kernels import KERNELS
from autotune.core.problem import Problem

TEXT = "forward-fp16-b1-h2x2-q64-k64-d64"
H200 = "nvidia-h200"


NO_PROBLEMS = [None, 5, 1.5, [1], b"x", True, [TEXT, 3], np.arange(2), int, [[TEXT]], [None]]
CALLS = {"prepare": autotune.prepare, "source": autotune.source, "lookup": autotune.lookup, "tune": autotune.tune}


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """A function that asserts that a call raises one sentence with these words, and that no file was written."""
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "db"))
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))

    def check(words, call, *arguments, **keywords):
        with pytest.raises(Exception) as caught:
            call(*arguments, **keywords)
        said = str(caught.value)
        assert is_user_error(caught.value) and words in said and "\n" not in said, repr(caught.value)
        assert not list(tmp_path.iterdir())

    return check


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("problem", NO_PROBLEMS, ids=str)
def test_what_is_no_problem(refused, call, problem):
    models = call == "prepare" and not isinstance(problem, str)  # it takes models, too
    words = "is no model: it must be" if models else "is no problem; one is a Problem or a line of text such as forward-bf16"
    refused(words, CALLS[call], problem, gpu=H200)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("text", ["forward", "forward-bf16", TEXT + "-sparse", TEXT + "-causal" * 60])
def test_text_that_names_no_problem(refused, call, text):
    refused("problem", CALLS[call], text, gpu=H200)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("gpu", [5.0, b"x", [H200], np.arange(2), int], ids=str)
def test_what_is_no_gpu(refused, call, gpu):
    refused("it must be a Gpu, the name of one, such as nvidia-h200, or None for the GPU at hand", CALLS[call], TEXT, gpu=gpu)


@pytest.mark.parametrize("call", CALLS)
def test_a_gpu_that_the_catalogue_lacks(refused, call):
    refused("no GPU is called 'cuda:0'; known are nvidia-h200", CALLS[call], TEXT, gpu="cuda:0")


@pytest.mark.parametrize("call", ["source", "lookup", "tune"])
def test_an_index_is_no_gpu(refused, call):
    refused("gpu is 0; it must be a Gpu", CALLS[call], TEXT, gpu=0)


@pytest.mark.parametrize("config, words", [
    (5, "kernel is '5'; known are forward_wgmma"),
    ([], "kernel is '[]'; known are"),
    ("forward_mma block_m=64", "parameter 'block_heads' is missing"),
    (Config.of("no_kernel", {}), "kernel is 'no_kernel'"),
    (Config.of("forward_mma", {}), "parameter 'block_m' is missing"),
    (Config.of("forward_mma", {"block_m": "64; evil()"}), "is not NAME=VALUE"),
])
def test_what_is_no_config(refused, config, words):
    refused(words, autotune.source, TEXT, config=config, gpu=H200)


def test_a_config_in_either_form_gives_the_same_source():
    problem = Problem.parse(TEXT)
    config = KERNELS["forward_simt"].default(problem, autotune.lookup(problem, H200).gpu)
    assert autotune.source(problem, config, H200) == autotune.source(TEXT, config.text, H200)


@pytest.mark.parametrize("keywords, words", [
    (dict(effort="huge"), "effort is 'huge'; allowed are instant, quick, full"),
    (dict(effort=None), "effort is None; allowed are"),
    (dict(effort=["quick"]), "allowed are instant, quick, full"),
    (dict(gpu=None, device="cuda:0"), "device is 'cuda:0'; it must be the index of a CUDA device"),
])
def test_what_tune_cannot_mean(refused, keywords, words):
    refused(words, autotune.tune, TEXT, **{"gpu": H200, **keywords})


@pytest.mark.parametrize("text", [
    "forward-bf16-b1-h2x2-q0-k64-d64", "forward-bf16-b0-h2x2-q64-k64-d64", "forward-bf16-b1-h2x2-q64-k0-d64-causal",
    "decode-bf16-b1-h2x2-q1-k0-d64",
])
def test_a_problem_of_nothing_is_looked_up_without_advice_to_tune_it(refused, text):
    match = autotune.lookup(text, H200)
    assert "no query of" in match.why and "autotune tune" not in match.why and "%" not in match.why
    refused("there is nothing to tune", autotune.tune, text, gpu=H200)


@pytest.mark.slow
def test_lists_of_no_problem_are_no_error():
    assert autotune.prepare([], H200) == [] and autotune.tune([], gpu=H200) == []


# Anything for any argument of the calls on arrays

ANYTHING = [None, 5, -1, 1.5, float("nan"), "x", "", [], [1], (1, 2), (1, 2, 3), {}, True, b"x", int, 10**30, -10**30, 1e308,
            1 + 2j, Tensor(np.zeros(4, np.float32)), Tensor(np.zeros((2, 4), np.int32))]
OPTIONS = ("causal", "window", "scale", "softcap", "sinks", "alibi_slopes", "return_lse", "out")
CACHE_OPTIONS = (*OPTIONS, "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "k_scale", "v_scale",
                 "num_splits", "check")


def arguments_of(call: str) -> tuple[list, tuple]:
    """(good positional arguments, names of the others)"""
    q, k, v = qkv()
    if "varlen" not in call:
        return [q, k, v], CACHE_OPTIONS if "cache" in call else OPTIONS
    q, k, v = (Tensor(array.array.reshape(-1, *array.shape[2:])) for array in (q, k, v))
    return [q, k, v, Tensor(np.array([0, 5, 10], np.int32)), Tensor(np.array([0, 7, 14], np.int32)), 5, 7], OPTIONS


@pytest.mark.parametrize("call", ["attention", "explain", "attention_with_kvcache", "explain_with_kvcache", "attention_varlen",
                                  "explain_varlen"])
def test_a_call_works_or_says_in_a_sentence_why_not(gpu, call):
    function = getattr(autotune, call)
    good, options = arguments_of(call)
    function(*good)
    silent = []
    for value in ANYTHING:
        calls = {n: ([*good[:n], value, *good[n + 1:]], {}) for n in range(len(good))}
        calls |= {name: (good, {name: value}) for name in options}
        for which, (positional, keywords) in calls.items():
            try:
                function(*positional, **keywords)
            except Exception as error:
                if not is_user_error(error):
                    silent.append((which, value, error))
    assert not silent
