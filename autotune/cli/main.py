"""The command line: `autotune COMMAND ...`. Parses, runs one module of `commands/`, and turns errors into one sentence.

Exit codes: 0 done; 1 the answer is no (a wrong kernel, a stale entry, a failed check); 2 bad input or something missing
that the command needs, with nothing written; 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import NoReturn, Sequence

from .. import __version__
from ..core.reading import printable
from .streams import Stopped, prepared, say

# In the order in which a newcomer meets them. Each is a module of `commands` with SUMMARY, add_arguments(parser), run(args).
COMMANDS = ("tune", "worker", "why", "report", "lookup", "source", "verify", "bench", "build", "db", "gpus", "doctor")

# Errors of this package whose message is a sentence for the user. Anything else is a bug and keeps its traceback.
USER_ERRORS = frozenset((
    "AttentionError", "BenchError", "CacheError", "CompileError", "CompilerMissing", "ConfigError", "DatabaseError",
    "DtypeMissing", "GpuError", "HostFault", "LaunchError", "LockError", "ModelError", "NoKernelError", "ProblemError",
    "RecordError", "StoreError", "ToolMissing", "TuneError", "UsageError", "WorkerError", "WorkloadError",
))


# Limits of a process or machine that are no fault of the input, and what helps.
_LIMITS = {errno.EMFILE: "raise the limit of open files (ulimit -n)", errno.ENFILE: "close files of other processes",
           errno.EAGAIN: "raise the limit of processes (ulimit -u)", errno.ENOMEM: "end other processes",
           errno.ENOSPC: "free some space, or set TMPDIR to a folder that has it", errno.EDQUOT: "free some space, or set TMPDIR",
           errno.EFBIG: "raise the limit of a file's size (ulimit -f)"}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no problem at its hyphens: it could not be copied then."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one sentence and the command that explains the allowed arguments."""

    def parse_known_args(self, args=None, namespace=None):
        """Refuses what is left over, so that the innermost command speaks and names its own help."""
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def parser() -> argparse.ArgumentParser:
    """The whole command line as an argparse parser."""
    top = Parser(prog="autotune", description="Finds, remembers and runs the fastest correct attention kernel for a GPU.")
    top.add_argument("--version", action="version", version=f"autotune {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name in COMMANDS:
        module = importlib.import_module(f".{name}", __package__)
        sub = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__,
                                  formatter_class=HelpFormatter)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    with prepared():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    name = "autotune"
    if sys.stdout is None:  # the shell has closed it (>&-), and whatever file is opened next would take its place
        say(f"{name}: standard output is closed; redirect it to /dev/null if it is not wanted")
        return 2
    plain, warnings.formatwarning = warnings.formatwarning, _warning_line
    try:
        try:
            args = parser().parse_args(arguments)
            name = f"autotune {args.command}"
            code = args.run(args)
        except SystemExit as stop:  # of argparse, which has said why
            code = stop.code
        sys.stdout.flush()
        return code
    except Stopped as stopped:
        say(f"\n{name}: ended by {stopped}")
        return stopped.code
    except KeyboardInterrupt:
        say(f"\n{name}: interrupted")
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        _drop_stdout()
        return 0
    except Exception as error:
        if is_user_error(error):
            say(f"{name}: {_one_line(error)}")
        elif isinstance(error, OSError) and not _stdout_works():
            say(f"{name}: standard output cannot be written: {error.strerror or error}")
        elif isinstance(error, MemoryError):
            say(f"{name}: there is not enough memory; end other processes, or raise the limit (ulimit -v)")
        elif isinstance(error, (OSError, RuntimeError)) and (limit := _limit(error)):
            say(f"{name}: {limit}")
        else:
            raise
        return 2
    finally:
        warnings.formatwarning = plain


def _limit(error: OSError | RuntimeError) -> str:
    """The sentence for a limit of this process or machine, "" for any other error."""
    if isinstance(error, OSError) and error.errno in _LIMITS:
        return f"{error.strerror}: {error.filename or 'a process or a file'}; {_LIMITS[error.errno]}"
    return f"{error}; raise the limit of processes (ulimit -u)" if "start new thread" in str(error) else ""


def _stdout_works() -> bool:
    """Whether standard output takes an empty line. If not, it is dropped."""
    try:
        print(flush=True)
        return True
    except OSError:
        _drop_stdout()
        return False


def _drop_stdout() -> None:
    """Points standard output elsewhere, so that exit does not flush into what refuses it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_user_error(error: Exception) -> bool:
    """Whether `error` is one whose message is meant for the user. By name, so that no module is loaded to ask."""
    return any(cls.__module__.startswith("autotune.") and cls.__name__ in USER_ERRORS for cls in type(error).__mro__)


def _warning_line(message, category, filename, lineno, line=None) -> str:
    """A warning as a sentence. Where in the code it was raised is for people who write code, so other packages keep it."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        return printable(f"autotune: {' '.join(str(message).split())}") + "\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
