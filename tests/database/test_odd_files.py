"""Databases that somebody else wrote, clocks that were wrong, and what lies beside (F4 to F7, F16, F20, F27, C16, C19)."""

import os
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from autotune.core.gpu import by_name
from autotune.core.problem import Problem
from autotune.database import view
from autotune.database.file import dump
from autotune.database.record import DATE_FORMAT, NO_CLOCK_BEFORE, GpuKey, Record, RecordError, date_of
from autotune.kernels import default_config

H200 = by_name("nvidia-h200")
KEY = GpuKey.of(H200)
PROBLEM = Problem.parse("forward-bf16-b1-h2x2-q64-k64-d64")
CONFIG = default_config(PROBLEM, H200)


def date(**ahead) -> str:
    now = max(datetime.now(timezone.utc), date_of(NO_CLOCK_BEFORE))
    return (now + timedelta(**ahead)).strftime(DATE_FORMAT)


def record(time_us=500.0, when=None, **changes) -> Record:
    when = time.strftime(DATE_FORMAT, time.gmtime()) if when is None else when
    return replace(Record(PROBLEM, KEY, CONFIG, "measured", time_us, when, 9, "13.0.88", "0" * 64, "0.1.0"), **changes)


@pytest.fixture
def path(tmp_path):
    (tmp_path / KEY.name).mkdir()
    return tmp_path / KEY.name / "forward.yaml"


@pytest.mark.parametrize(
    "text",
    [
        "a: !!bool x",
        "a: !!int ''",
        "a: !!float ''",
        "a: !!int '-'",
        "a: !!timestamp x",
        "[" * 20_000,
        "- " * 20_000,
        "a: &x [*x]",
        "\x1b[2J: 1",
        'schema: "\\e[2J"',
        "op: [" + "x, " * 9999 + "]",
        "<<<<<<< HEAD\nschema: 1",
    ],
)
def test_f4_f5_f20_c19_any_text_is_one_sentence_and_is_moved_aside(path, text):
    path.write_text(text)
    file = view.read(path)
    assert file.error and file.error.isprintable() and len(file.error) < 2000 and file.records == ()
    with pytest.warns(UserWarning, match="moved aside"):
        view.write([record()], path.parents[1])
    assert view.read(path).records == (record(when=view.read(path).records[0].date),)
    assert path.with_name("forward.yaml.unreadable-1").read_text() == text


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink(path, path)]
)
def test_f6_what_is_no_file_hangs_nothing(path, make):
    make(path)
    began = time.monotonic()
    assert "cannot be read" in view.read(path).error
    assert view.open_view(H200, roots=[path.parents[1]]).complaints
    with pytest.raises(view.DatabaseError, match="cannot be read"):
        view.write([record()], path.parents[1])
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("ahead", [dict(hours=5), dict(hours=23), dict(minutes=1)])
def test_f7_a_record_of_a_clock_that_was_ahead_is_replaced(path, ahead):
    view.write([record(900.0, date(**ahead))], path.parents[1])
    view.write([record(500.0)], path.parents[1])
    (kept,) = view.read(path).records
    assert kept.time_us == 500.0 and kept.date > date(**ahead, seconds=-5)
    view.write([record(400.0)], path.parents[1])
    assert view.read(path).records[0].time_us == 400.0


@pytest.mark.parametrize("ahead", [dict(days=2), dict(days=36500)])
def test_f7_a_date_in_the_future_is_quarantined_and_hides_nothing(path, ahead):
    path.write_text(dump(KEY, "forward", [record(900.0, date(**ahead))]))
    file = view.read(path)
    assert file.records == () and "ahead of this machine's clock" in file.quarantined[0].reason
    view.write([record(500.0)], path.parents[1])
    file = view.read(path)
    assert [r.time_us for r in file.records] == [500.0] and len(file.quarantined) == 1


@pytest.mark.parametrize(
    "when",
    [
        "9999-99-99 99:99:99 UTC",
        "2026-02-30 00:00:00 UTC",
        "2026-01-31 24:00:00 UTC",
        "0000-01-01 00:00:00 UTC",
        "٢٠٢٦-٠١-٣١ ١٢:٠٠:٠٠ UTC",
        "2026-01-31 12:00:00",
        "2026-01-31T12:00:00 UTC",
    ],
)
def test_f7_a_date_is_one(when):
    with pytest.raises(RecordError, match="date is"):
        record(when=when)


def test_f7_an_earlier_measurement_replaces_nothing_and_a_prediction_no_measurement(path):
    view.write([record(500.0)], path.parents[1])
    view.write([record(1.0, "2026-01-31 12:00:00 UTC"), record(2.0, evidence="predicted")], path.parents[1])
    assert [r.time_us for r in view.read(path).records] == [500.0]


def test_f7_what_ships_is_no_future_to_any_clock():
    for file in view.paths(view.shipped_root()):
        assert all(date_of(r.date) < date_of(NO_CLOCK_BEFORE) + timedelta(days=1) for r in view.read(file).records), file


def test_f16_a_writer_removes_what_killed_ones_left(path):
    for name in (
        ".forward.yaml.123.new",
        ".forward.yaml.9.new",
        ".decode.yaml.7.new",
        "forward.yaml.123.new",
        ".forward.yaml.x.new",
    ):
        path.with_name(name).write_text("half")
    view.write([record()], path.parents[1])
    left = {p.name for p in path.parent.iterdir()}
    assert left >= {".decode.yaml.7.new", "forward.yaml.123.new", ".forward.yaml.x.new"} and not left & {".forward.yaml.123.new"}


def test_f27_many_entries_that_cannot_be_used_cost_seconds_at_most(path):
    text = dump(KEY, "forward", []).replace("records: {}", "records:")
    path.write_text(text + "".join(f"  nonsense-{n}: {{a: {n}}}\n" for n in range(5_000)))
    began = time.monotonic()
    assert len(view.read(path).quarantined) == 5_000
    assert time.monotonic() - began < 30  # 1.6 s for 4,000 when each was compared with all


@pytest.mark.parametrize(
    "stranger",
    [
        "{gpu}/._forward.yaml",
        "{gpu}/forward (1).yaml",
        ".backup/forward.yaml",
        "{gpu}/forward.yaml~",
        "{gpu} (1)/forward.yaml",
        "{gpu}.bak/forward.yaml",
        "{gpu}/.forward.yaml.swp",
        "__MACOSX/forward.yaml",
        "{gpu}/notes.yaml",
        "{gpu}/forward.yml",
        ".git/forward.yaml",
    ],
)
def test_c16_strangers_in_the_database_folder_are_ignored(path, stranger):
    view.write([record()], path.parents[1])
    other = path.parents[1] / stranger.format(gpu=KEY.name)
    other.parent.mkdir(exist_ok=True)
    other.write_text(dump(KEY, "forward", [record(1.0)]) if stranger.endswith("forward.yaml") else "nonsense: [")
    assert view.paths(path.parents[1]) == [path]
    opened = view.open_view(H200, roots=[path.parents[1]])
    assert [r.time_us for r in opened.records] == [500.0] and opened.complaints == ()


def test_c13_without_a_home_lookups_go_on_and_writers_say_what_helps(monkeypatch):
    import platformdirs

    def nowhere(*_, **__):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("AUTOTUNE_DB")
    monkeypatch.setattr(platformdirs, "user_data_path", nowhere)
    assert view.search_path() == (view.shipped_root(),)
    with pytest.raises(view.DatabaseError, match="AUTOTUNE_DB"):
        view.write([record()])
