"""The wheel and the sdist, built and installed as users get them: no checkout, an empty environment, another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from autotune import __version__

pytestmark = pytest.mark.slow

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
PROBLEM = "forward-bf16-b1-h32x8-q8192-k8192-d128-causal"


def build(source: Path, target: str, out: Path) -> Path:
    """What hatchling, the build backend, makes of the tree at `source`."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out], cwd=source, check=True,
                   capture_output=True)
    return next(out.glob("*.whl" if target == "wheel" else "*.tar.gz"))


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(ROOT, "sdist", folder)) as archive:
        archive.extractall(folder / "tree")
    return next((folder / "tree").iterdir())


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """The wheel that is built from the sdist, as pip does where there is no wheel."""
    return build(sdist, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_sdist_has_what_a_build_and_a_reader_need(sdist):
    for folder in ("templates", "tuning_db", "autotune", "docs"):
        assert {path for path in files_under(ROOT / folder) if "__pycache__" not in path} == files_under(sdist / folder), folder
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"} <= {p.name for p in sdist.iterdir()}


def test_the_wheel_has_templates_and_database_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, packaged in (("templates", "_templates"), ("tuning_db", "_tuning_db"), ("autotune", ".")):
        paths = {path for path in files_under(ROOT / folder) if "__pycache__" not in path}
        wanted = {Path("autotune", packaged, path).as_posix() for path in paths}
        assert wanted <= names, sorted(wanted - names)
    assert {name.split("/")[0] for name in names} == {"autotune", f"autotune-{__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The `autotune` script of an environment that holds the wheel and what its metadata requires, and nothing else.

    Requirements are linked from the environment that runs the tests, so that no package index is needed.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    site = Path(subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True,
                               capture_output=True, text=True).stdout.strip())
    required = subprocess.run([python, "-c", "from importlib.metadata import requires; print(*requires('autotune'), sep='\\n')"],
                              check=True, capture_output=True, text=True).stdout.splitlines()
    for name in closure(line for line in required if "extra ==" not in line):
        link(name, site)
    return folder / "bin" / "autotune"


def closure(requirements) -> set[str]:
    """Names of the distributions that `requirements` need here, and those that they need."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    queue = [Requirement(line) for line in requirements]
    while queue:
        requirement = queue.pop()
        if requirement.name in found or requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        assert metadata.version(requirement.name) in requirement.specifier
        found.add(requirement.name)
        queue += [Requirement(line) for line in metadata.requires(requirement.name) or ()]
    return found


def link(name: str, site: Path) -> None:
    distribution = metadata.distribution(name)
    for top in {Path(str(file)).parts[0] for file in distribution.files if ".." not in Path(str(file)).parts}:
        if top != "__pycache__" and not (site / top).exists():
            (site / top).symlink_to(distribution.locate_file(top))


@pytest.fixture
def run(installed, tmp_path):
    """Runs the installed `autotune` in an empty folder, with an empty home."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "AUTOTUNE_DB": str(tmp_path / "db"),
                   "AUTOTUNE_CACHE": str(tmp_path / "cache")}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([installed, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_lookup_and_source_work_from_any_folder_without_the_checkout(run, tmp_path):
    lookup = run("lookup", PROBLEM, "--gpu", "nvidia-h200")
    assert lookup.returncode == 0 and "config" in lookup.stdout and PROBLEM in lookup.stdout, lookup.stderr
    source = run("source", PROBLEM, "--gpu", "nvidia-h200")
    assert source.returncode == 0 and "__global__" in source.stdout, source.stderr
    assert not list(tmp_path.iterdir())  # neither wrote anything


def test_the_shipped_database_comes_along(run):
    listed = run("db", "list")
    assert listed.returncode == 0, listed.stderr
    shipped = list((ROOT / "tuning_db").glob("*/*.yaml"))
    assert ("shipped" in listed.stdout) == bool(shipped)


def test_what_needs_the_compiler_or_a_checkout_says_so_in_one_sentence(run):
    for arguments, words in ((("source", PROBLEM, "--gpu", "nvidia-h200", "--ptx"), "pip install"),
                             (("bench", PROBLEM), "no GPU can be used"), (("build",), "run it from a checkout")):
        done = run(*arguments)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done
