"""A PostgreSQL of its own on loopback, over which tunes of many hosts are tested and simulated."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator


def programs() -> Path | None:
    """The folder of PostgreSQL's programs, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    path = found[-1] if found else shutil.which("initdb")
    return Path(path).parent if path else None


@contextmanager
def server() -> Iterator[tuple[str, Callable[[], None]]]:
    """(URL, restart) of a server that ends with the block. `restart()` ends it as a crash would, and begins it again."""
    folder, as_user = Path(tempfile.mkdtemp(prefix="autotune-pg-", dir="/tmp")), []
    if os.getuid() == 0:  # it refuses to run as root
        shutil.chown(folder, "postgres", "postgres")
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(*command: str) -> None:
        subprocess.run([*as_user, str(programs() / command[0]), *command[1:]], check=True, cwd=folder, stdout=subprocess.DEVNULL,
                       env={**os.environ, "LC_ALL": "C"})

    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off -c max_connections=300"
    begin = ("pg_ctl", "-D", f"{folder}/data", "-w", "-o", options, "-l", f"{folder}/log", "start")
    end = ("pg_ctl", "-D", f"{folder}/data", "-w", "-m", "immediate", "stop")

    def restart() -> None:
        run(*end)
        time.sleep(0.5)  # in which clients meet nobody
        run(*begin)

    try:
        run("initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "tune", "-N")
        run(*begin)
        try:
            yield f"postgresql://tune@127.0.0.1:{port}/postgres", restart
        finally:
            run(*end)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
