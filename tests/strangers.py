"""Code run as another user, for tests of folders that several users see. Only root can become another user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 65534
TEAM = 64321  # a group id that nobody has
ROOT = Path(__file__).parents[1]
# What is loaded before: the interpreter of a test environment is often below root's home, where another user cannot read.
LOADED = "import os, json, pwd, grp, platformdirs; from autotune.cuda import compile; compile.nvrtc_version()\n"
BECOME = "os.setgroups({groups}); os.setgid({uid}); os.setuid({uid}); os.umask({umask}); os.environ['HOME'] = '/nonexistent'\n"

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def run_as(uid: int, code: str, groups=(), umask: int = 0o022, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` as user `uid`, whose only groups are its own and `groups`; text of both streams."""
    become = BECOME.format(uid=uid, groups=[uid, *groups], umask=umask)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), **environment}
    return subprocess.run([sys.executable, "-c", LOADED + become + code], env=env, cwd="/", capture_output=True, text=True,
                          timeout=120)
