import os
import subprocess
import sys
from pathlib import Path

import pytest
from tuner_fakes import FAKE, H200, PROBLEM, SPACE

from autotune.core.measurement import Measurement
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


def test_what_was_launching_when_the_process_died_is_a_crash(store):
    store.begin(FAKE, SPACE[2], "source", "cubin")
    assert store.trials(FAKE) == []
    trial, = again(store).trials(FAKE)
    assert trial.config == SPACE[2] and trial.measurement.outcome == "crashed" and "died" in trial.measurement.message
    assert len(again(store).trials(FAKE)) == 1


def test_the_launch_is_on_disk_before_it_happens(tmp_path):
    script = (f"import sys, os; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
              "from tuner_fakes import *\nfrom pathlib import Path\nfrom autotune.tuner.store import Store\n"
              f"Store(PROBLEM, H200, Path({str(tmp_path)!r})).begin(FAKE, SPACE[5], 's', 'c'); os._exit(9)")
    root = str(Path(__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root}).returncode == 9
    assert [t.measurement.outcome for t in Store(PROBLEM, H200, tmp_path).trials(FAKE)] == ["crashed"]


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


@pytest.mark.parametrize("garbage", [b"not json\nat all\n", b"\x00\xff\n" * 10, b'{"op_code": 99}\n[]\n'])
def test_a_damaged_journal_is_moved_aside(store, garbage):
    store.add(FAKE, SPACE[0], "s", "", OK)
    path = store.path
    path.write_bytes(garbage + path.read_bytes())
    reopened = again(store)
    assert reopened.trials(FAKE) == [] and path.with_suffix(".journal.damaged").read_bytes().startswith(garbage)
    reopened.add(FAKE, SPACE[0], "s", "", OK)
    assert len(again(store).trials(FAKE)) == 1


def test_configs_that_are_no_longer_legal_are_left_out(store):
    store.add(FAKE, SPACE[0], "s", "", OK)
    path = store.path
    store.add(FAKE, SPACE[1], "s", "", OK)
    path.write_text(path.read_text().replace('"block_m": 32', '"block_m": 33'))
    assert all(t.config["block_m"] != 33 for t in again(store).trials(FAKE))


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written .* AUTOTUNE_DB"):
        Store(PROBLEM, H200, tmp_path / "file")


def test_reading_a_file_that_is_not_there(tmp_path):
    with pytest.raises(StoreError, match="is not there"):
        read_trials(tmp_path / "no.journal", FAKE)
