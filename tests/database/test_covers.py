"""What `autotune db check` says of covers, and how large the database of a GPU may be."""

import re

import pytest

from autotune.cuda import compile
from autotune.core.gpu import by_name
from autotune.database import cover as covers
from autotune.database import view

H200 = by_name("nvidia-h200")
MOST_BYTES = 500_000  # of one GPU


def test_the_database_of_a_gpu_is_small():
    folders = [folder for folder in view.shipped_root().iterdir() if folder.is_dir()]
    assert folders
    for folder in folders:
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < MOST_BYTES, folder


@pytest.fixture
def copied(tmp_path):
    """A shipped cover whose sources are today's, in a folder of its own."""
    cover = next(cover for path in covers.paths(view.shipped_root())
                 if not covers.stale_configs(cover := covers.read(path), H200))
    return cover, covers.write(cover, tmp_path)


def test_a_current_cover_is_found_and_nothing_is_said_of_it(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(compile, "nvrtc_version", lambda: copied[0].nvrtc)
    assert covers.paths(tmp_path) == [copied[1]]
    assert not covers.check([copied[1]], compiled=False) and not covers.check([copied[1]])


def test_a_config_of_another_source_is_counted(copied, monkeypatch):
    cover, path = copied
    path.write_text(path.read_text().replace(cover.sources[0], "0" * covers.DIGITS))
    monkeypatch.setattr(compile, "nvrtc_version", lambda: cover.nvrtc)
    said, = covers.check([path])
    assert f"of {len(cover.configs)} configs are of another source" in said and "autotune tune --cover" in said
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "99.0")
    assert not covers.check([path])  # of another NVRTC: not compared


def test_what_cannot_be_used_is_said(copied):
    cover, path = copied
    text = path.read_text()
    path.write_text(re.sub(r"(smem_bytes.*\n(?:.*\n)*?configs:\n- \S+ .*?)\d{5,6}", r"\g<1>99999", text, count=1))
    assert path.read_text() != text
    said, = covers.check([path], compiled=False)
    assert str(path) in said and "smem_bytes" in said
    path.write_text("[")
    assert str(path) in covers.check([path], compiled=False)[0]
