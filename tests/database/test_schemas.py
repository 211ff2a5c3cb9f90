"""Database files of other schemas: newer ones are left alone, older ones are converted as they are read."""

import dataclasses
from types import SimpleNamespace

import pytest
import yaml

from autotune.database import file as dbfile
from autotune.database import view as database
from test_database import CONFIGS, PROBLEM, record


def test_a_newer_schema_is_left_alone(tmp_path):
    path, = database.write([record()], tmp_path)
    path.write_text(path.read_text().replace(f"schema: {dbfile.SCHEMA}", "schema: 99"))
    before = path.read_bytes()
    assert "newer" in dbfile.read(path).error
    with pytest.raises(database.DatabaseError, match="newer.*install"):
        database.write([record(time_us=1.0)], tmp_path)
    assert path.read_bytes() == before


def test_an_older_schema_is_converted(tmp_path, monkeypatch):
    path, = database.write([record()], tmp_path)
    path.write_text(path.read_text().replace("time_us: 412.5", "time_ms: 0.4125"))
    next_schema = dbfile.SCHEMA + 1

    def convert(data):
        for entry in data["records"].values():
            entry["time_us"] = entry.pop("time_ms") * 1000
        return data

    monkeypatch.setattr(dbfile, "SCHEMA", next_schema)
    monkeypatch.setitem(dbfile.CONVERTERS, next_schema - 1, convert)
    assert dbfile.read(path).records == (record(),)
    database.write([record(dataclasses.replace(PROBLEM, batch=2))], tmp_path)
    assert len(dbfile.read(path).records) == 2 and f"schema: {next_schema}" in path.read_text()


def test_schema_1_hashed_sources_with_their_comments(tmp_path):
    new = record(source_sha256="c" * 64)
    path, = database.write([new], tmp_path)
    path.write_text(path.read_text().replace(f"schema: {dbfile.SCHEMA}", "schema: 1"))
    old, = dbfile.read(path).records
    assert old == dataclasses.replace(new, source_sha256=None)  # which code that was is not known, which cubin is
    assert old.is_of(SimpleNamespace(sha256=old.cubin_sha256, source_sha256="d" * 64))
    database.write([record(dataclasses.replace(PROBLEM, batch=2))], tmp_path)
    assert f"schema: {dbfile.SCHEMA}" in path.read_text() and old in dbfile.read(path).records
    path.write_text("schema: 1\ngpu: 3\nop: forward\nrecords: [1]\nquarantined: {a: 1}\n")
    assert dbfile.read(path).error


def test_schema_2_wrote_all_of_each_config(tmp_path):
    new = record(ties=((CONFIGS[0], 413.0), (CONFIGS[2], 414.0)))
    path, = database.write([new], tmp_path)
    data = yaml.safe_load(path.read_text())
    data["schema"], entry = 2, data["records"][PROBLEM.text]
    for item, config in zip([entry["default"], *entry["ties"]], [CONFIGS[1], CONFIGS[0], CONFIGS[2]], strict=True):
        item["config"] = config.as_dict()
    path.write_text(yaml.safe_dump(data))
    assert dbfile.read(path).records == (new,)
    database.write([record(dataclasses.replace(PROBLEM, batch=2))], tmp_path)
    assert "schema: 3" in path.read_text() and new in dbfile.read(path).records
    del entry["default"]["config"]["num_stages"]  # which was an error then, and does not become the winner's value
    path.write_text(yaml.safe_dump(data))
    assert not dbfile.read(path).records and "num_stages" in dbfile.read(path).quarantined[0].reason
