"""Records, their merge, and files that writers share, crash on, and find broken."""

import dataclasses
import errno
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.database import view as database, file as dbfile
from autotune.core import gpu
from autotune import kernels
from autotune.core.problem import Problem
from autotune.database.record import GpuKey, Record, RecordError, merge
from samples import legal

H200 = gpu.by_name("nvidia-h200")
KEY = GpuKey.of(H200)
PROBLEM = Problem.parse("forward-bf16-b1-h32x8-q8192-k8192-d128-causal")


CONFIGS = list(itertools.islice(legal(kernels.candidates(PROBLEM, H200)[0], PROBLEM.static, H200, step=5), 5))


def record(problem=PROBLEM, config=CONFIGS[0], time_us=412.5, **changes):
    fields = dict(problem=problem, gpu=KEY, config=config, evidence="measured", time_us=time_us, date="2026-01-31 12:00:00 UTC",
                  trials=120, nvrtc="13.0.88", cubin_sha256="0" * 64, autotune="0.1.0", default_config=CONFIGS[1],
                  default_time_us=450.0, ties=((CONFIGS[2], time_us * 1.001),),
                  conditions={"policy": "graph", "samples": 40, "spread": 1e-05, "driver": "580.65"})
    return Record(**fields | changes)


times = st.floats(1e-3, 1e9)
problems = st.sampled_from([PROBLEM, *(dataclasses.replace(PROBLEM, seqlen_k=n) for n in (1024, 16384))])
plain = st.dictionaries(st.text("abc_", min_size=1, max_size=5),
                        st.one_of(st.booleans(), st.integers(-10**9, 10**9), st.floats(allow_nan=False, allow_infinity=False),
                                  st.text(max_size=8), st.none(), st.lists(times, max_size=3)), max_size=4)
records = st.builds(
    lambda **fields: record(**fields, default_config=None, default_time_us=None), problem=problems,
    config=st.sampled_from(CONFIGS), time_us=times, evidence=st.sampled_from(["measured", "predicted"]),
    date=st.sampled_from(["2026-01-31 12:00:00 UTC", "2026-02-01 00:00:00 UTC"]),
    ties=st.lists(st.tuples(st.sampled_from(CONFIGS), times), max_size=2).map(tuple), conditions=plain,
    gpu=st.sampled_from([KEY, dataclasses.replace(KEY, name="h200-other-label"), GpuKey.of(gpu.by_name("nvidia-l4"))]))
groups = st.lists(records, max_size=5)


# Merge


@pytest.mark.slow
@given(groups, groups, groups)
def test_merge_is_associative_commutative_and_idempotent(a, b, c):
    left = merge(merge(a, b).values(), c)
    assert left == merge(a, merge(b, c).values()) == merge(c, b, a)
    assert merge(left.values(), left.values()) == left
    assert {r.key for r in a + b + c} == left.keys()


@pytest.mark.slow
@given(groups, groups)
def test_a_predicted_record_never_replaces_a_measured_one(a, b):
    measured = {r.key for r in a + b if r.evidence == "measured"}
    assert {key for key, r in merge(a, b).items() if r.evidence == "measured"} == measured


@pytest.mark.slow
@given(groups, groups)
def test_files_do_not_depend_on_the_order_of_records(a, b):
    one = [r for r in merge(a, b).values() if r.gpu == KEY]
    assert dbfile.dump(KEY, "forward", one) == dbfile.dump(KEY, "forward", reversed(one))


def test_the_newest_measurement_counts():
    old, new = record(time_us=400.0), record(time_us=500.0, date="2026-03-01 00:00:00 UTC")
    assert merge([new], [old])[old.key] == new


# Round trip and validation


@pytest.mark.slow
@given(records)
def test_an_entry_round_trips_through_yaml(r):
    text = dbfile.dump(r.gpu, "forward", [r])
    data = yaml.load(text, yaml.CSafeLoader)
    assert Record.from_entry(r.problem.text, data["records"][r.problem.text], GpuKey.from_entry(data["gpu"])) == r
    assert yaml.load(text, yaml.SafeLoader) == data  # and floats are floats to both loaders


def test_a_config_beside_the_winner_says_where_it_differs():
    other = kernels.KERNELS["forward_simt"].default(PROBLEM, H200)
    tie = {name: value for name, value in CONFIGS[2].items if value != CONFIGS[0][name]}
    entry = record(default_config=CONFIGS[0], ties=((CONFIGS[2], 413.0), (other, 414.0))).as_entry()
    assert entry["default"] == {"time_us": 450.0} and tie
    assert entry["ties"] == [{"config": tie, "time_us": 413.0}, {"config": other.as_dict(), "time_us": 414.0}]
    again = Record.from_entry(PROBLEM.text, entry, KEY)
    assert again.default_config == CONFIGS[0] and [config for config, _ in again.ties] == [CONFIGS[2], other]


def test_small_diffs():
    many = [record(dataclasses.replace(PROBLEM, seqlen_q=n)) for n in (128, 1024, 16384, 2048)]
    text = dbfile.dump(KEY, "forward", many)
    order = [line for line in text.splitlines() if line.startswith("  forward-")]
    assert [line.split("-q")[1].split("-")[0] for line in order] == ["128", "1024", "2048", "16384"]
    changed = dbfile.dump(KEY, "forward", [*many[1:], dataclasses.replace(many[0], time_us=7.0)])
    pairs = list(zip(text.splitlines(), changed.splitlines(), strict=True))
    assert [(a, b) for a, b in pairs if a != b] == [("    time_us: 412.5", "    time_us: 7.0")]


BAD = {
    "an undeclared value": lambda e: e["config"].update(block_m=1000000),
    "code for a value": lambda e: e["config"].update(block_n="64; asm(\"trap;\")"),
    "an unknown parameter": lambda e: e["config"].update(include="/etc/passwd"),
    "an unknown kernel": lambda e: e["config"].update(kernel="../../evil"),
    "a bool for an int": lambda e: e["config"].update(num_stages=True),
    "a missing parameter": lambda e: e["config"].pop("num_stages"),
    "a config that is text": lambda e: e.update(config="forward_mma block_m=128"),
    "a name that is no text": lambda e: e["config"].update({3: 4}),
    "an illegal tie": lambda e: e["ties"][0]["config"].update(num_warps=-1),
    "an illegal default": lambda e: e["default"]["config"].update(num_warps=[4]),
    "a tie of another kernel that is not whole": lambda e: e["ties"][0]["config"].update(kernel="forward_simt"),
    "a default that is no mapping": lambda e: e["default"].update(config=None),
    "time of zero": lambda e: e.update(time_us=0),
    "time not a number": lambda e: e.update(time_us=float("nan")),
    "time that is text": lambda e: e.update(time_us="1e-3"),
    "time that is true": lambda e: e.update(time_us=True),
    "unknown evidence": lambda e: e.update(evidence="heard"),
    "an unknown field": lambda e: e.update(notes="fast"),
    "a missing field": lambda e: e.pop("date"),
    "a date that YAML made one": lambda e: e.update(date=__import__("datetime").date(2026, 1, 1)),
    "a hash of something": lambda e: e.update(cubin_sha256="abc"),
    "ties that are no list": lambda e: e.update(ties={"a": 1}),
    "conditions too deep": lambda e: e.update(conditions={"a": {"b": {"c": {"d": 1}}}}),
    "conditions that are no mapping": lambda e: e.update(conditions=[1]),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_entry_is_quarantined_with_its_reason_and_survives_a_writer(tmp_path, what):
    path, = database.write([record(), record(dataclasses.replace(PROBLEM, batch=2))], tmp_path)
    data = yaml.load(path.read_text(), yaml.CSafeLoader)
    BAD[what](data["records"][PROBLEM.text])
    path.write_text(yaml.dump(data))
    file = dbfile.read(path)
    assert not file.error and len(file.records) == 1
    bad, = file.quarantined
    assert bad.problem == PROBLEM.text and len(bad.reason) > 10 and "\n" not in bad.reason

    view = database.open_view(H200, roots=[tmp_path])
    assert len(view.records) == 1 and PROBLEM.text in view.complaints[0]
    for round_ in range(2):  # a good record for the same problem does not erase the bad entry, nor does a second write
        database.write([record(time_us=300.0 - round_)], tmp_path)
        after = dbfile.read(path)
        assert [q.entry for q in after.quarantined] == [bad.entry] or what == "time not a number"
        assert len(after.quarantined) == 1 and len(after.records) == 2


def test_an_entry_this_version_understands_leaves_quarantine(tmp_path):
    path, = database.write([record()], tmp_path)
    data = yaml.load(path.read_text(), yaml.CSafeLoader)
    data["quarantined"] = [{"problem": p, "reason": "unknown kernel", "entry": e} for p, e in data.pop("records").items()]
    path.write_text(yaml.dump(data))
    assert dbfile.read(path).records == (record(),) and not dbfile.read(path).quarantined


@pytest.mark.parametrize("text", ["forward-bf16-b01-h32x8-q8192-k8192-d128-causal", "nonsense", 17, None,
                                  "forward-bf16-b1-h32x7-q8192-k8192-d128"])
def test_problem_keys_are_canonical(text):
    with pytest.raises(RecordError):
        Record.from_entry(text, record().as_entry(), KEY)


@pytest.mark.parametrize("conditions", [{"driver": "\ud800"}, {"\ud800": 1}, {"spread": float("inf")}, {"x": {1}}, {"x": b"1"}])
def test_conditions_that_no_file_can_hold_are_refused(conditions):
    with pytest.raises(RecordError, match="conditions"):
        record(conditions=conditions)


@pytest.mark.parametrize("name", ["../up", "a/b", "", "A", "x" * 81, 3])
def test_gpu_names_stay_in_their_folder(name):
    with pytest.raises(RecordError, match="gpu name"):
        GpuKey(name, 90, 132, 1, 1)


# Broken files

GARBAGE = [b"", b"\x00\xff\xfe", b"[" * 100_000, b"records: [unclosed", b"schema: 1", b"- a\n- b\n",
           b"schema: one\nrecords: {}\n", b"a: &a [1]\n? *a\n: 2\n", b"schema: 1\ngpu: 3\nop: forward\nrecords: {}\n",
           b"x: 2026-99-99\n", b"<<<<<<< HEAD\nschema: 1\n",
           b"!!python/object/apply:os.system ['echo']\n", b"schema: 1\nx: " + b"9" * 10_000, b"%YAML 9.9\n---\n", b"just text"]


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_reported_and_moved_aside_never_overwritten(tmp_path, content):
    path = tmp_path / "nvidia-h200" / "forward.yaml"
    path.parent.mkdir()
    for number in (1, 2):
        path.write_bytes(content)
        file = dbfile.read(path)
        assert file.error.startswith(str(path)) and "\n" not in file.error and file.records == ()
        assert database.open_view(H200, roots=[tmp_path]).complaints
        with pytest.warns(UserWarning, match="moved aside"):
            database.write([record()], tmp_path)
        assert dbfile.read(path).records == (record(),)
        assert path.with_name(f"forward.yaml.unreadable-{number}").read_bytes() == content


@given(st.data())
def test_no_truncation_or_flipped_byte_crashes_a_reader(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("db") / "forward.yaml"
    text = bytearray(dbfile.dump(KEY, "forward", [record(), record(dataclasses.replace(PROBLEM, batch=2))]).encode())
    if data.draw(st.booleans()):
        del text[data.draw(st.integers(0, len(text))):]
    else:
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(text)
    for r in dbfile.read(path).records:
        kernel = kernels.kernel_of(r.config)
        assert kernel.typed_config({k: v for k, v in r.config.as_dict().items() if k != "kernel"}, "") == r.config


# Search path


def test_the_user_comes_first_but_a_prediction_hides_no_measurement(tmp_path):
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    batch2 = dataclasses.replace(PROBLEM, batch=2)
    database.write([record(time_us=500.0), record(batch2, evidence="predicted", date="2027-01-01 00:00:00 UTC")], user)
    database.write([record(time_us=400.0, date="2027-01-01 00:00:00 UTC"), record(batch2, time_us=9.0)], shipped)
    times = {r.problem: (r.evidence, r.time_us) for r in database.open_view(H200, roots=[user, shipped]).records}
    assert times == {PROBLEM: ("measured", 500.0), batch2: ("measured", 9.0)}


def test_identity_is_physical(tmp_path):
    other = dataclasses.replace(KEY, sms=66)  # half of the chip, under the same name
    database.write([record()], tmp_path)
    path, = database.write([record(gpu=other)], tmp_path)
    assert path.parent.name == "nvidia-h200-66sm-60mib-3201mhz"
    assert database.open_view(H200, roots=[tmp_path]).records == (record(),)
    view = database.open_view(other, roots=[tmp_path])
    assert view.records[0].gpu == other and view.same_arch == (record(),)
    assert len(list(database.all_records([tmp_path]))) == 2


def test_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path))
    assert database.search_path() == (tmp_path, database.shipped_root()) and database.user_root() == tmp_path
    monkeypatch.setenv("AUTOTUNE_DB", "~nobody-has-this-name/db")
    assert database.user_root() == Path("~nobody-has-this-name/db")
    monkeypatch.delenv("AUTOTUNE_DB")
    assert database.user_root().name == "tuning_db" and "autotune" in database.user_root().parts
    assert database.open_view(H200, roots=[tmp_path / "absent"]).records == ()


# Writers


def _write_many(root, worker):
    for n in range(8):
        problem = dataclasses.replace(PROBLEM, batch=worker + 1, seqlen_q=64 * (n + 1))
        database.write([record(problem), record(time_us=10.0 + worker)], Path(root))


@pytest.mark.slow
def test_writers_at_the_same_time_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(str(tmp_path), worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    file = dbfile.read(tmp_path / "nvidia-h200" / "forward.yaml")
    assert len(file.records) == 4 * 8 + 1 and not file.quarantined and not file.error
    assert {r.time_us for r in file.records if r.problem == PROBLEM} == {10.0}
    assert {p.name for p in file.path.parent.iterdir()} <= {"forward.yaml", ".forward.yaml.lock"}


def _write_for_ever(root):
    for n in itertools.count(1):
        database.write([record(dataclasses.replace(PROBLEM, batch=n % 40 + 1), time_us=float(n))], Path(root))


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    path = tmp_path / "nvidia-h200" / "forward.yaml"
    database.write([record()], tmp_path)
    for round_ in range(3):
        writer = context.Process(target=_write_for_ever, args=(str(tmp_path),))
        before = path.read_bytes()
        writer.start()
        deadline = time.monotonic() + 60
        while path.read_bytes() == before and time.monotonic() < deadline:
            assert not dbfile.read(path).error
        time.sleep(0.013 * round_)
        writer.kill()
        writer.join()
        file = dbfile.read(path)
        assert file.records and not file.error and not file.quarantined and path.read_bytes() != before
    database.write([record(time_us=1.0, date="2027-01-01 00:00:00 UTC")], tmp_path)  # the dead writer's lock is free
    assert 1.0 in {r.time_us for r in dbfile.read(path).records}


def test_nothing_to_add_writes_nothing(tmp_path):
    path, = database.write([record()], tmp_path)
    before = path.stat()
    database.write([record(), record(evidence="predicted", time_us=1.0)], tmp_path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_ino == before.st_ino


def _child(code, tmp_path):
    """Runs `code` after the helpers of this module are imported, in a process of its own."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    prelude = f"import sys; sys.path[:0] = {folders!r}\nfrom test_database import *\nroot = Path({str(tmp_path)!r})\n"
    return subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="uses POSIX permissions")
@pytest.mark.parametrize("existing", [False, True])
def test_a_read_only_folder_is_said_clearly(existing):
    with tempfile.TemporaryDirectory() as name:  # not tmp_path, whose parents are closed to the user that the child becomes
        _check_read_only(Path(name), existing)


def _check_read_only(root, existing):
    if existing:
        database.write([record()], root)
        (root / "nvidia-h200" / ".forward.yaml.lock").chmod(0o666)
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    for folder in (root / "nvidia-h200", root):
        if folder.exists():
            folder.chmod(0o555)
    result = _child("import autotune.database.file, filelock\nif os.getuid() == 0: os.setgroups([]); os.setuid(65534)\n"
                    "try: database.write([record(time_us=1.0)], root)\n"
                    "except database.DatabaseError as error: print(error)", root)
    for folder in (root, root / "nvidia-h200"):
        if folder.exists():
            folder.chmod(0o755)
    assert "was not written: Permission denied" in result.stdout and "AUTOTUNE_DB" in result.stdout, result.stderr
    assert result.stdout.count("\n") == 1
    assert before == {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.skipif(os.name != "posix", reason="uses a POSIX limit on file sizes")
def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path):
    path, = database.write([record()], tmp_path)
    before = path.read_bytes()
    result = _child(f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 100},) * 2)\n"
                    "try: database.write([record(dataclasses.replace(PROBLEM, batch=2))], root)\n"
                    "except database.DatabaseError as error: print(error)", tmp_path)
    assert "was not written" in result.stdout, result.stderr
    assert path.read_bytes() == before
    assert {p.name for p in path.parent.iterdir()} <= {"forward.yaml", ".forward.yaml.lock"}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_said_clearly(tmp_path, monkeypatch, call):
    path, = database.write([record()], tmp_path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(database.DatabaseError, match="No space left on device.*AUTOTUNE_DB"):
        database.write([record(time_us=1.0, date="2027-01-01 00:00:00 UTC")], tmp_path)
    monkeypatch.undo()
    assert path.read_bytes() == before and not list(path.parent.glob("*.new"))


def test_a_held_lock_is_said_clearly(tmp_path, monkeypatch):
    import filelock

    monkeypatch.setattr(dbfile, "LOCK_TIMEOUT_S", 0.2)
    (tmp_path / "nvidia-h200").mkdir()
    with filelock.FileLock(tmp_path / "nvidia-h200" / ".forward.yaml.lock"):
        with pytest.raises(database.DatabaseError, match="lock"):
            database.write([record()], tmp_path)


def test_reading_and_writing_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        database.write([record()], tmp_path)
        assert database.open_view(H200, roots=[tmp_path]).complaints == ()


def test_a_file_with_aliases_is_refused_quickly(tmp_path):
    """Nested aliases stand for 8^12 entries in a few hundred bytes."""
    path = tmp_path / "nvidia-h200" / "forward.yaml"
    path.parent.mkdir()
    levels = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12))
    path.write_text(f"schema: 1\na0: &a0 [x]\n{levels}\nop: forward\nrecords: *a11\n")
    started = time.perf_counter()
    file = dbfile.read(path)
    assert "alias" in file.error and not file.records
    assert time.perf_counter() - started < 5


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(database.DatabaseError, match="cannot be written .*AUTOTUNE_DB"):
        database.check_writable(tmp_path / "file" / "db")
    database.check_writable(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("change, said", [
    (lambda text: text + "records: {}\n", "records stands twice"),
    (lambda text: text.replace("    time_us: 412.5\n", "    time_us: 412.5\n    time_us: 1.0\n"), "time_us stands twice"),
    (lambda text: text.replace("trials: 120", "trials: 0x" + "f" * 6000), "a number of 6002 digits"),
    (lambda text: text + "note: mine\n", "note is not a field"),
    (lambda text: text + "quarantined: [mine]\n", "each item of quarantined"),
    (lambda text: text + "quarantined: [{problem: a, reason: b, entry: c, note: mine}]\n", "each item of quarantined")])
def test_what_a_writer_would_lose_is_moved_aside_whole(tmp_path, change, said):
    path, = database.write([record()], tmp_path)
    before = change(path.read_text())
    assert before != path.read_text()
    path.write_text(before)
    assert said in dbfile.read(path).error and dbfile.read(path).records == ()
    assert said in database.check([path], compiled=False)[0]
    with pytest.warns(UserWarning, match="moved aside"):
        database.write([record(dataclasses.replace(PROBLEM, seqlen_q=64))], tmp_path)
    assert path.with_name(f"{path.name}.unreadable-1").read_text() == before


def test_complaints_fit_any_terminal(tmp_path):
    path, = database.write([record()], tmp_path)
    path.write_text(path.read_text().replace("records:\n", f'records:\n  "x\\e[31m\\a{"y" * 900}": 1\n'))
    finding, = database.check([path], compiled=False)
    assert finding.isprintable() and len(finding) < 2000 and "x\\x1b[31m" in finding


def test_a_file_that_no_writer_may_touch_is_said_before_a_search(tmp_path):
    path, = database.write([record()], tmp_path)
    database.check_writable(tmp_path)
    path.write_text(path.read_text().replace(f"schema: {dbfile.SCHEMA}", "schema: 99"))
    with pytest.raises(database.DatabaseError, match="nothing could be recorded: .*newer"):
        database.check_writable(tmp_path)
