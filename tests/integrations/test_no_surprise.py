"""No surprise at run time: a model is prepared whole, later compiles raise, and cubins made ahead serve without a compiler."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fake_arrays import fake_gpu, qkv  # noqa: F401

import autotune
from autotune.calls import plans
from autotune.cli import cubins
from autotune.core.gpu import by_name
from autotune.core.problem import Problem
from autotune.cuda import compile, forbid, prebuilt
from autotune.cuda.render import render
from autotune.database import view
from autotune.kernels import kernel_of
from autotune.models.catalogue import ModelError
from autotune.models import serving
from autotune.models.serving import problems_of

pytestmark = pytest.mark.slow

GPU = by_name("nvidia-h200")
PROBLEM = "forward-fp32-b1-h2x2-q16-k16-d16-causal"
CONFIG = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 2,
          "dtype": "bfloat16", "max_position_embeddings": 2048}


@pytest.fixture(name="nothing_compiled")
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "compile_source", _counted := Counted(compile.compile_source))
    return _counted


class Counted:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def test_a_compile_raises_while_it_is_forbidden(nothing_compiled):
    with autotune.forbid_compiling():
        with pytest.raises(autotune.CompilingForbidden, match=r"sm_90.*autotune\.prepare\(\)"):
            autotune.prepare(PROBLEM, gpu="nvidia-h200")
    autotune.prepare(PROBLEM, gpu="nvidia-h200")
    with autotune.forbid_compiling():
        autotune.prepare(PROBLEM, gpu="nvidia-h200")  # from the cache folder
    assert nothing_compiled.calls == 2


def test_it_holds_for_the_process_until_it_ends_and_for_all_threads():
    first = autotune.forbid_compiling()
    try:
        with autotune.forbid_compiling():
            pass
        seen = []
        thread = threading.Thread(target=lambda: seen.append(pytest.raises(forbid.CompilingForbidden, forbid.check, "sm_90")))
        thread.start()
        thread.join()
        assert seen
    finally:
        first.end()
        first.end()
    forbid.check("sm_90")


def test_after_prepare_no_call_of_a_model_compiles(gpu, monkeypatch):
    """Prompts and steps of sizes between those that were prepared."""
    one = compile.build(Problem.parse(PROBLEM).static, autotune.lookup(PROBLEM, GPU).config, GPU)

    class Entries(dict):
        def __missing__(self, entry):
            return next(iter(one.entries.values()))

    monkeypatch.setattr(compile, "cached", lambda source, target: replace(one, source=source, target=target, entries=Entries()))
    config = {**CONFIG, "num_attention_heads": 4, "hidden_size": 256}
    monkeypatch.setattr(serving, "buckets", lambda longest, buckets=serving.buckets: buckets(256))
    autotune.prepare(config, gpu=0)
    keys = set(plans._binaries)
    for batch, rows, keys_ in ((1, 100, 100), (3, 77, 77), (2, 5, 200), (5, 33, 33)):
        autotune.attention(*qkv(batch, rows, keys_, 4, 2, 64), causal=True)
    for batch, keys_ in ((1, 200), (6, 222), (17, 40)):
        autotune.attention_with_kvcache(*qkv(batch, 1, keys_, 4, 2, 64))
    assert set(plans._binaries) == keys


@pytest.mark.parametrize("form", ["name", "values", "path"])
def test_models_in_every_form(form, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    problems = problems_of({"name": "gpt-oss-20b", "values": CONFIG, "path": tmp_path}[form], batches=(1, 4), longest=64)
    assert all(type(problem) is Problem for problem in problems) and len(set(problems)) == len(problems)
    kinds = {(p.op, p.kv, p.page_size) for p in problems}
    assert kinds == {("forward", "dense", 0), ("forward", "varlen", 0), ("decode", "dense", 0), ("decode", "paged", 1),
                     ("decode", "paged", 16), ("forward", "paged", 1), ("forward", "paged", 16)}
    assert {p.sinks for p in problems} == {form == "name"} and {p.batch for p in problems} == {1, 4}


def test_models_and_configs_of_transformers():
    transformers = pytest.importorskip("transformers")
    from tiny_models import pair

    for kind in ("gemma2", "bert"):
        model, _ = pair(kind)
        masks = {p.static.mask for p in problems_of(model, longest=64) if p.op == "forward" and p.seqlen_q > 1}
        assert masks == ({"causal", "window"} if kind == "gemma2" else {"full"})
        assert {p.dtype for p in problems_of(model, longest=64)} == {"fp32"}
    assert {p.sinks for p in problems_of(transformers.GptOssConfig(), longest=64)} == {True}


@pytest.mark.parametrize("wrong, match", [(7, "a int is no model"),
                         ({}, "num_hidden_layers|num_attention_heads"), ("gpt-9", "gpt-9")])
def test_what_is_no_model_says_so(wrong, match):
    with pytest.raises(ModelError, match=match):
        problems_of(wrong)


@pytest.fixture(scope="module", name="folder")
def one_cubin(tmp_path_factory):
    """A folder with the cubin that PROBLEM needs on an H200."""
    folder = tmp_path_factory.mktemp("cubins")
    match = plans.match_for(Problem.parse(PROBLEM), GPU)
    compile.store(compile.build(match.problem.static, match.config, GPU), folder)
    return folder


NO_COMPILER = """
import sys
class NoCompiler:
    def find_spec(self, name, path=None, target=None):
        if "nvrtc" in name:
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, NoCompiler())
import time
import autotune
from autotune.calls import plans
from autotune.core.problem import Problem

build = plans.build
import fake_arrays, fake_cuda, pytest
fake_arrays.FakeGpu = fake_cuda.FakeCuda  # takes whatever a driver would, and computes nothing
gpu = fake_arrays.install(pytest.MonkeyPatch())
loaded = []
plans.build = lambda match: loaded.append(build(match)) or loaded[-1]
autotune.forbid_compiling()
p = Problem.parse(sys.argv[1])
arrays = fake_arrays.qkv(p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_kv, p.head_dim, dtype=p.dtype)
out = autotune.attention(*arrays, causal=True)
autotune.attention(*arrays, causal=True)
(binary,) = loaded
assert out.shape == arrays[0].shape and len(gpu.launches) == 2 and len(gpu.modules) == 1
assert binary.image[:4] == b"\\x7fELF" and binary.entries
print(binary.nvrtc, binary.target, time.process_time())
"""


def serve(folder, problem):
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "AUTOTUNE_CACHE": str(folder), "PATH": "", "PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", NO_COMPILER, problem],
                          env=environment, capture_output=True, text=True, timeout=120)


def test_the_first_call_of_a_fresh_process_without_a_compiler_launches(folder):
    """No NVRTC, nothing on PATH: import, lookup, the cubin that was shipped, and the launch, in less than 10 s of the CPU."""
    done = serve(folder, PROBLEM)
    assert done.returncode == 0, done.stderr
    nvrtc, target, seconds = done.stdout.split()
    assert (nvrtc, target) == (compile.nvrtc_version(), "sm_90") and float(seconds) < 10
    other = serve(folder, PROBLEM.replace("d16", "d24"))
    assert other.returncode and ("CompilerMissing" in other.stderr or "CompilingForbidden" in other.stderr)


def test_damaged_cubins_are_absent_ones(folder, monkeypatch, tmp_path):
    copies = {}
    for damage in ("cut", "swapped", "no facts", "not json", "list"):
        place = copies[damage] = tmp_path / damage
        (place / prebuilt.NAME).mkdir(parents=True)
        for file in (folder / prebuilt.NAME).iterdir():
            data = file.read_bytes()
            if file.suffix == ".cubin":
                data = {"cut": data[:99], "swapped": data[:-1] + b"?"}.get(damage, data)
            else:
                data = {"no facts": None, "not json": b"{", "list": b"[]"}.get(damage, data)
            if data is not None:
                (place / prebuilt.NAME / file.name).write_bytes(data)
    key = next((folder / prebuilt.NAME).glob("*.json")).stem
    assert all(prebuilt.find(place, key) is None for place in copies.values())
    monkeypatch.setattr(prebuilt, "PACKAGE_FOLDER", folder / prebuilt.NAME)
    assert prebuilt.find(copies["cut"], key)


def test_every_shipped_record_gets_a_cubin(monkeypatch, tmp_path):
    """Compiled sources are those that a call would ask for; NVRTC is spared."""
    made = []
    monkeypatch.setattr(cubins.compile, "cached", lambda source, target: made.append((source, target)) or source)
    monkeypatch.setattr(cubins.compile, "store", lambda binary, folder: None)
    records = [record for _, record in view.all_records((view.shipped_root(),))]
    assert cubins.write(tmp_path, view.shipped_root()) == len(made) == len(set(made))
    for record in records[::40]:
        target = kernel_of(record.config).target(view.gpu_of(record.gpu))
        assert (render(record.problem.static, record.config, target), target) in made
    assert cubins.write(tmp_path, view.shipped_root(), ("no such GPU",)) == 0
