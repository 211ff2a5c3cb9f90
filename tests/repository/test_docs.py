"""What README and docs/ tell people to type, typed: every command and every piece of Python, on a machine without a GPU.

Commands run in a copy of what they write to. A search is the one thing that is not done: `tune` records defaults here (other
tests tune). Commands that need a GPU must say so; tests marked gpu run them.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import numpy as np
import pytest
import yaml
from fake_arrays import Tensor, fake_gpu, random  # noqa: F401 (a fixture)
from test_cli import SMALL, no_gpu, run  # noqa: F401 (a fixture)

from autotune.database import view
from autotune import tuner
from autotune.cli.main import COMMANDS
from autotune.kernels import default_config
from autotune.database.record import GpuKey, Record

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NEED_GPU = ("verify", "bench")
ASK_GPU = ("lookup", "source", "why", "report", "worker")  # without --gpu
PLACEHOLDERS = {"PROBLEM": SMALL, "TEXT": SMALL, "--model NAME": "--model llama-3-8b", "--gpu NAME": "--gpu nvidia-h200"}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [dedent(text) for text in
            re.findall(rf"^ *```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)]


def commands(page: Path) -> list[str]:
    """Every command line on a page: in sh blocks, in the README's indented lines, and inline. A bare name inline is a name."""
    text = page.read_text(encoding="utf-8")
    found = [line.strip() for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]
    found += re.findall(r"^    (sh scripts/run .+)$", text, flags=re.M)
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    inline = re.findall(r"`((?:autotune|sh scripts/run) [^`]+)`", outside)
    found += [line + " --help" if len(line.split()) == 2 else line for line in inline
              if line.split()[0] == "sh" or line.split()[1] in COMMANDS]
    return list(dict.fromkeys(found))


ALL = sorted({line for page in PAGES for line in commands(page)})


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the folders that commands write to, as the current folder; no GPU; an empty database of the user's."""
    for folder in filter(lambda name: (ROOT / name).is_dir(), ("benchmarks", "docs", "generated", "tuning_db")):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "db"))
    monkeypatch.setattr(view, "shipped_root", lambda: tmp_path / "tuning_db")
    monkeypatch.setattr(tuner, "tune", record_defaults)
    return tmp_path


def record_defaults(problems, *, gpu, effort, root, storage=None, gpus=None, calls=None) -> list[Record]:
    """What `tune` returns, without a search."""
    from autotune import kernels

    return [Record(problem, GpuKey.of(gpu), default_config(problem, gpu), "predicted", 10.0, "2026-01-31 12:00:00 UTC", 1,
                   "13.0.88", "0" * 64, "0.1.0") for problem in problems if kernels.candidates(problem, gpu)]


def test_the_pages_hold_commands():
    assert len(ALL) > 25 and all(any(f"autotune {name}" in line for line in ALL) for name in COMMANDS)


@pytest.mark.parametrize("line", ALL)
def test_a_command_does_what_the_page_says(line, checkout, no_gpu, capsys):  # noqa: F811
    for word, value in PLACEHOLDERS.items():
        line = line.replace(word, value)
    words = shlex.split(line)
    if words[:3] == ["sh", "scripts/run", "test"]:
        assert "sh scripts/run test" in (ROOT / ".ci" / "run").read_text()  # this very test is run by it
    elif words[:3] == ["python", "-m", "autotune.compare.plot"]:
        draw(words[1:])
    else:
        arguments = words[2:] if words[:2] == ["sh", "scripts/run"] else words[1:]
        assert arguments[0] in COMMANDS
        code, said = run(*arguments), capsys.readouterr()
        if "--cover" in arguments:
            assert code == 2 and "--cover measures" in said.err, said
        elif "--help" not in arguments and (arguments[0] in NEED_GPU or arguments[0] in ASK_GPU and "--gpu" not in arguments):
            assert code == 2 and "no GPU can be used" in said.err, said
        else:
            older = arguments[:2] == ["db", "check"] and "records in 2 files: all legal and current" in said.out  # covers may be
            assert said.out and (code == 0 or code == 1 and older), said


def draw(words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "HOME": "."})
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert done.returncode == 1 and "pip install matplotlib" in done.stderr
    else:
        assert done.returncode == 0 and Path(words[-1]).stat().st_size > 1000


def test_the_picture_in_the_readme_is_of_the_results():
    drawn = (ROOT / "docs" / "forward-h200.svg").read_text()
    results = yaml.safe_load((ROOT / "benchmarks" / "results" / "forward-h200.yaml").read_text())
    for problem in results["problems"]:
        assert problem.removeprefix("forward-").replace("-", " ") in drawn


# Python


def readme_python() -> str:
    block, = blocks(ROOT / "README.md", "python")
    return block


def test_the_python_of_the_readme_runs_on_arrays_of_a_gpu_made_of_numpy(gpu, monkeypatch, capsys):
    torch = ModuleType("torch")
    torch.bfloat16 = "bfloat16"
    torch.randn = lambda *shape, device, dtype: random(shape)
    monkeypatch.setitem(sys.modules, "torch", torch)
    names: dict = {}
    exec(readme_python(), names)
    assert isinstance(names["out"], Tensor) and names["out"].shape == (1, 1024, 32, 128) and names["lse"].shape == (1, 32, 1024)
    said = capsys.readouterr().out
    assert "match" in said and "copies   none" in said and "'exact': " in said and len(gpu.launches) == 2


@pytest.mark.gpu
def test_the_python_of_the_readme_runs_on_the_gpu():
    pytest.importorskip("torch")
    exec(readme_python(), {})


def test_the_python_about_packed_sequences_runs(gpu, capsys):
    starts = Tensor(np.array([0, 4, 4, 11], np.int32))
    names = {"q": random((11, 4, 64)), "k": random((11, 2, 64)), "v": random((11, 2, 64)), "starts": starts}
    exec(blocks(ROOT / "docs" / "packed.md", "python")[0], names)
    assert names["out"].shape == (11, 4, 64) and names["lse"].shape == (4, 11) and len(gpu.launches) == 1
    assert "forward-bf16-b3-h4x2-q7-k7-d64-causal-varlen" in capsys.readouterr().out


def test_the_python_about_the_simulator_runs(capsys):
    from autotune.cuda.compile import CompilerMissing

    block = next(block for block in blocks(ROOT / "docs" / "adding-a-kernel.md", "python") if "simulator" in block)
    try:
        exec(block, {})
    except CompilerMissing as error:
        pytest.skip(str(error))
    assert "ok=True" in capsys.readouterr().out


def test_the_record_in_the_page_about_the_database_is_one(tmp_path):
    block, = blocks(ROOT / "docs" / "database.md", "yaml")
    path = tmp_path / "nvidia-h200" / "forward.yaml"
    path.parent.mkdir()
    path.write_text(block)
    assert not view.check([path], compiled=False) and len(view.read(path).records) == 1


def test_the_workload_in_the_page_about_tuning_is_one(tmp_path):
    from autotune.models.lists import read_workload

    block, = blocks(ROOT / "docs" / "new-gpu.md", "yaml")
    (tmp_path / "workload.yaml").write_text(block)
    workload = read_workload(tmp_path / "workload.yaml")
    assert len(workload.problems) == 3 and workload.summary["all"] == workload.problems


# Words


def test_what_the_pages_link_to_exists():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), (page.name, link)


def test_anchors_between_pages_exist():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            headings = re.findall(r"^#+ (.+)$", ((page.parent / target) if target else page).read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, (page.name, anchor)


def quoted_errors() -> list[str]:
    """The messages that the FAQ quotes, without their variable parts."""
    text = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    return re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\*\*(`.+?)\*\*", text, flags=re.M | re.S)))


def test_the_faq_quotes_errors_that_exist():
    code = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "autotune").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # messages that go on in the next line
    quoted = quoted_errors()
    assert len(quoted) > 10
    for message in quoted:
        for part in filter(None, (part.strip(" ,'") for part in message.split("..."))):
            assert part in code, (message, part)
