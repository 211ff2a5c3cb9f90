"""The bounded reader of foreign files (F4, F5, F6, F11, F20, F22)."""

import os
import pickle
import subprocess
import sys
import threading
import time

import pytest

from autotune.core.reading import MAX_DEPTH, ReadError, load_json, load_yaml, printable, read_bytes, read_text, shown

BAD_YAML = {
    "bool": "a: !!bool x", "empty int": "a: !!int ''", "empty float": "a: !!float ''", "sign": "a: !!int '-'",
    "timestamp": "a: !!timestamp x", "no date": "a: 2024-13-45", "digits": "a: " + "1" * 5000,
    "sixties": "a: " + "1:" * 9999 + "1",
    "alias": "a: &x [1]\nb: [*x, *x]", "bomb": "a: &a [1]\nb: &b [*a,*a]\nc: &c [*b,*b]", "itself": "&a [*a]",
    "twice": "a: 1\na: 2", "key": "{[1]: 2}", "python": "!!python/object/apply:os.system [true]", "tag": "a: !unknown x",
    "control": "a: \x1b[31m", "null": "\x00", "version": "%YAML 3.0\n---\na", "open": "[1, 2", "two": "a: 1\n---\nb: 2",
    "base64": "!!binary '\xff'", "merge": "<<: 3",
}
BAD_JSON = {"empty": "", "open": "{", "word": "nul", "digits": "1" + "0" * 400, "more digits": "[" + "7" * 9000 + "]",
            "bytes": "\ufeff{}",
            "comma": "[1,]", "two": "{} {}"}
OPENERS = ("[", "- ", "{a: ", "? ", "a:\n ", "- [", "!!map {a: ")


@pytest.mark.parametrize("text", BAD_YAML.values(), ids=BAD_YAML.keys())
def test_f5_whatever_a_yaml_loader_raises_is_one_sentence(text):
    with pytest.raises(ReadError) as caught:
        load_yaml(text)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize("text", BAD_JSON.values(), ids=BAD_JSON.keys())
def test_f22_whatever_a_json_loader_raises_is_one_sentence(text):
    with pytest.raises(ReadError) as caught:
        load_json(text)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize("opener", OPENERS)
def test_f4_deep_nesting_is_refused_and_never_ends_the_process(opener):
    """In a process of its own: what PyYAML before 6.0.4 does with such a file cannot be caught."""
    program = ("import sys; from autotune.core.reading import ReadError, load_yaml\n"
               "try: load_yaml(sys.argv[1] * 20_000)\n"
               "except ReadError as error: print(error)")
    done = subprocess.run([sys.executable, "-c", program, opener], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, done.stderr[-500:]


def test_f4_depth_has_a_bound_in_both_languages():
    nested = MAX_DEPTH - 1
    text = "[" * nested + "]" * nested
    assert load_json(text) == load_yaml(text)
    for load in (load_yaml, load_json):
        with pytest.raises(ReadError, match="nested more than"):
            load("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))
    with pytest.raises(ReadError, match="nested more than"):
        load_json("[" * 200_000)


def test_plain_data_is_what_the_loaders_make_of_it():
    assert load_yaml("a: [1, 2.5, yes, x]\nb: {c: null}") == {"a": [1, 2.5, True, "x"], "b": {"c": None}}
    assert load_json('{"a": [1, 2.5, true, "x"], "b": Infinity}') == {"a": [1, 2.5, True, "x"], "b": float("inf")}


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path),
                                  lambda path: os.symlink("/dev/tty", path),
                                  os.mkdir, lambda path: os.symlink(path, path)], ids=["fifo", "zero", "tty", "folder", "loop"])
def test_f6_what_is_no_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "a")
    began = time.monotonic()
    with pytest.raises(ReadError) as caught:
        read_bytes(tmp_path / "a", 1 << 20)
    assert time.monotonic() - began < 5 and not caught.value.opened


def test_f6_sizes_are_bounded_also_where_the_system_does_not_know_them(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1025)
    with pytest.raises(ReadError, match="larger than 1 KB"):
        read_bytes(tmp_path / "a", 1024)
    assert len(read_bytes(tmp_path / "a", 1025)) == 1025
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "b", 1024)


def test_a_pipe_is_read_to_its_end_where_it_is_allowed(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: (time.sleep(0.2), pipe.write_text("a: 1\n" * 30_000)), daemon=True).start()
    assert read_text(pipe, 1 << 20, pipe=True) == "a: 1\n" * 30_000


def test_a_pipe_without_end_or_without_writer_is_refused(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"exec cat /dev/zero > '{pipe}'"]) as endless:
        with pytest.raises(ReadError, match="larger than 64 KB"):
            read_bytes(pipe, 1 << 16, pipe=True)
        endless.wait(30)  # the reader is gone, so it ends by SIGPIPE
    monkeypatch.setattr("autotune.core.reading.PIPE_SECONDS", 0.2)
    with pytest.raises(ReadError, match="nothing was written"):
        read_bytes(pipe, 1 << 16, pipe=True)


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path):
    (tmp_path / "a").write_bytes(b"abc\xff")
    with pytest.raises(ReadError, match="not UTF-8 text .* at byte 3"):
        read_text(tmp_path / "a", 1024)
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(tmp_path / "a", 1024) == "{}"


def test_f20_what_is_shown_can_be_printed_and_is_short():
    for value in ("\x1b[2J\x07", "\x9b31m", "a\nb", "\u202eabc", {"\x1b": ["\x00"]}, b"\x1b", "\ud800",
                  "x" * 10**6, ["y" * 10**6]):
        assert shown(value).isprintable() and len(shown(value)) <= 123
    deep = []
    for _ in range(10**5):
        deep = [deep]
    assert shown(deep) == "a list" and shown(10**5000) == "a int"
    assert shown("größe") == "größe" and shown(7) == "7"
    assert printable("a\x1b[31mb\nc\u202eé") == "a\\x1b[31mb\nc\\u202eé"


def test_f23_the_error_pickles():
    error = pickle.loads(pickle.dumps(ReadError("no", opened=False)))
    assert str(error) == "no" and error.opened is False
