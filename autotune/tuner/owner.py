"""Which process wrote something, and whether it is certainly dead: what may be blamed on a kernel, and what may not.

A process id alone says little: it is used again, other machines and containers have their own, and a home folder may be
shared by all of them. So an owner is (host, machine, boot, process namespace, process id, start time), and only who sees all
of it may judge.
"""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import Mapping

ROOT_NAMESPACE = "pid:[4026531836]"  # of the machine itself: a constant of Linux


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _started(pid: int | str) -> str:
    """When process `pid` began, in clock ticks since boot; "" if there is none or the system does not say."""
    stat = _text(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":  # a zombie runs nothing any more
        return ""
    return fields[19]


@lru_cache(maxsize=4)
def _here(pid: int) -> Mapping[str, str | int]:
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return {"host": socket.gethostname(), "machine": _text("/etc/machine-id"), "boot": _text("/proc/sys/kernel/random/boot_id"),
            "space": space, "pid": pid, "started": _started("self")}


def me() -> dict[str, str | int]:
    """This process, as a dict of plain values."""
    return dict(_here(os.getpid()))


def certainly_dead(owner: object) -> bool:
    """Whether the process that `me` described there cannot be running any more. False whenever that cannot be known."""
    here = _here(os.getpid())
    if not isinstance(owner, Mapping) or not all(owner.get(name) for name in ("boot", "space", "pid", "started")):
        return False
    if owner["boot"] == here["boot"] and owner["space"] == here["space"]:
        return _started(str(owner["pid"])) != owner["started"]
    rebooted = owner["boot"] != here["boot"] and owner.get("host") == here["host"] and owner.get("machine") == here["machine"]
    return bool(rebooted and here["machine"] and here["space"] == owner["space"] == ROOT_NAMESPACE)


def shown(owner: object) -> str:
    """``process 123 on node7``"""
    if not isinstance(owner, Mapping):
        return "a process"
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
