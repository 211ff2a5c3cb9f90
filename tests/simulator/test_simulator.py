"""Every kernel on the simulator: random problems and configs, every feature; and the simulator as a program."""

import random
import re
import shutil
import sys
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import simulator_probes

from autotune.cli import main
from autotune.cuda import cache, compile
from autotune import kernels, simulator
from autotune.calls.arguments import SMALLEST_SCALE
from autotune.check.verdict import Guarded, compare
from autotune.core.gpu import by_name
from autotune.check.inputs import KINDS, make_inputs
from autotune.check.numerics import to_float32
from autotune.core.problem import Problem
from autotune.cuda.render import HOST_TWINS
from autotune.simulator import compiler
from autotune.simulator.shrink import tile_of

pytestmark = pytest.mark.slow

GPU = by_name("nvidia-h200")
CASES = 14  # configs for each kernel; each runs with SEEDS_EACH seeds
SEEDS_EACH = 3

MASKS = ("", "-causal", "-left40-right8", "-causal-left30", "-left100")
HEADS = ("h1x1", "h4x2", "h3x1", "h2x2", "h6x2")
DIMS = ("d64", "d16", "d40", "d24x72", "d128", "d72x32")
EXTRAS = ("", "-softcap20", "-alibi", "-softcap20-alibi")
CACHES = ("", "-page16", "-kve4m3", "-page48-kve4m3")
SMALL = 2**17  # shared memory of the configs that are drawn: larger tiles only take longer
NAMES = [name for name, kernel in kernels.KERNELS.items() if kernel.op != "backward"]  # test_backward_kernels.py has those


@lru_cache(maxsize=None)
def cases(name: str) -> tuple[tuple[Problem, object], ...]:
    """(problem, config) pairs: at least 3 key tiles, 2 blocks of rows, ragged at both ends, every mask and feature."""
    kernel, choose = kernels.KERNELS[name], random.Random(f"simulator {name}")
    decode = name.startswith("decode")
    found = []
    while len(found) < CASES:
        group = choose.choice((5, 7, 9)) if decode else 1
        turn = len(found)  # features come in turn, so that each is there; shapes and configs are drawn
        extras = EXTRAS[turn % 4], ("", "-sinks", "")[turn % 3], CACHES[turn // 2 % 4] if decode else ""
        shape = f"b{choose.choice((1, 2, 3))}-h{2 * group}x2" if decode else f"b{choose.choice((1, 2))}-{HEADS[turn % 5]}"
        text = f"{name.split('_')[0]}-{kernel.dtypes[turn % len(kernel.dtypes)]}-{shape}-q8-k8-{DIMS[turn % 6]}{MASKS[turn % 5]}"
        for extra in extras:  # those that the kernel has
            text += extra * (kernel.reject(Problem.parse(text + extra), GPU) is None)
        static = Problem.parse(text).static
        config = kernel.config(static, kernel.draw(choose.choice))
        if config["smem_bytes"] > SMALL or kernel.illegal(static, config, GPU):
            continue
        rows, keys = tile_of(config)
        q = choose.randint(rows // group + 1, max(2 * rows // group, rows // group + 1))
        k = choose.randint(2 * keys + 1, 4 * keys) * (4 if decode else 1)
        q, k = q + (group * q % rows == 0), k + (k % keys == 0)
        if decode and q > 16:
            continue
        found.append((Problem.parse(text.replace("-q8-k8-", f"-q{q}-k{k}-")).simplified(), config))
    return tuple(found)


@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_right(name, number):
    problem, config = cases(name)[number]
    rows, keys = tile_of(config)
    queries = problem.seqlen_q * (problem.group if problem.op == "decode" else 1)
    assert problem.seqlen_k > 2 * keys and problem.seqlen_k % keys and queries > rows and (queries % rows or rows == 1)
    seeds = range(number, number + SEEDS_EACH)
    kinds = [KINDS[(number + i) % len(KINDS)] for i in range(SEEDS_EACH)]
    for seed, kind in zip(seeds, kinds):
        verdict = simulator.verify(problem, config, (seed,), (kind,))
        assert verdict.ok, f"{problem}: {config}: {verdict.message}"


def launched(problem, config, inputs, seed, source=None):
    """(out, lse, simulation)"""
    out = Guarded(np, (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v), problem.out_dtype).array
    lse = Guarded(np, (problem.batch, problem.heads_q, problem.seqlen_q), "fp32").array
    return out, lse, simulator.simulate(problem, config, inputs, out, lse, seed, source=source)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_events_does_not_reach_the_result(name):
    problem, config = cases(name)[3]
    inputs = make_inputs(problem, "random", 5)
    first_out, first_lse, _ = launched(problem, config, inputs, 0)
    for seed in range(1, 6):
        out, lse, simulation = launched(problem, config, inputs, seed)
        assert simulation.ok and out.tobytes() == first_out.tobytes() and lse.tobytes() == first_lse.tobytes()


EDGES = ("b1-h2x1-q1-k1-d64-causal", "b1-h2x1-q7-k0-d64", "b1-h2x1-q10-k3-d64-causal", "b2-h1x1-q13-k300-d64-left0-right0",
         "b1-h2x2-q5-k129-d64-sinks")


@pytest.mark.parametrize("text", EDGES)
@pytest.mark.parametrize("name", NAMES)
def test_lengths_at_the_edge(name, text):
    kernel = kernels.KERNELS[name]
    problem = Problem.parse(f"{name.split('_')[0]}-{kernel.dtypes[0]}-{text}").simplified()
    verdict = simulator.verify(problem, kernel.default(problem, GPU), (1, 2), ("random", "masked_nan"))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("name", NAMES)
def test_a_sink_that_is_nan_makes_its_head_nan_and_no_other(name):
    kernel = kernels.KERNELS[name]
    problem = Problem.parse(f"{name.split('_')[0]}-{kernel.dtypes[0]}-b1-h2x1-q5-k40-d64-sinks")
    inputs = make_inputs(problem, "random", 3)
    inputs.sinks[1] = np.nan
    out, lse, simulation = launched(problem, kernel.default(problem, GPU), inputs, 0)
    values = to_float32(out, problem.dtype)
    assert simulation.ok and np.isfinite(values[:, :, 0]).all() and np.isfinite(lse[:, 0]).all()
    assert np.isnan(values[:, :, 1]).all() and np.isnan(lse[:, 1]).all()


@pytest.mark.parametrize("values", [
    {}, dict(num_stages=2), dict(num_stages=3, overlap=True), dict(num_stages=2, q_in_registers=True, block_m=128),
    dict(block_heads=2, block_n=16), dict(num_stages=1, block_n=48, rescale_slack=8)], ids=str)
@pytest.mark.parametrize("features", ["h2x1-q101-k131-d64", "h6x2-q70-k130-d40x72-causal-left50-alibi-sinks",
                                      "h4x2-q70-k130-d32-causal-varlen", "h2x2-q70-k130-d72-left60-page16"])
def test_turing_multiplies_and_copies_in_every_way(values, features):
    kernel, problem = kernels.KERNELS["forward_mma"], Problem.parse(f"forward-fp16-b2-{features}")
    config = kernel.config(problem.static, {**kernel.default(problem, by_name("tesla-t4")).values, **values})
    assert config["turing"] and kernel.illegal(problem.static, config, GPU) is None
    verdict = simulator.verify(problem, config, (0, 1), ("random", "masked_nan"))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("before, after", [(r"\bend\.factor\b", "(end.factor * 1.02f)"), (r"\bend\.lse\b", "(end.lse + 0.01f)")])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_number_is_found(name, before, after):
    problem, config = cases(name)[0]
    source, count = re.subn(before, after, simulator.host_source(problem, config))
    assert count
    verdict = simulator.verify(problem, config, (0,), ("random",), source=source)
    assert not verdict.ok and "is wrong" in verdict.message


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_sinks_of_every_dtype(name, dtype):
    problem, config = next((p, c) for p, c in cases(name) if p.sinks)
    inputs = with_sinks(make_inputs(problem, "random", 3), dtype)
    out, lse, simulation = launched(problem, config, inputs, 1)
    assert simulation.ok and compare(problem, inputs, out, lse).ok


@pytest.mark.parametrize("features", ["-alibi", "-causal-left30-softcap20-alibi-sinks"])
@pytest.mark.parametrize("name", NAMES)
def test_slopes_of_any_sign_and_of_each_batch_entry(name, features):
    op = name.split("_")[0]
    queries = 70 if op == "forward" else 5
    problem = Problem.parse(f"{op}-{kernels.KERNELS[name].dtypes[0]}-b2-h4x2-q{queries}-k100-d32{features}")
    inputs = make_inputs(problem, "random", 4)
    slopes = np.array([[0.5, -0.25, 0, 2, 9, 9], [-0.125, 1e-3, 40, 0.3, 9, 9]], np.float32)[:, :4]  # with gaps
    for given, scale in ((slopes, inputs.scale), (slopes[1], inputs.scale), (slopes, SMALLEST_SCALE)):
        chosen = replace(inputs, alibi_slopes=given, scale=scale)
        out, lse, simulation = launched(problem, kernels.KERNELS[name].default(problem, GPU), chosen, 1)
        assert simulation.ok and compare(problem, chosen, out, lse).ok


@pytest.mark.parametrize("name", NAMES)
def test_slopes_of_0_change_no_bit(name):
    kernel = kernels.KERNELS[name]
    text = f"{name.split('_')[0]}-{kernel.dtypes[0]}-b2-h4x2-q13-k100-d32-causal"
    plain, sloped = Problem.parse(text), Problem.parse(text + "-alibi")
    config = kernel.default(sloped, GPU)
    inputs = make_inputs(sloped, "random", 7)
    results = []
    for problem, slopes in ((plain, None), (sloped, np.zeros(4, np.float32)), (sloped, np.full(4, -0.0, np.float32))):
        out, lse, simulation = launched(problem, config, replace(inputs, problem=problem, alibi_slopes=slopes), 2)
        assert simulation.ok
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("block_heads", [2, 4, 8])
@pytest.mark.parametrize("name", ["forward_mma", "forward_wgmma"])
def test_heads_that_share_a_block_have_their_own_slopes(name, block_heads):
    problem = Problem.parse("forward-bf16-b1-h7x1-q50-k100-d32-causal-alibi")
    kernel = kernels.KERNELS[name]
    config = kernel.config(problem.static, {**kernel.default(problem, GPU).values, "block_heads": block_heads, "block_n": 48})
    verdict = simulator.verify(problem, config, (0, 1), ("random", "needles"))
    assert kernel.illegal(problem.static, config, GPU) is None and verdict.ok, verdict.message


def with_sinks(inputs, dtype):
    import ml_dtypes

    return replace(inputs, sinks=inputs.sinks.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def traced(source: str, names: set[str]) -> str:
    """The source in which each of these functions says its name on standard error when it is called first."""
    def mark(match: re.Match) -> str:
        if match["name"] not in names:
            return match[0]
        return match[0] + f' {{ static bool told = (fprintf(stderr, "<{match["name"]}>"), true); (void)told; }} '

    definition = r"DEVICE [\w:<>* ]*?\b(?P<name>\w+)(?:<\w+>)?\([^;{]*\)(?: const)? \{"
    return "#include <cstdio>\n" + re.sub(definition, mark, source)


def test_every_wrapper_that_templates_call_is_executed():
    """Over the kernels' cases; a wrapper that none of them reaches is dead or untested."""
    functions = set().union(*simulator_probes.wrappers(HOST_TWINS).values())
    wanted, executed = set(), set()
    for name in NAMES:
        for problem, config in cases(name):
            source = simulator.host_source(problem, config)
            body = source[source.index("using Element ="):]
            called = {function for function in functions if re.search(rf"\b{function}\b", body)}
            wanted |= called
            if called <= executed:
                continue
            inputs = make_inputs(problem, "random", 0)
            inputs = with_sinks(inputs, "float16") if problem.sinks else inputs
            executed |= set(re.findall(r"<(\w+)>", launched(problem, config, inputs, 0, traced(source, wanted))[2].log))
    assert wanted - executed == set()


# The simulator as a program


def test_a_source_that_is_no_cpp_is_refused_with_the_first_error():
    with pytest.raises(compile.CompileError, match="refused the simulated kernel: .*error"):
        simulator_probes.run("p.out[0] = not_declared;")


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    compiler.compiler.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    try:
        with pytest.raises(compile.CompilerMissing, match="ziglang"):
            compiler.compiler()
    finally:
        compiler.compiler.cache_clear()


def test_a_program_is_compiled_once_and_appears_whole(tmp_path, monkeypatch):
    runtime = compiler._runtime_objects(compiler._folder(), cache.Trust.of(compiler._folder()))
    monkeypatch.setattr(compiler, "_runtime_objects", lambda *_: runtime)
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    source = simulator_probes.source("p.out[0] = 1;")
    path = compiler.program(source, ("probe",))
    stamp = path.stat().st_mtime_ns
    assert compiler.program(source, ("probe",)) == path and path.stat().st_mtime_ns == stamp
    assert sorted(p.name for p in path.parent.iterdir()) == ["kernel", "kernel.cpp", "sum.txt"]
    whole = path.read_bytes()
    for damage in (whole[:len(whole) // 2], b"", whole[:-1] + b"x"):
        path.write_bytes(damage)
        assert compiler.program(source, ("probe",)) == path and path.stat().st_size == len(whole)
    (path.parent / "sum.txt").write_text("[" * 100000)
    assert compiler.program(source, ("probe",)).parent == path.parent and len((path.parent / "sum.txt").read_text()) == 65
    assert not [p for p in path.parents[1].iterdir() if p.name.startswith(".new")]


def runs_everything():
    shape = "bf16-b1-h2x1-q15-k150-d64-causal"
    for name, kernel in kernels.KERNELS.items():
        problem = Problem.parse(f"{name.split('_')[0]}-{shape}")
        verdict = simulator.verify(problem, kernel.default(problem, GPU), (0, 2), ("random",))
        assert verdict.ok, verdict.message
    assert simulator_probes.finding("if (lane_id() != 5) sync_warp();").kind == "deadlock"


def with_compiler(monkeypatch, tmp_path, command=None, flags=()):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "RUNTIME_FLAGS", (*compiler.RUNTIME_FLAGS, *flags))
    if command:
        monkeypatch.setattr(compiler, "compiler", lambda: command)
    compiler._runtime_key.cache_clear()


@pytest.mark.parametrize("command", [("clang++",), (sys.executable, "-m", "ziglang", "c++")], ids=["clang", "zig"])
def test_other_compilers(command, monkeypatch, tmp_path):
    there = compiler.importlib.util.find_spec("ziglang") if "ziglang" in command else shutil.which(command[0])
    if not there:
        pytest.skip(f"{command[-2] if len(command) > 1 else command[0]} is not installed")
    with_compiler(monkeypatch, tmp_path, command)
    runs_everything()
    compiler._runtime_key.cache_clear()


def test_machines_without_a_switch_of_their_own(monkeypatch, tmp_path):
    """Fibers on ucontext, which is what processors other than x86-64 and ARM get."""
    with_compiler(monkeypatch, tmp_path, flags=("-DSIM_UCONTEXT",))
    runs_everything()
    compiler._runtime_key.cache_clear()


# Small problems for large ones


def effects(problem):
    """For each bound of the mask, of what share of all (query, key) pairs it decides."""
    def pairs(bounds):
        return bounds.visible_pairs(problem.seqlen_q, problem.seqlen_k) / (problem.seqlen_q * problem.seqlen_k)

    without = {name: problem.bounds._replace(**{name: type(problem.bounds)._field_defaults[name]})
               for name in problem.bounds._fields}
    return {name: share for name, other in without.items() if (share := abs(pairs(problem.bounds) - pairs(other)))}


@pytest.mark.parametrize("text", [
    "forward-bf16-b8-h32x8-q8192-k8192-d64-causal", "forward-bf16-b1-h8x8-q1-k100000-d64-causal-left4096",
    "forward-fp16-b1-h4x4-q33-k17-d64-causal-left0", "forward-bf16-b1-h4x4-q4096-k4096-d64-left64-right2000",
    "forward-bf16-b1-h4x4-q4096-k4096-d64-right300", "decode-bf16-b64-h32x8-q1-k8192-d64-causal-page64"])
def test_a_small_problem_takes_the_place_of_a_large_one(text):
    problem = Problem.parse(text).simplified()
    for kernel in kernels.candidates(problem, GPU):
        config = kernel.default(problem, GPU)
        small = simulator.shrunk(problem, config)
        assert small.static == problem.static and small == simulator.shrunk(small, config)
        assert (small.sinks, small.page_size) == (problem.sinks, problem.page_size)
        assert small.flops < 3e9 and small.seqlen_q <= problem.seqlen_q and small.seqlen_k <= problem.seqlen_k
        assert effects(small).keys() == effects(problem).keys()
        assert all(share >= min(effects(problem)[name], 0.02) for name, share in effects(small).items()), effects(small)
        rows, keys = tile_of(config)
        if problem.op == "forward" and problem.seqlen_k > 4 * keys:
            assert small.seqlen_k > 3 * keys and small.seqlen_k % keys


def test_the_command_line_simulates(capsys):
    text = "forward-bf16-b1-h2x1-q8192-k8192-d64-causal"
    config = kernels.KERNELS["forward_simt"].default(Problem.parse(text), GPU)
    assert main.main(["verify", "--simulate", text, "--config", str(config), "--gpu", GPU.name]) == 0
    assert "all are correct" in capsys.readouterr().out
    assert main.main(["verify", text, "--gpu", GPU.name]) == 2
    assert "--simulate" in capsys.readouterr().err


def test_the_command_line_tells_what_is_found(capsys, monkeypatch):
    text = "forward-bf16-b1-h2x1-q70-k200-d64-causal"
    config = kernels.KERNELS["forward_simt"].default(Problem.parse(text), GPU)
    whole = simulator.job.host_source
    monkeypatch.setattr(simulator.job, "host_source", lambda *arguments: whole(*arguments).replace("sync_block();", ";"))
    assert main.main(["verify", "--simulate", text, "--config", str(config), "--gpu", GPU.name]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "1 of 1 are wrong" in out and ("race" in out or "uninitialised" in out)


# Numbers


@pytest.mark.parametrize("name, dtype, bits", [("fp16", "float16", 16), ("bf16", "bfloat16", 16), ("e4m3", "float8_e4m3fn", 8)])
def test_number_formats(name, dtype, bits):
    """Every number of the format to float, and floats of every size to the format: to nearest, ties to even."""
    import ml_dtypes

    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    words = np.arange(2**bits, dtype=np.uint32)
    out, _ = simulator_probes.run(f"for (int i = thread_id(); i < {words.size}; i += 32) reinterpret_cast<float*>(p.out)[i] = "
                                  f"sim::to_float(sim::Format::{name}, i);", out_words=words.size)
    numbers = words.astype(f"u{bits // 8}").view(target).astype(np.float32)
    assert np.array_equal(out.view(np.float32), numbers, equal_nan=True)

    random = np.random.default_rng(0)
    values = (random.standard_normal(3000) * 10.0 ** random.uniform(-9, 5, 3000)).astype(np.float32)
    finite = np.sort(numbers[np.isfinite(numbers)])
    values = np.concatenate([values, finite[1:] / 2 + finite[:-1] / 2, [np.nan, np.inf, -np.inf, 0, -0.0]]).astype(np.float32)
    out, _ = simulator_probes.run(f"for (int i = thread_id(); i < {values.size}; i += 32) p.out[i] = sim::from_float("
                                  f"sim::Format::{name}, reinterpret_cast<const float*>(p.in)[i]);", data=values,
                                  out_words=values.size)
    if name == "e4m3":  # it saturates, as the GPU's conversion does
        values = np.clip(values, -448, 448)
    with np.errstate(over="ignore"):
        expected = values.astype(target).astype(np.float32)
    assert np.array_equal(out.astype(f"u{bits // 8}").view(target).astype(np.float32), expected, equal_nan=True)
