"""A process that may be killed: `Worker` runs methods of an object that lives in a child process.

    worker = Worker("autotune.tuner.evaluate:Evaluator", {"device": 0})
    reply = worker.call("evaluate", problem, ..., timeout=10.0)      # Reply: done, raised, timeout or crashed

A bad kernel may hang, crash or poison the CUDA context; then the process is killed and the next call starts a new one.
Nothing is assumed about the target but that it is a class, so tests use ones that hang and crash without a GPU.
The child is started with ``python -m``, not with multiprocessing, so a caller's script needs no ``__main__`` guard.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Mapping

START_SECONDS = 120.0  # a cold import of CuPy and a CUDA context take 3 to 15 s, more on a busy file system
EXIT_SECONDS = 5.0  # for a polite exit before the kill
PR_SET_PDEATHSIG = 1


class WorkerError(RuntimeError):
    """The worker cannot even start, with what it said on the way down."""


@dataclass(frozen=True)
class Reply:
    """How a call ended. `value` is what the method returned; `message` says what went wrong otherwise."""

    status: str  # done, raised, timeout, crashed
    value: object = None
    message: str = ""


class Worker:
    """`target` is "module:Class"; the child makes one instance with `options` as keyword arguments.

    The child starts with the first call and restarts after a failure. It sees the caller's `sys.path`. Use as a
    context manager, or call `close`.
    """

    def __init__(self, target: str, options: Mapping[str, object] | None = None):
        self._target = target
        self._options = dict(options or {})
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._log = None
        self._ready = False  # the child has made its instance
        self._pending = False  # a call was submitted and its result not taken
        self.starts = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts the child if none runs, without waiting for it to be ready."""
        if self._process is not None:
            return
        ours, theirs = Pipe()
        self._log = tempfile.TemporaryFile()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_search_path())}
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            # A session of its own: Ctrl-C in the terminal reaches the parent only, which then decides.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL,
                                             stdout=self._log, stderr=self._log, start_new_session=True)
        self._connection = ours
        self._ready = False
        self.starts += 1
        try:
            ours.send((self._target, self._options))
        except OSError:
            pass  # it died at once; `result` finds out and says why

    def submit(self, method: str, *arguments: object) -> None:
        """Sends a call without waiting, even before the child is up; `result` waits.

        A call whose result was never taken is abandoned, and the child with it.
        """
        if self._pending:
            self.kill()
        self.start()
        self._pending = True
        try:
            self._connection.send((method, arguments))
        except OSError:
            pass  # it died; `result` finds out and says why

    def result(self, timeout: float) -> Reply:
        """How the submitted call ended. `timeout` is in seconds, start-up not counted.

        After "timeout" and "crashed" the child is gone; after "raised" it lives on, and the caller judges its health.
        Raises `WorkerError` if the child could not make its instance.
        """
        if not self._ready:
            reply = self._receive(START_SECONDS)
            if reply.status != "done":
                self.kill()
                raise WorkerError(f"the process that measures kernels cannot start: {reply.message}")
            self._ready = True
        reply = self._receive(timeout)
        self._pending = False
        if reply.status in ("timeout", "crashed"):
            self.kill()
        return reply

    def call(self, method: str, *arguments: object, timeout: float) -> Reply:
        """`submit`, then `result`."""
        self.submit(method, *arguments)
        return self.result(timeout)

    def kill(self) -> None:
        """Ends the child at once. The next call starts another."""
        process, self._process = self._process, None
        self._pending = False
        if process is not None:
            process.kill()
            process.wait()
            self._connection.close()
            self._log.close()

    def close(self) -> None:
        """Lets an idle child exit by itself, which frees its GPU memory in order; kills it if it does not."""
        if self._process is not None:
            self._connection.close()
            try:
                self._process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            self.kill()

    def _receive(self, timeout: float) -> Reply:
        try:
            if not self._connection.poll(timeout):
                return Reply("timeout", message=f"no answer within {timeout:.1f} s")
            status, value, message = self._connection.recv()
            return Reply(status, value, message)
        except (EOFError, OSError):
            return self._death()

    def _death(self) -> Reply:
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return Reply("crashed", message="the process closed its connection")
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        tail = self._tail()
        return Reply("crashed", message=f"the process died ({how})" + (f": {tail}" if tail else ""))

    def _tail(self, size: int = 2000) -> str:
        """The last line that the child printed."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - size))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""


def _search_path() -> list[str]:
    """`sys.path` with this package's parent first, so that the child imports the same code."""
    here = str(Path(__file__).resolve().parents[2])
    return list(dict.fromkeys([here, *(str(Path(p or ".").resolve()) for p in sys.path)]))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_with(parent: int, how: signal.Signals = signal.SIGTERM) -> None:
    """Asks Linux for the signal `how` when this process's parent dies: a hung kernel would otherwise outlive a killed tuner."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(how))
    if os.getppid() != parent:
        os._exit(1)


def _serve(connection: Connection) -> None:
    """The child's life: make the instance, then answer one call after another until the parent hangs up."""
    target, options = connection.recv()
    module, _, name = target.partition(":")
    try:
        instance = getattr(importlib.import_module(module), name)(**options)
    except Exception as error:
        connection.send(("raised", None, _sentence(error)))
        return
    connection.send(("done", None, ""))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            value = getattr(instance, method)(*arguments)
        except Exception as error:
            traceback.print_exc()
            connection.send(("raised", None, _sentence(error)))
        else:
            connection.send(("done", value, ""))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


if __name__ == "__main__":
    end_with(int(sys.argv[2]), signal.SIGKILL)
    with Connection(int(sys.argv[1])) as _connection:
        _serve(_connection)
    sys.stdout.flush()
    os._exit(0)  # skips destructors, which hang or abort on a poisoned CUDA context
