"""The rules that hold for the tree as a whole: sizes, what may stand where, which way imports run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "autotune"
TEMPLATES = ROOT / "templates"

MAX_LINES = {"autotune": 320, "templates": 320, "scripts": 120, "tests": 500}


def tracked() -> list[Path]:
    """Files that are or would be committed."""
    try:
        listing = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, check=True,
                                 capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def under(*parts: str) -> list[Path]:
    folder = ROOT.joinpath(*parts)
    return [path for path in tracked() if path.is_relative_to(folder)]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_tree_is_small():
    assert sum(path.stat().st_size for path in tracked()) < 5_000_000
    assert sum(path.stat().st_size for path in under("generated")) < 1_000_000


@pytest.mark.parametrize("folder", MAX_LINES)
def test_files_are_short(folder):
    code = (".py", ".j2", ".cuh", ".h", ".sh", "")
    lengths = {name(path): read(path).count("\n") for path in under(folder) if path.suffix in code}
    assert lengths and not {file: lines for file, lines in lengths.items() if lines > MAX_LINES[folder]}


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by their last name: of two alike it collects one, in whichever folder comes first."""
    names = [path.name for path in under("tests") if path.name.startswith("test_")]
    assert names and len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


def test_nothing_generated_is_committed_outside_generated():
    suffixes = {".cubin", ".ptx", ".sass", ".whl", ".pyc", ".so", ".o", ".lock", ".log", ".journal"}
    assert not [name(path) for path in tracked() if path.suffix in suffixes]
    assert not [name(path) for path in tracked() if path.suffix == ".cu" and not path.is_relative_to(ROOT / "generated")
                and not path.is_relative_to(ROOT / "tests")]


def test_nothing_is_left_to_do():
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    assert not [name(path) for path in [*under("autotune"), *under("templates"), *under("scripts"), *under("tests")]
                if path.suffix != ".yaml" and marks.search(read(path))]


# Templates


def portable() -> list[Path]:
    """Templates and headers that also run on the CPU: all but lib/ptx/ and lib/base.cuh."""
    return [path for path in under("templates") if path != TEMPLATES / "lib" / "base.cuh"
            and not path.is_relative_to(TEMPLATES / "lib" / "ptx")]


def code_of(path: Path) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", read(path), flags=re.S)


def test_assembly_lives_in_lib_ptx():
    assert portable() and not [name(path) for path in portable() if re.search(r"\basm\b", code_of(path))]


def test_no_cuda_header_is_included():
    assert not [name(path) for path in under("templates") if re.search(r"#\s*include\s*<", read(path))]
    assert not [name(path) for path in under("generated") if path.suffix == ".cu" and re.search(r"#\s*include", read(path))]


# What a portable body may say that begins with two underscores: qualifiers, and the barrier that the simulator has too.
QUALIFIERS = {"__global__", "__grid_constant__", "__launch_bounds__", "__device__", "__forceinline__", "__restrict__", "__host__",
              "__syncthreads", "__constant__", "__align__"}


def test_intrinsics_and_cuda_types_live_in_lib_ptx():
    for path in portable():
        words = set(re.findall(r"\b__\w+", code_of(path))) - QUALIFIERS
        assert not words, f"{name(path)}: {sorted(words)}"
        assert not re.search(r"\b(half2|nv_bfloat16\w*|cudaStream_t|CUtensorMap)\b", code_of(path)), name(path)


def test_shared_memory_is_one_dynamic_symbol():
    declarations = [line for path in under("templates") for line in code_of(path).splitlines() if "__shared__" in line]
    assert all("extern" in line for line in declarations), declarations
    assert not [name(path) for path in portable() if "__shared__" in code_of(path)]


# Python

PACKAGES = {  # each package and those that it may import, deferred imports included; docs/architecture.md draws them
    "core": set(),
    "models": {"core"},
    "kernels": {"core"},
    "cuda": {"core", "kernels"},
    "device": {"core", "kernels", "cuda"},
    "database": {"core", "kernels", "cuda"},
    "calls": {"core", "models", "kernels", "cuda", "device", "database"},
    "flash_attn": {"calls"},
    "integrations": {"core", "kernels", "device", "calls", "flash_attn"},
    "check": {"core", "kernels", "cuda", "device", "database", "calls"},
    "timing": {"core", "kernels", "cuda", "device", "check"},
    "simulator": {"core", "kernels", "cuda", "calls", "check"},
    "tuner": {"core", "models", "kernels", "cuda", "device", "database", "calls", "check", "timing", "simulator"},
    "compare": {"core", "kernels", "cuda", "device", "database", "calls", "check", "timing"},
    "cli": {"core", "models", "kernels", "cuda", "device", "database", "calls", "check", "timing", "simulator", "tuner",
            "compare"},
}


@lru_cache(maxsize=None)  # asked of every module for each violation that is planted
def imported_packages(source: str, module: str) -> set[str]:
    """The packages of autotune that the source of `module` (dotted, below autotune) imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = ["autotune", *module.split(".")][:-node.level] if node.level else []
            target = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*target, alias.name] for alias in node.names] if target == ["autotune"] else [target]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "autotune" and len(name) > 1 and name[1] in PACKAGES}
    return found


def violations(sources: dict[str, str]) -> list[str]:
    """Of modules by dotted name: each that is in no package, and each import against the order of `PACKAGES`."""
    wrong = []
    for module, source in sources.items():
        package = module.split(".")[0]
        if package not in PACKAGES:
            wrong.append(f"{module} is in no package")
        else:
            wrong += [f"{module} imports {other}" for other in sorted(imported_packages(source, module) - {package})
                      if other not in PACKAGES[package]]
    return wrong


@lru_cache(maxsize=None)
def modules() -> dict[str, str]:
    """The sources of all modules by dotted name; a package's __init__ as ``package.__init__``."""
    paths = [path for path in under("autotune") if path.suffix == ".py" and path.parent != PACKAGE]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): read(path) for path in paths}


def test_packages_are_a_dag_and_every_import_follows_it():
    order = list(PACKAGES)
    assert all(order.index(other) < order.index(package) for package, others in PACKAGES.items() for other in others)
    found = modules()
    assert {name.split(".")[0] for name in found} == set(PACKAGES)
    assert not violations(found)


@pytest.mark.parametrize("module, source", [
    ("core.problem", "from ..kernels import base"),
    ("timing.conditions", "def f():\n    from ..calls import kvcache"),
    ("core.measurement", "import autotune.simulator"),
    ("kernels.forward.mma", "def f():\n    from autotune import tuner"),
    ("kernels.forward.mma", "from ...database import view"),
    ("stray", ""),
])
def test_a_planted_violation_is_seen(module, source):
    assert len(violations({**modules(), module: source})) == 1


def test_arch_is_compared_only_in_kernels():
    comparison = re.compile(r"\barch\s*(<|>|==|<=|>=)\s*\d")
    assert not [name(path) for path in under("autotune") if path.suffix == ".py" and "kernels" not in path.parts
                and comparison.search(read(path))]


def test_two_environment_variables_are_the_only_switches():
    modules = [path for path in under("autotune") if path.suffix == ".py"]
    switches = {word for path in modules for word in re.findall(r"\bAUTOTUNE_[A-Z_]+", read(path))}
    assert switches == {"AUTOTUNE_DB", "AUTOTUNE_CACHE"}


def test_import_is_quick_and_brings_no_heavy_module():
    code = ("import sys, time; start = time.perf_counter(); import autotune; seconds = time.perf_counter() - start; "
            "print(seconds, *sorted(set(sys.modules) & {'jinja2', 'optuna', 'yaml', 'cupy', 'torch', 'numpy', 'filelock'}))")
    runs = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
            for _ in range(3)]
    assert runs[0][1:] == []
    assert min(float(run[0]) for run in runs) < 0.3


# What people read first


def test_the_readme_holds_the_two_commands_and_ci_runs_the_second():
    commands = re.findall(r"^    (sh scripts/run .+)$", read(ROOT / "README.md"), flags=re.M)
    assert commands == ["sh scripts/run tune --model llama-3-8b", "sh scripts/run test"]
    assert commands[1] in read(ROOT / ".ci" / "run")


def test_set_up_without_a_python_that_fits_is_one_sentence(tmp_path):
    for python in ("python", "python3", "python3.10", "python3.11", "python3.12", "python3.13"):
        (tmp_path / python).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / python).chmod(0o755)
    done = subprocess.run(["sh", ROOT / "scripts" / "run", "gpus"], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "Python 3.10 to 3.13" in done.stderr and "apt install" in done.stderr


def test_set_up_without_a_command_says_which_there_are():
    done = subprocess.run(["sh", ROOT / "scripts" / "run"], capture_output=True, text=True)
    assert done.returncode == 2 and "tune --model llama-3-8b" in done.stderr


def test_what_the_readme_links_to_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", read(ROOT / "README.md") + read(ROOT / "CONTRIBUTING.md"))
    assert links and all((ROOT / link).exists() for link in links)


def test_every_command_has_a_row_in_the_readme():
    from autotune.cli.main import COMMANDS

    assert set(re.findall(r"^\| `autotune (\w+)", read(ROOT / "README.md"), flags=re.M)) == set(COMMANDS)
