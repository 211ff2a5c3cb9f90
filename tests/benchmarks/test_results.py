"""benchmarks/results/: every file has its summary and the command that makes it again, and pages show no stale one as if it were
not."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from autotune.cli.main import COMMANDS, parser

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"
RESULTS = sorted(FOLDER.iterdir())
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
STALE = "# Stale"  # how the first line of a result begins that today's code did not give


def stale(result: Path) -> bool:
    return result.read_text().startswith(STALE)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_has_a_summary_and_the_command_that_makes_it(path):
    assert path.suffix == ".yaml"
    result = yaml.safe_load(path.read_text())
    summary, words = result["summary"], shlex.split(result["command"])
    assert summary and all(isinstance(value, (int, float, bool)) for value in summary.values())
    if words[0] == "python":
        assert words[1].startswith("benchmarks/") and (ROOT / words[1]).is_file()
    else:
        assert words[0] == "autotune" and words[1] in COMMANDS
        parser().parse_args(words[1:])  # exits if it is no command of today
    if "--out" in words:
        assert words[words.index("--out") + 1] == path.relative_to(ROOT).as_posix()


def sections() -> list[tuple[str, str]]:
    """(page and heading, text) of every section of the pages. Logs of the past are no claims about today."""
    return [(f"{page.name}: {text.splitlines()[0]}", text) for page in PAGES if page.name != "log.md"
            for text in re.split(r"^(?=#)", page.read_text(encoding="utf-8"), flags=re.M) if text]


def test_results_that_pages_name_exist_or_are_yet_to_be_made():
    for where, text in sections():
        for name in re.findall(r"(?<!--out )benchmarks/results/([\w-]+\.yaml)", text):
            assert (FOLDER / name).is_file(), (where, name)


def test_a_section_that_shows_a_picture_says_whether_its_result_is_stale():
    shown = []
    for where, text in sections():
        pictures = [FOLDER / f"{Path(picture).stem}.yaml" for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)]
        assert all(result.is_file() for result in pictures), where
        shown += pictures
        if pictures:
            assert ("stale" in text) == any(map(stale, pictures)), where
    assert shown
