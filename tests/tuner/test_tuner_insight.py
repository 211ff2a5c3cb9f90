import glob
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tuner_fakes import FAKE, H200, PROBLEM, SPACE, fails, synthetic_us

from autotune import kernels
from autotune.cli.main import main
from autotune.core.measurement import Measurement
from autotune.tuner import insight
from autotune.tuner.page import Row, page
from autotune.tuner.store import Store, StoreError


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """A folder with 60 trials of the fake kernel."""
    for name in reversed(list(kernels.KERNELS)):
        monkeypatch.delitem(kernels.KERNELS, name)
    monkeypatch.setitem(kernels.KERNELS, FAKE.name, FAKE)
    store = Store(PROBLEM, H200, tmp_path)
    for config in SPACE[::len(SPACE) // 60]:
        failed = Measurement("spilled", message="fake") if fails(config) else Measurement("ok", time_us=synthetic_us(config))
        store.add(FAKE, config, "s", "c", failed)
    return tmp_path


def test_each_parameters_best_other_value_and_what_it_costs(trials):
    told = insight.told(PROBLEM, H200, str(trials))
    best, mine = told.best, told.trials[FAKE]
    assert sum(told.outcomes.values()) == len(mine) >= 60
    found = insight.alternatives(FAKE, mine, best.config, best.measurement.time_us)
    assert [a.cost for a in found] == sorted((a.cost for a in found), reverse=True) and all(a.cost >= 0 for a in found)
    for a in found:
        others = [t.measurement.time_us for t in mine if t.measurement.ok and t.config[a.parameter] != best.config[a.parameter]]
        assert a.time_us == min(others) and a.value != a.winners == best.config[a.parameter] and a.parameter not in a.changed


def test_history_falls_to_the_best_and_importance_sums_to_one(trials):
    told = insight.told(PROBLEM, H200, str(trials))
    steps = insight.history(told.trials[FAKE])
    assert [time for _, time in steps] == sorted({time for _, time in steps}, reverse=True)
    assert steps[-1][1] == told.best.measurement.time_us
    assert sum(insight.importance(FAKE, told.trials[FAKE]).values()) == pytest.approx(1)
    assert insight.importance(FAKE, told.trials[FAKE][:5]) == {}


def test_busy_units_are_those_of_the_roofline():
    shares = insight.busy(PROBLEM, H200, 2 * H200.roofline_us(PROBLEM.flops, PROBLEM.compulsory_bytes))
    assert max(shares["tensor cores"], shares["memory"]) == pytest.approx(0.5) and 0 < shares["exponentials"] < 1


def test_why_from_the_command_line(trials, capsys):
    assert main(["why", PROBLEM.text, "--gpu", H200.name, "--trials", str(trials)]) == 0
    said = capsys.readouterr().out
    assert "best other" in said and "block_m" in said and "limits    at boost clock" in said
    assert main(["why", PROBLEM.text.replace("b1", "b2"), "--gpu", H200.name, "--trials", str(trials)]) == 2
    assert "is not there" in capsys.readouterr().err


def test_no_journal_is_a_sentence(tmp_path):
    with pytest.raises(StoreError, match="is not there"):
        insight.told(PROBLEM, H200, str(tmp_path))


ROW = Row(PROBLEM.text, "measured", "k a=1", 100.0, 60.0, 120.0, {"<peer>": 130.0}, {"ok": 5, "spilled": 2},
          [(1, 150.0), (4, 100.0)], {"block_m": 0.7, "warps": 0.3})


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "link", "line", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_self_contained_and_escapes_what_it_shows():
    text = page("<script>alert(1)</script>", [ROW, replace(ROW, gains=(), outcomes={}, importance={}, peers={})], ["a & b"])
    parser = Balanced()
    parser.feed(text)
    assert not parser.open and "<script" not in text and "&lt;peer&gt;" in text and "a &amp; b" in text
    assert not re.search(r"https?://|src=|@import", text)
    assert text.count("<polyline") == 1 and "1.30x" in text and "60%" in text


def test_the_report_of_shipped_records_with_peers(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "db"))
    file = tmp_path / "h200.html"
    assert main(["report", "--gpu", "nvidia-h200", "--html", str(file), "--bench", "benchmarks/results/forward-h200.yaml"]) == 0
    assert "over sdpa-cudnn" in file.read_text() and file.read_text().count("<tr>") > 100
    assert main(["report", "--gpu", "nvidia-h200", "--bench", "pyproject.toml"]) == 2
    assert main(["report", "--gpu", "nvidia-h200", "--html", str(tmp_path / "no" / "file.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.skipif(not (shutil.which("chromium") or glob.glob("/usr/bin/google-chrome*")), reason="no Chromium is installed")
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_it_without_a_word_in_its_console(tmp_path, width):
    file = tmp_path / "page.html"
    file.write_text(page("autotune", [ROW] * 3))
    browser = shutil.which("chromium") or glob.glob("/usr/bin/google-chrome*")[0]
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
                           f"--user-data-dir={tmp_path}/profile", f"--window-size={width},900",
                           f"--screenshot={tmp_path}/page.png", f"file://{file}"], capture_output=True, text=True, timeout=120)
    assert (tmp_path / "page.png").stat().st_size > 5000 and "CONSOLE" not in done.stderr
