"""What a tune says while it runs: one status line, rewritten on a terminal, printed now and then otherwise."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from typing import TextIO

from ..core.config import Config
from ..core.measurement import Measurement

PLAIN_SECONDS = 5.0  # between status lines when the output is not a terminal
TERMINAL_SECONDS = 0.1


class Progress:
    """Progress over `total` problems, written to `stream` (stderr by default). `seconds` is the guess for one problem."""

    def __init__(self, total: int, seconds: float, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._total = total
        self._guess = seconds
        self._done = 0
        self._began = self._problem_began = time.monotonic()
        self._last = float("-inf")
        self.outcomes: Counter[str] = Counter()
        self._best: tuple[float, Config] | None = None

    def problem(self, name: str) -> None:
        """A new problem begins."""
        self._problem_began = time.monotonic()
        self.outcomes, self._best = Counter(), None
        self.say(f"[{self._done + 1}/{self._total}] {name}")

    def known(self, count: int) -> None:
        """`count` configs were measured by an earlier run."""
        if count:
            self.say(f"  {count} configs known from an earlier run")

    def trial(self, config: Config, measurement: Measurement) -> None:
        """One more config is done."""
        self.outcomes[measurement.outcome] += 1
        if measurement.outcome == "ok" and (self._best is None or measurement.time_us < self._best[0]):
            self._best = measurement.time_us, config
        self._status()

    def predicted(self, config: Config, time_us: float) -> None:
        """One more config is compiled, with this estimate."""
        self.outcomes["estimated"] += 1
        if self._best is None or time_us < self._best[0]:
            self._best = time_us, config
        self._status()

    def finished(self, line: str) -> None:
        """The problem at hand is done; `line` says what came out."""
        self._done += 1
        self.say(f"  {line}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self._clear()
        print(line, file=self._stream, flush=True)

    def _status(self) -> None:
        now = time.monotonic()
        if now - self._last < (TERMINAL_SECONDS if self._live else PLAIN_SECONDS):
            return
        self._last = now
        text = "  " + self.status(now)
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[K" + text[:width])
            self._stream.flush()
        else:
            print(text, file=self._stream, flush=True)

    def status(self, now: float) -> str:
        """``34 configs: ok 30, spilled 4; best 1234.5 us (0a1b2c3d); at most 1 min 20 s left``"""
        counts = ", ".join(f"{outcome.replace('_', ' ')} {count}" for outcome, count in self.outcomes.most_common())
        best = f"best {self._best[0]:.1f} us ({self._best[1].digest})" if self._best else "none works yet"
        count, left = self.outcomes.total(), duration(self.seconds_left(now))
        return f"{count} {'config' if count == 1 else 'configs'}: {counts}; {best}; at most {left} left"

    def seconds_left(self, now: float) -> float:
        """From the pace of the problems done, or else from the guess; the problem at hand counts by its configs."""
        if self._done:
            each = (self._problem_began - self._began) / self._done
        else:
            each = self._guess
        here = max(each - (now - self._problem_began), 0.0)
        return here + each * (self._total - self._done - 1)

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")


def duration(seconds: float) -> str:
    """``45 s``, ``2 min 5 s``, ``1 h 10 min``"""
    seconds = int(seconds + 0.5)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
