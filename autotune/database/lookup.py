"""From a problem to the config that is fastest here as far as is known: `lookup`, which answers with a `Match` that says how good
the answer is.

Which config answers is a function of the problem's bucket, so that growing lengths stay warm; what of it follows from sizes is
chosen for those of the problem. A warm lookup is one dict access on a tuple of plain values, and reads no file. Cold, a record of
the bucket serves if there is one. Else the configs of the static part's cover, or those of its records, and the default, with
what follows from sizes chosen for these, are compared by the time to expect (`expect`).
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from functools import cached_property

from ..core.config import Config, ConfigError
from ..core.gpu import Gpu, detect, resolve
from ..core.problem import Problem
from ..kernels import KERNELS, default_config
from .expect import DOUBT, Expectation, over_bucket
from .known import Known, loss_to_expect
from .record import Record

TIERS = ("exact", "near", "same_arch", "default")
EVIDENCE = ("measured", "stale", "other_toolkit", "predicted")

# (slowdown to expect, its bound) where nothing that was measured says better, in units of the time of a config tuned here.
OF_EXACT = 1.0, 1.03
OF_DEFAULT = 1.10, 1.6
OTHER_GPU = 1.05
SLOWDOWN_OF_EVIDENCE = {"measured": 0.0, "other_toolkit": 0.02, "stale": 0.05, "predicted": 0.15}

QUICK_TUNE_S = 60  # what `tune --effort quick` takes at most for one problem
MAX_MATCHES = 4096  # per GPU; a match is small, but lengths and windows come from callers
MAX_TABLES = 64

_log = logging.getLogger("autotune")


class NoKernelError(ValueError):
    """No kernel can serve a problem on a GPU; the message has every kernel's reason."""


@dataclass(frozen=True)
class Match:
    """The config to run, and how it is known.

    `problem` is the representative of the bucket that was asked for. `record` is the record that the config is from, `source`
    the first digits of the hash of its source if it is from a cover; both are empty for a default. `slowdown` is the time to
    expect in units of the time of a config tuned here (1.0: none to expect), `bound` what it stays under for 19 problems of 20.
    Both come from leaving out what was measured. `expected` is what was expected of the config when it was chosen, None if it
    was not chosen by that.
    """

    config: Config
    tier: str
    evidence: str
    problem: Problem
    gpu: Gpu
    record: Record | None = None
    slowdown: float = 1.0
    bound: float = 1.0
    source: str = ""
    expected: Expectation | None = None

    @property
    def sized_for(self) -> Problem:
        """Whose sizes the config suits, in what of it follows from sizes, where the match is of a whole bucket (`of_bucket`)."""
        return self.record.problem.simplified() if self.tier == "exact" and self.record else self.problem

    def at(self, problem: Problem) -> Match:
        """This match of a bucket for one problem of it: what of the config follows from sizes suits those of `problem`."""
        kernel = KERNELS[self.config.kernel]
        values = kernel.resized(self.sized_for, self.config, self.gpu)(problem.batch, problem.seqlen_q, problem.seqlen_k)
        config = kernel.with_sized(self.problem.static, self.config, values)
        return self if config == self.config else replace(self, config=config)

    @property
    def tune_command(self) -> str:
        """The command that would make this match exact and measured."""
        return f"autotune tune --problem {self.problem.text}"

    def confirmed(self, binary) -> Match:
        """This match with its evidence checked against `binary`, which is today's build of its config.

        What was measured of another cubin and another source is "stale", or "other_toolkit" if that is because NVRTC differs.
        """
        record = self.record
        if self.source:
            same = binary.source_sha256.startswith(self.source) or self.problem.static != self.problem.static.in_bf16
            evidence = self.evidence if same else "stale"
        elif record is None or record.evidence == "predicted":
            return self
        else:
            same = record.is_of(binary) if record.problem.static == self.problem.static else self._is_todays_source()
            evidence = "measured" if same else \
                "stale" if _minor(binary.nvrtc) == _minor(record.nvrtc) else "other_toolkit"
        change = SLOWDOWN_OF_EVIDENCE[evidence] - SLOWDOWN_OF_EVIDENCE[self.evidence]
        return replace(self, evidence=evidence, slowdown=self.slowdown + change, bound=self.bound + change)

    def _is_todays_source(self) -> bool:
        """Whether templates give the record's source: asked of one of the other 16-bit dtype, whose binary is not built here."""
        from ..cuda.compile import source_sha256

        record = self.record
        if KERNELS[record.config.kernel].compile_key(record.config) != KERNELS[self.config.kernel].compile_key(self.config):
            return False
        return record.source_sha256 == source_sha256(record.problem.static, record.config, self.gpu)

    @property
    def promise(self) -> str:
        """What to expect, as people say it."""
        return f"about {100 * (self.slowdown - 1):.0f} %, at most {100 * (self.bound - 1):.0f} %"

    @cached_property
    def why(self) -> str:
        """A few sentences for people: where the config is from, what to expect, and what would improve it."""
        if not self.problem.flops:
            return f"{self.tier}: no query of {self.problem} sees a key, so there is nothing to compute and nothing to tune."
        record, expected = self.record, self.expected
        if self.tier == "exact" and record is None:
            return "exact, predicted: the caller chose this config, so nothing was looked up."
        if self.tier == "exact":
            text = f"exact, {self.evidence}: {_known(record, self.gpu)} {self.problem}{_doubt(self)}."
        elif self.tier == "default":
            text = f"default: nothing measured suits {self.problem} on {self.gpu.name}, so this is the kernel's default."
        else:
            where = "" if self.tier == "near" else ", on another GPU of the same arch"
            beside = f"; the nearest that was timed with it is {expected.nearest}" if expected and expected.nearest else ""
            text = (f"{self.tier}, {self.evidence}: of the configs timed for problems like {self.problem}{where}, this should be "
                    f"fastest here, {_us(expected.time_us)} us{beside}{_doubt(self)}.")
        if self.slowdown > 1 or self.bound > OF_EXACT[1]:
            text += f" Expect {self.promise} above a config tuned for this problem."
        if self.tier != "exact" or self.evidence != "measured":
            text += f" `{self.tune_command}` finds the best (at most {QUICK_TUNE_S} s)."
        return text


def _doubt(match: Match) -> str:
    return _DOUBT[match.evidence].format(nvrtc=match.record.nvrtc if match.record else "another version")


_DOUBT = {"measured": "", "predicted": ", never measured", "stale": ", with an older version of the kernel's source",
          "other_toolkit": ", compiled by NVRTC {nvrtc}, which is not the one here"}


def _known(record: Record, gpu: Gpu) -> str:
    if record.evidence == "predicted":
        return f"estimated at {_us(record.time_us)} us, the best of {record.trials} compiled, for"
    gain = ""
    if record.speedup and record.config != default_config(record.problem, gpu):  # defaults move to where winners are
        gain = f", {record.speedup:.2f} x as fast as the default of {record.date[:10]}"
    equals = f", {len(record.ties)} within noise of it" if record.ties else ""
    return f"the winner of {record.trials} measured ({_us(record.time_us)} us{gain}{equals}) for"


def _us(time_us: float) -> str:
    """4 digits, as people write them."""
    return f"{time_us:.4g}" if time_us < 1000 else f"{time_us:.0f}"


# The warm path

_TABLES: dict[int, _Table] = {}  # by id of the Gpu, which its table keeps alive: hashing a Gpu costs more than a lookup


def lookup(problem: Problem | str, gpu: Gpu | str | None = None) -> Match:
    """The best config known for `problem` on `gpu` (a name from the catalogue will do; None: the GPU at device 0).

    The same for every problem of a bucket, but for launch parameters that follow from sizes. Reads the database on the first call
    for a GPU, and never again until `refresh`. Raises `NoKernelError` if no kernel can serve the problem, `GpuError` if there is
    no GPU and none is named or known, and `ProblemError` if `problem` is text that names none.
    """
    if gpu is None:
        gpu = detect()
    try:
        return _TABLES[id(gpu)].matches[problem.values]
    except AttributeError:
        return lookup(Problem.parse(problem), gpu)
    except KeyError:
        return _cold(problem, gpu)


def ranking(problem: Problem, gpu: Gpu) -> list[Expectation]:
    """What to expect of every config that `lookup` compares for `problem` on `gpu`, best first."""
    return _table(gpu).compared(problem.simplified().bucketed())[0]


def refresh() -> None:
    """Forgets what was read, so that the next lookup reads the database again. For after a tuning run in this process."""
    _TABLES.clear()


def _table(gpu: Gpu) -> _Table:
    table = _TABLES.get(id(gpu))
    if table is None:
        if len(_TABLES) >= MAX_TABLES:
            _TABLES.clear()
        table = _TABLES[id(gpu)] = _Table(gpu)
    return table


def _cold(problem: Problem | str, gpu: Gpu | str) -> Match:
    if not isinstance(problem, Problem):
        return lookup(Problem.parse(problem), gpu)
    if not isinstance(gpu, Gpu):
        return lookup(problem, resolve(gpu))
    match, table = of_bucket(problem, gpu).at(problem), _table(gpu)
    if len(table.matches) >= MAX_MATCHES:
        table.matches.clear()
    table.matches[problem.values] = match
    return match


def of_bucket(problem: Problem, gpu: Gpu) -> Match:
    """What serves all problems of the bucket of `problem`: `lookup` is this `at` one of them. Raises `NoKernelError`."""
    table, bucket = _table(gpu), problem.simplified().bucketed()
    match = table.of_buckets.get(bucket)
    if match is None:
        try:
            match = table.best(bucket)
        except NoKernelError:
            try:
                default_config(problem.simplified(), gpu)
            except ConfigError as error:  # the same of the problem as it was asked for, whose sizes people know
                raise NoKernelError(str(error)) from None
            raise
        if len(table.of_buckets) >= MAX_MATCHES:
            table.of_buckets.clear()
        table.of_buckets[bucket] = match
    return match


# Choosing


class _Table:
    """What is known for one GPU."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self.matches: dict[tuple, Match] = {}  # by exact sizes
        self.of_buckets: dict[Problem, Match] = {}  # by the problem that represents it
        self._known: dict = {}  # by static part in bf16

    def known(self, problem: Problem) -> Known:
        """What was measured of a static part, read at first use. Complains of what cannot be used."""
        static = problem.static.in_bf16
        if static not in self._known:
            self._known[static] = known = Known(self.gpu, static)
            if known.complaints:
                _log.warning("%d part(s) of the tuning database cannot be used; `autotune db check` says which and why. "
                             "The first: %s", len(known.complaints), known.complaints[0])
        return self._known[static]

    def best(self, problem: Problem) -> Match:
        """The best match for `problem`, which is simplified and bucketed."""
        known = self.known(problem)
        record = known.exact(problem)
        if record and record.evidence == "measured":
            return self._exact(problem, record)
        found, foreign = self.compared(problem)
        if record and not known.points and not foreign:
            return self._exact(problem, record)
        assert found, f"the default of {problem} is not legal on {self.gpu.name}"
        chosen = found[0]
        if chosen.nearest is None and chosen.source is None:
            return Match(chosen.config, "default", "predicted", problem, self.gpu, None, *OF_DEFAULT, "", chosen)
        record = chosen.source if isinstance(chosen.source, Record) else None
        source = chosen.source if isinstance(chosen.source, str) else ""
        evidence = self._evidence(record.nvrtc if record else known.nvrtc, record.evidence if record else "measured")
        slowdown, bound = loss_to_expect(known, found)
        change = SLOWDOWN_OF_EVIDENCE[evidence]
        factor = OTHER_GPU if foreign else 1.0
        return Match(chosen.config, "same_arch" if foreign else "near", evidence, problem, self.gpu, record,
                     slowdown * factor + change, bound * factor + change, source, chosen)

    def compared(self, problem: Problem) -> tuple[list[Expectation], bool]:
        """(what to expect of every config, whether only what was measured on other GPUs speaks)."""
        known = self.known(problem)
        foreign = not known.points and bool(known.foreign_points)
        points, configs = (known.foreign_points, known.foreign_configs) if foreign else (known.points, known.configs)
        doubt = DOUBT["cover" if known.covers else "records"]
        return over_bucket(problem, self.gpu, points, [*configs, (self._default(problem), None)], doubt), foreign

    def _exact(self, problem: Problem, record: Record) -> Match:
        evidence = self._evidence(record.nvrtc, record.evidence)
        change = SLOWDOWN_OF_EVIDENCE[evidence]
        return Match(record.config, "exact", evidence, problem, self.gpu, record, OF_EXACT[0] + change, OF_EXACT[1] + change)

    def _evidence(self, nvrtc: str, evidence: str) -> str:
        other = evidence == "measured" and nvrtc and (here := _toolkit_here()) and _minor(nvrtc) != here
        return "other_toolkit" if other else evidence

    def _default(self, problem: Problem) -> Config:
        try:
            return default_config(problem, self.gpu)
        except ConfigError as error:
            raise NoKernelError(str(error)) from None


def _minor(version: str) -> str:
    """"13.0" of "13.0.88": patch releases of one minor version are pinned together, and a difference shows in the cubin."""
    return ".".join(version.split(".")[:2])


def _toolkit_here() -> str:
    """Minor version of the NVRTC here, "" if none was loaded so far: that takes a second, and `Match.confirmed` knows it."""
    compile = sys.modules.get(f"{__package__.partition('.')[0]}.cuda.compile")
    try:
        return _minor(compile.nvrtc_version()) if compile and compile.nvrtc_loaded() else ""
    except compile.CompilerMissing:
        return ""
