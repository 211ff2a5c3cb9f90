import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tuner_fakes import FAKE, H200, PROBLEM, SPACE

from autotune.core.measurement import Measurement
from autotune.tuner import owner
from autotune.tuner.store import Store, StoreError, read_trials

OK = Measurement.of_samples([10.5, 11.0, 12.25], policy="graph", sm_clock_mhz=1980, error_ratio=0.25,
                            conditions={"driver": "580"})
WRONG = Measurement(outcome="wrong", message="row 3")


@pytest.fixture
def store(tmp_path):
    return Store(PROBLEM, H200, tmp_path)


def again(store):
    return Store(PROBLEM, H200, store.path.parents[1])


def test_a_trial_comes_back_whole(store):
    store.finish(store.begin(FAKE, SPACE[0], "source", "cubin"), OK)
    store.add(FAKE, SPACE[1], "source1", "", WRONG)
    for view in (store.trials(FAKE), again(store).trials(FAKE), read_trials(store.path, FAKE)):
        first, second = view
        assert (first.config, first.source, first.cubin, first.measurement) == (SPACE[0], "source", "cubin", OK)
        assert (second.config, second.measurement) == (SPACE[1], WRONG)


def begun_by_another(root, n=2, ending="os._exit(9)"):
    """A child process begins SPACE[n] and then does `ending`. Its Popen."""
    script = (f"import sys, os, time; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
              "from tuner_fakes import *; from tuner_fakes import SPACE\nfrom pathlib import Path\nfrom autotune.tuner.store "
              "import Store\n"
              f"store = Store(PROBLEM, H200, Path({str(root)!r}))\n"
              f"handle = store.begin(FAKE, SPACE[{n}], 's', 'c'); print('begun', flush=True)\n{ending}")
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    assert child.stdout.readline() == "begun\n"
    return child


def test_f1_what_was_launching_when_the_process_died_is_a_crash(store):
    begun_by_another(store.path.parents[1]).wait()
    assert store.trials(FAKE) == []
    trial, = again(store).trials(FAKE)
    assert trial.config == SPACE[2] and trial.measurement.outcome == "crashed" and "died" in trial.measurement.message
    assert len(again(store).trials(FAKE)) == 1


def test_f1_nobody_alive_is_blamed(store):
    """A second tuner opens the store while the first is running a kernel; then the first ends it as if nothing had been."""
    mine = store.begin(FAKE, SPACE[0], "s", "c")
    child = begun_by_another(store.path.parents[1], 1, "time.sleep(60)")
    second = again(store)
    assert second.trials(FAKE) == [] == second.trials(FAKE)
    second.add(FAKE, SPACE[3], "s", "", WRONG)
    store.finish(mine, OK)
    assert {t.config for t in again(store).trials(FAKE)} == {SPACE[0], SPACE[3]}
    child.kill()
    child.wait()
    assert {t.config: t.measurement.outcome for t in again(store).trials(FAKE)}[SPACE[1]] == "crashed"


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot": "another", "host": "elsewhere"}, {"space": "pid:[1]"},
                                    {"started": ""}])
def test_f1_a_process_that_cannot_be_seen_is_not_blamed(store, monkeypatch, change):
    """Another machine or container with the same home folder. Two such silent ends make a config doubtful."""
    for pid in (4194000, 4194001):
        monkeypatch.setattr(owner, "me", lambda pid=pid: {**dict(owner._here(os.getpid())), "pid": pid, **change})
        store.begin(FAKE, SPACE[0], "s", "c")
        monkeypatch.undo()
        reopened = again(store)
        dead = change == {"host": "elsewhere"}  # a host name may change; boot and process namespace do not
        assert [t.measurement.outcome for t in reopened.trials(FAKE)] == ["crashed"] * dead * (pid - 4193999)
    assert reopened.doubtful(FAKE) == (set() if dead else {SPACE[0]})


def test_f1_a_process_id_that_is_used_again_is_another_process():
    assert not owner.certainly_dead(owner.me())
    assert owner.certainly_dead({**owner.me(), "started": "1"})
    for nonsense in (None, [], {}, {"pid": 1}, {**owner.me(), "pid": None}):
        assert not owner.certainly_dead(nonsense)


@pytest.mark.slow
def test_f1_many_writers_of_one_journal(tmp_path):
    ending = ("store.forget(handle)\nfor i in range(20): store.finish(store.begin(FAKE, SPACE[i], 's', 'c'), "
              "autotune.core.measurement.Measurement('ok', time_us=1.0 + i))")
    children = [begun_by_another(tmp_path, n, "import autotune.core.measurement\n" + ending) for n in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    trials = Store(PROBLEM, H200, tmp_path).trials(FAKE)
    assert len(trials) == 80 and all(trials.count(trial) == 4 for trial in trials)
    assert all(t.measurement.time_us == 1.0 + SPACE.index(t.config) for t in trials)


def test_f15_a_measurement_on_disk_counts_whatever_came_after(store, monkeypatch):
    handle = store.begin(FAKE, SPACE[0], "s", "c")
    monkeypatch.setattr(store._storage, "set_trial_state_values", lambda *_: os.abort, raising=False)
    store.finish(handle, OK)
    monkeypatch.undo()
    store.forget(handle)  # an interrupt between the two writes
    for _ in range(2):
        trial, = again(store).trials(FAKE)
        assert trial.measurement == OK


def test_an_interrupted_trial_is_nobodys_fault(store):
    store.forget(store.begin(FAKE, SPACE[0], "source", "cubin"))
    assert again(store).trials(FAKE) == []


def test_a_torn_last_line_is_cut_and_writing_goes_on(store):
    store.add(FAKE, SPACE[0], "s", "", OK)
    store.add(FAKE, SPACE[1], "s", "", OK)
    data = store.path.read_bytes()
    store.path.write_bytes(data[:-30])
    Path(f"{store.path}.lock").touch()
    reopened = again(store)
    reopened.add(FAKE, SPACE[3], "s", "", WRONG)
    assert [t.config for t in again(store).trials(FAKE)][0] == SPACE[0]
    assert SPACE[3] in [t.config for t in again(store).trials(FAKE)]


@pytest.mark.parametrize("garbage", [b"not json\nat all\n", b"\x00\xff\n" * 10, b'{"op_code": 99}\n[]\n', b"[" * 100000 + b"\n",
                                     b'{"op_code":8,"worker_id":"","trial_id":99999999,"user_attr":{}}\n',
                                     b'{"op_code":0,"worker_id":"a","study_name":"x","directions":"?"}\n',
                                     b'{"op_code":4,"worker_id":"a","study_id":0,"datetime_start":7}\n'])
@pytest.mark.parametrize("where", ["before", "after"])
def test_f14_what_is_no_line_is_passed_over_and_said(store, capsys, garbage, where):
    store.add(FAKE, SPACE[0], "s", "", OK)
    data = store.path.read_bytes()
    store.path.write_bytes(garbage + data if where == "before" else data + garbage)
    reopened = again(store)
    assert [t.config for t in reopened.trials(FAKE)] == [SPACE[0]]
    assert "damaged and passed over" in capsys.readouterr().err
    reopened.add(FAKE, SPACE[1], "s", "", OK)
    assert [t.config for t in again(store).trials(FAKE)] == [SPACE[0], SPACE[1]]


def test_f14_any_spoiled_byte_costs_one_trial_at_most(store):
    """Every line in turn, at a byte in its middle, with the other trials as they were."""
    for i in range(6):
        store.finish(store.begin(FAKE, SPACE[i], "s", "c"), Measurement("ok", time_us=float(i + 1)))
    whole = store.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for n, line in enumerate(lines):
        for place in (len(line) // 2, len(line) - 1):
            spoiled = bytearray(line)
            spoiled[place] ^= 1
            store.path.write_bytes(b"".join([*lines[:n], bytes(spoiled), *lines[n + 1:]]))
            found = {t.config: t.measurement.time_us for t in again(store).trials(FAKE)}
            assert found.items() <= {SPACE[i]: i + 1.0 for i in range(6)}.items()
            assert len(found) >= (5 if place < len(line) - 1 else 4)  # without its end a line joins the next


@pytest.mark.parametrize("config", ["[]", '"text"', "null", "7", '{"kernel":[1]}'])
def test_f14_a_stored_config_that_is_none_is_left_out(tmp_path, config):
    journal = tmp_path / "a.journal"
    name = f"{PROBLEM.text} sm{'-'.join(map(str, H200.identity))} {FAKE.name}"
    journal.write_text(f'{{"op_code":0,"worker_id":"a","study_name":"{name}","directions":[1]}}\n'
                       '{"op_code":4,"worker_id":"a","study_id":0,"datetime_start":null,"user_attrs":{"phase":"done",'
                       f'"config":{config},"source":"s","cubin":"c","measurement":{{"outcome":"ok","time_us":1.0}}}}}}\n')
    assert read_trials(journal, FAKE) == []


def test_f14_a_journal_that_is_no_file(tmp_path):
    path = tmp_path / H200.name / f"{PROBLEM.text}.journal"
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(StoreError, match="not a regular file"):
        Store(PROBLEM, H200, tmp_path)
    path.unlink()
    target = tmp_path / "precious"
    target.write_text("keep")
    path.symlink_to(target)
    with pytest.raises(StoreError, match="cannot be written"):
        Store(PROBLEM, H200, tmp_path)
    assert target.read_text() == "keep"


def test_configs_that_are_no_longer_legal_are_left_out(store):
    store.add(FAKE, SPACE[0], "s", "", OK)
    path = store.path
    store.add(FAKE, SPACE[1], "s", "", OK)
    text = re.sub(r',"crc":\d+', "", path.read_text())
    path.write_text(text.replace('"block_m":32', '"block_m":33', 1))
    assert len(again(store).trials(FAKE)) == 1


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written .* AUTOTUNE_DB"):
        Store(PROBLEM, H200, tmp_path / "file")


def test_reading_a_file_that_is_not_there(tmp_path):
    with pytest.raises(StoreError, match="is not there"):
        read_trials(tmp_path / "no.journal", FAKE)
