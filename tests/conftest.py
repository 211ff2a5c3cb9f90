"""What every test shares: GPU tests skipped with the reason where there is none, and no test touches the user's files.

Tests are of three rings: `gpu` ones launch kernels, `slow` ones compile or simulate them, start many processes or take seconds,
and all others are `fast`. With ``-m fast`` nothing can be compiled, so that a test of another ring fails there.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Iterator

import pytest
from hypothesis import settings

# The same examples on every run, so that a red run can be repeated; no deadline, because compiling takes what it takes.
settings.register_profile("autotune", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("autotune")

FAST_TEST_S = 20  # that a fast test may take on a machine that does much else; it should take one
_SLOW_FILE = re.compile(r"^pytestmark = .*\bpytest\.mark\.(slow|gpu)\b", re.MULTILINE)

# Workers take every core already. Threads of a BLAS or of torch would only wait for each other, at full load.
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# A worker holds millions of objects (spaces of configs, torch), so that looking for garbage as often as is usual takes a tenth of
# all time.
_COLLECT_AFTER = 50_000  # objects more than there were

_HOME = "AUTOTUNE_TEST_HOME"  # set by the process that started the session, read by its xdist workers


def pytest_configure(config: pytest.Config) -> None:
    """Points the database and the compile cache at one temporary folder that all workers of the session share."""
    gc.set_threshold(_COLLECT_AFTER)
    for name in _THREADS:  # in the process that starts workers: they read it when numpy and torch are imported
        os.environ.setdefault(name, "1")
    if _HOME not in os.environ:
        os.environ[_HOME] = tempfile.mkdtemp(prefix="autotune-tests-")
        config.add_cleanup(_remove_home)
    os.environ["AUTOTUNE_DB"] = os.path.join(os.environ[_HOME], "db")
    os.environ["AUTOTUNE_CACHE"] = os.path.join(os.environ[_HOME], "cache")


def _remove_home() -> None:
    shutil.rmtree(os.environ.pop(_HOME), ignore_errors=True)


def _only_fast(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "fast"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files with no fast test are not imported for them: some import torch, which takes seconds."""
    if _only_fast(config) and collection_path.suffix == ".py" and _SLOW_FILE.search(collection_path.read_text()):
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not item.get_closest_marker("gpu") and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.fast)
            if _only_fast(config):
                item.add_marker(pytest.mark.timeout(FAST_TEST_S))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if gpu_items else None
    for item in gpu_items:
        item.add_marker(pytest.mark.xdist_group("gpu"))  # one worker: timings and memory do not mix
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@lru_cache(maxsize=1)  # as what it stands for
def _refuses() -> None:
    pytest.fail("a fast test compiles; mark it slow (see tests/conftest.py)")


@pytest.fixture(scope="session", autouse=True)
def _no_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where only fast tests run, neither NVRTC nor a C++ compiler does."""
    from autotune.cuda import compile
    from autotune.simulator import compiler

    with pytest.MonkeyPatch.context() as patch:
        if _only_fast(request.config):
            patch.setattr(compile, "_load_nvrtc", _refuses)
            patch.setattr(compiler, "_executed", lambda command, folder: _refuses())
        yield


def _no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    from autotune.core.gpu import GpuError, detect

    try:
        detect()
    except GpuError as error:
        return str(error).split(". ")[0]
    return None
