"""generated/ and `db check`: what they say of records that are illegal, stale or unreadable, and files that differ."""

import dataclasses
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from autotune.cli import generated as build
from autotune.cli import winners
from autotune.cuda import compile
from autotune.cuda.render import render
from autotune.database import view as database
from autotune.core import gpu
from autotune import kernels
from autotune.core.problem import Problem
from autotune.database.record import GpuKey, Record
from samples import legal, searched

pytestmark = pytest.mark.slow

H200 = gpu.by_name("nvidia-h200")
PROBLEM = Problem.parse("forward-bf16-b1-h32x8-q8192-k8192-d64-causal")
KERNEL = kernels.candidates(PROBLEM, H200)[0]
CONFIG = next(legal(KERNEL, PROBLEM.static, H200))
SMALLEST = Problem.parse("forward-bf16-b1-h2x2-q64-k64-d64")
SMALL = kernels.KERNELS["forward_simt"].default(SMALLEST, H200)
MOST_BYTES = 1_150_000  # of generated/ with kernels of all archs and ops, gradients included


def varied(config, kind):
    """Legal configs that differ from `config` in one parameter of `kind`."""
    for parameter in KERNEL.parameters:
        for value in parameter.values if parameter.kind == kind else ():
            other = KERNEL.config(PROBLEM.static, {**config.values, parameter.name: value})
            if other != config and KERNEL.illegal(PROBLEM.static, other, H200) is None:
                yield other


def binary(config=CONFIG, problem=PROBLEM):
    return compile.build(problem.static, config, H200)


def record(problem=PROBLEM, config=CONFIG, sha=None, **changes):
    return Record(**dict(problem=problem, gpu=GpuKey.of(H200), config=config, evidence="measured", time_us=412.5,
                         date="2026-01-31 12:00:00 UTC", trials=120, nvrtc=compile.nvrtc_version(), autotune="0.1.0",
                         cubin_sha256=sha or binary(config, problem).sha256, default_config=CONFIG,
                         default_time_us=450.0) | changes)


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        try:
            compile.nvrtc_version()
        except compile.CompilerMissing as error:
            pytest.skip(f"needs NVRTC: {error}")
        yield


@pytest.fixture
def root(tmp_path):
    return tmp_path / "tuning_db"


def later(hours: int) -> str:
    """The date of a record that is newer than any made today."""
    return f"{datetime.now(timezone.utc) + timedelta(hours=hours):%Y-%m-%d %H:%M:%S} UTC"


@pytest.fixture
def generated(tmp_path):
    return tmp_path / "generated"


def test_one_source_for_each_kind_of_problem_and_one_table_for_each_gpu(root, generated):
    launch, compiled = next(varied(CONFIG, "launch")), next(varied(CONFIG, "compile"))
    longer = dataclasses.replace(PROBLEM, seqlen_q=16384, seqlen_k=16384)
    small, full = dataclasses.replace(PROBLEM, heads_q=2, heads_kv=2), dataclasses.replace(PROBLEM, window_right=None)
    wide = dataclasses.replace(PROBLEM, heads_q=4, heads_kv=4, head_dim=72, head_dim_v=72)
    plain = kernels.default_config(wide, H200)
    other = KERNEL.config(wide.static, {**plain.values, "head_group": 64 // plain["head_group"]})
    half = dataclasses.replace(GpuKey.of(H200), name="half-h200", sms=66)
    database.write([record(), record(longer, launch), record(small, compiled, default_config=None, default_time_us=None),
                    record(full), record(wide, plain, default_config=other), record(gpu=half)], root)
    texts = {path.relative_to(generated).as_posix(): path.read_text() for path in build.write(generated, root)}
    name = f"{KERNEL.name}-dense.cu"
    assert list(texts) == [name, "half-h200.md", "nvidia-h200.md"]
    header, _, body = texts[name].partition("\n\n")
    assert body == binary().source == binary(launch).source
    assert all(line.startswith("//") for line in header.splitlines())
    resources = binary().entries[KERNEL.name]
    for fact in (f"winner of {longer} on nvidia-h200", f"{resources.registers} registers",
                 f"{resources.spill_bytes} bytes spilled",
                 f"{CONFIG['smem_bytes']} bytes of shared memory", compile.nvrtc_version(),
                 f"autotune source {longer} --gpu nvidia-h200", build.MARK):
        assert fact in " ".join(header.replace("//", " ").split()), fact

    lines = [line.strip("|").split("|") for line in texts["nvidia-h200.md"].splitlines()]
    rows = {line[0]: line for line in lines if len(line) > 6}
    assert set(rows) == {"problem", "---", full.text, small.text, wide.text, PROBLEM.text, longer.text}
    column = rows["problem"].index
    parameter, = (p for p, value in launch.items if CONFIG[p] != value)
    assert rows[longer.text][column(parameter)] != rows[PROBLEM.text][column(parameter)]
    assert rows[PROBLEM.text][column("us")] == "412.5" and rows[PROBLEM.text][column("gain")] == "1.091"
    assert rows[wide.text][column("gain")] == "the default"  # which it is today, whatever it was faster than then
    assert rows[small.text][column("gain")] == "-"
    assert f"[dense]({name})" in texts["nvidia-h200.md"] and build.MARK in texts["half-h200.md"]
    assert PROBLEM.text in texts["half-h200.md"] and f"|{full.text}|" not in texts["half-h200.md"]


def rendered_only(static, config, gpu):
    """`compile.build` without a compiler: nothing is known of resources."""
    target = kernels.kernel_of(config).target(gpu)
    return SimpleNamespace(source=render(static, config, target), target=target, nvrtc="13.0.88", entries={})


def texts_of(root, tuned):
    """What generated/ holds if each of `tuned`, keys with what they are of, has all problems that ship, with default configs."""
    problems = [each.problem for _, each in database.all_records([database.shipped_root()])]
    for key, of in tuned.items():
        database.write([record(problem, kernels.default_config(problem, of), "0" * 64, gpu=key, default_config=None,
                               default_time_us=None) for problem in problems if kernels.candidates(problem, of)], root)
    return {path.name: text for path, text in build.sources(root).items()}


def test_ten_tuned_gpus_fit(tmp_path, monkeypatch):
    """All of the catalogue, of all archs. One more of an arch adds its table, and moves no source."""
    monkeypatch.setattr(compile, "build", rendered_only)
    every = {GpuKey.of(each): each for each in map(gpu.by_name, gpu.catalogue())}
    texts = texts_of(tmp_path / "every", every)
    assert len(every) >= 10 and {f"{key.name}.md" for key in every} == {name for name in texts if name.endswith(".md")}
    assert {name.partition("-")[0] for name in texts if name.endswith(".cu")} >= {"decode_mma", "forward_mma", "forward_wgmma"}
    assert sum(len(text.encode()) for text in texts.values()) < MOST_BYTES

    half = dataclasses.replace(GpuKey.of(H200), name="half-h200", sms=66)
    assert len(texts_of(tmp_path / "two", {GpuKey.of(H200): H200})) == len(one := build.sources(tmp_path / "two"))
    two = texts_of(tmp_path / "two", {half: H200})
    assert {name: text for name, text in two.items() if name != "half-h200.md"} == {path.name: text for path, text in one.items()}
    assert len(two["half-h200.md"].encode()) < 25_000


@pytest.mark.parametrize("more, less", [
    ("forward-bf16-b1-h1x1-q64-k64-d64-causal-left9", "forward-bf16-b1-h1x1-q640-k640-d64-causal-softcap5"),
    ("forward-bf16-b1-h1x1-q64-k64-d64-causal", "forward-bf16-b1-h1x1-q640-k640-d64-softcap5-alibi-sinks"),
    ("forward-bf16-b1-h1x1-q64-k64-d64-softcap5", "forward-bf16-b1-h1x1-q640-k640-d64-alibi-sinks"),
    ("forward-bf16-b1-h1x1-q64-k64-d64-sinks", "forward-bf16-b1-h1x1-q640-k640-d64"),
    ("forward-bf16-b1-h1x1-q640-k640-d64", "forward-bf16-b1-h1x1-q64-k64-d64"),
])
def test_the_problem_with_most_features_is_shown(root, monkeypatch, more, less):
    monkeypatch.setattr(compile, "build", rendered_only)
    both = [Problem.parse(text) for text in (more, less)]
    database.write([record(each, kernels.default_config(each, H200), "0" * 64, default_config=None, default_time_us=None)
                    for each in both], root)
    shown, = (text for path, text in build.sources(root).items() if path.suffix == ".cu")
    assert f"autotune source {more} --gpu nvidia-h200" in shown


@pytest.mark.parametrize("problem, kind", [
    ("forward-bf16-b1-h1x1-q64-k64-d64-causal-softcap5", "dense"), ("forward-fp16-b1-h1x1-q64-k64-d80", "dense"),
    ("forward-fp32-b1-h1x1-q64-k64-d64", "dense-fp32"), ("forward-bf16-b1-h1x1-q64-k64-d64-varlen", "varlen"),
    ("decode-fp16-b1-h1x1-q1-k64-d64-page16", "paged"), ("decode-bf16-b1-h1x1-q1-k64-d64-left9-page16-kve4m3", "paged-e4m3")])
def test_a_kind_is_where_keys_come_from_and_their_dtype(problem, kind):
    assert winners.kind_of(Problem.parse(problem).static) == kind


def test_the_source_compiles_as_it_stands_to_the_cubin_of_its_record(root):
    database.write([record()], root)
    text = build.sources(root)[Path(f"{KERNEL.name}-dense.cu")]
    assert compile.compile_source(text, KERNEL.target(H200)).sha256 == record().cubin_sha256


def test_check_says_what_differs(root, generated):
    database.write([record()], root)
    assert [finding.partition(": ")[2] for finding in build.check(generated, root)] == ["missing", "missing"]
    path, table = build.write(generated, root)
    assert build.check(generated, root) == [] == build.write(generated, root)

    good = path.read_text()
    rows = table.read_text()
    table.write_text(rows.replace("|412.5|", "|300.0|"))
    assert "differs" in build.check(generated, root)[0] and "|300.0|" in build.check(generated, root)[0]
    table.write_text(rows)
    path.write_text(good + "\n// more")
    assert "differs" in build.check(generated, root)[0]
    assert build.write(generated, root) == [path] and path.read_text() == good

    left_over, mine = generated / "old" / "old.cu", path.with_name("notes.md")
    left_over.parent.mkdir()
    left_over.write_text(good)
    mine.write_text("// kept by hand\n")
    assert build.check(generated, root) == [f"{left_over}: no record asks for it"]
    assert build.write(generated, root) == [left_over] and mine.exists() and not left_over.exists()


def test_nothing_vanishes_because_the_database_cannot_be_read(root, generated):
    path, = database.write([record()], root)
    source, _ = build.write(generated, root)
    path.write_text("records: [")
    with pytest.raises(database.DatabaseError, match="cannot be made"):
        build.write(generated, root)
    assert source.exists()


def test_db_check_finds_what_is_illegal_stale_or_spilling(root, monkeypatch):
    path, = database.write([record()], root)
    assert database.check([path]) == []
    with monkeypatch.context() as patch:
        patch.setattr(compile, "flaw", lambda binary: ("spilled", "it spills 8 bytes"))
        assert "spilled: it spills 8 bytes" in database.check([path])[0]
    with monkeypatch.context() as patch:
        patch.setattr(compile, "OPTIONS", (*compile.OPTIONS, "--no-such-option"))
        assert "does not compile" in database.check([path])[0]

    database.write([record(sha="f" * 64, date=later(1))], root)
    finding, = database.check([path])
    assert "stale" in finding and str(PROBLEM) in finding and "autotune tune" in finding and "\n" not in finding
    assert database.check([path], compiled=False) == []
    database.write([record(sha="f" * 64, date=later(2), nvrtc="1.2.3")], root)
    assert database.check([path]) == []  # another compiler's cubin says nothing of the source

    data = yaml.safe_load(path.read_text())
    data["records"][PROBLEM.text]["config"]["smem_bytes"] += 16
    path.write_text(yaml.safe_dump(data))
    finding, = database.check([path])
    assert "illegal config" in finding and "smem_bytes" in finding


def test_an_illegal_value_never_reaches_render_or_compile(root, generated, monkeypatch):
    path, = database.write([record()], root)
    good = path.read_text()

    def reached(*_):
        raise AssertionError("an illegal config reached the compiler")

    monkeypatch.setattr(compile, "build", reached)
    too_big = next(c for c in searched(KERNEL, PROBLEM.static) if KERNEL.illegal(PROBLEM.static, c, H200))
    for change in ({"smem_bytes": 1}, {"block_m": 7}, {"block_n": "64; int x"}, {"kernel": "os.system"}, dict(too_big.items)):
        data = yaml.safe_load(good)
        data["records"][PROBLEM.text]["config"].update(change)
        path.write_text(yaml.safe_dump(data))
        assert database.check([path])
        with pytest.raises(database.DatabaseError):
            build.check(generated, root)


def test_a_gpu_that_is_not_in_the_catalogue_has_the_limits_of_its_arch():
    key = dataclasses.replace(GpuKey.of(H200), name="half-h200", sms=66)
    half = database.gpu_of(key)
    assert half.identity == key.identity and half.name == "half-h200" and half["smem_per_block_bytes"] == 232448
    assert database.gpu_of(GpuKey.of(H200)) is H200
    assert database.gpu_of(dataclasses.replace(key, arch=7)) is None


def test_what_ships_is_legal_current_and_built():
    root = database.shipped_root()
    files = database.paths(root)
    assert database.check(files) == []
    here = ".".join(compile.nvrtc_version().split(".")[:2])
    if root.name != "tuning_db" or any(not r.nvrtc.startswith(f"{here}.") for _, r in database.all_records([root])):
        pytest.skip(f"generated/ is made by another NVRTC than the {here} here")
    generated = root.parent / "generated"
    assert build.check(generated, root) == []
    assert sum(path.stat().st_size for path in generated.rglob("*") if path.is_file()) < MOST_BYTES
