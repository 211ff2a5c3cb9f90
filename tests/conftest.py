"""What every test shares: GPU tests skipped with the reason where there is none, and no test touches the user's files."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import settings

# The same examples on every run, so that a red run can be repeated; no deadline, because compiling takes what it takes.
settings.register_profile("autotune", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("autotune")

_HOME = "AUTOTUNE_TEST_HOME"  # set by the process that started the session, read by its xdist workers


def pytest_configure(config: pytest.Config) -> None:
    """Points the database and the compile cache at one temporary folder that all workers of the session share."""
    if _HOME not in os.environ:
        os.environ[_HOME] = tempfile.mkdtemp(prefix="autotune-tests-")
        config.add_cleanup(_remove_home)
    os.environ["AUTOTUNE_DB"] = os.path.join(os.environ[_HOME], "db")
    os.environ["AUTOTUNE_CACHE"] = os.path.join(os.environ[_HOME], "cache")


def _remove_home() -> None:
    shutil.rmtree(os.environ.pop(_HOME), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if gpu_items else None
    for item in gpu_items:
        item.add_marker(pytest.mark.xdist_group("gpu"))  # one worker: timings and memory do not mix
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    from autotune.core.gpu import GpuError, detect

    try:
        detect()
    except GpuError as error:
        return str(error).split(". ")[0]
    return None
