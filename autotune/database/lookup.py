"""From a problem to the best config known for it: `lookup`, which answers with a `Match` that says how good the answer is.

The answer is a function of the problem's bucket, so that growing lengths stay warm: a warm lookup is one dict access on a
tuple of plain values, and reads no file. Cold, the records of the search path are ranked: measured before predicted, then
by tier, then by the slowdown to expect against a config tuned for this very problem.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from . import view
from ..core.config import Config, ConfigError
from ..core.gpu import Gpu, detect, resolve
from ..kernels import KERNELS, default_config
from ..core.problem import Problem
from .record import Record

TIERS = ("exact", "near", "same_arch", "default")
EVIDENCE = ("measured", "stale", "other_toolkit", "predicted")

# Priors of the expected slowdown, until the database holds enough to fit them. In a public set of 208 tuned forward shapes
# 4 configs won 155 times, and rows within noise of the winner differ by 0.1 to 2 %: neighbours lose little.
SLOWDOWN_PER_STEP = 0.02  # a step is a doubling of both lengths
SLOWDOWN_OTHER_GPU = 0.05
SLOWDOWN_OF_EVIDENCE = {"measured": 0.0, "other_toolkit": 0.02, "stale": 0.05, "predicted": 0.15}
SLOWDOWN_OF_DEFAULT = 0.10  # where no record of a like problem says better
RADIUS = 4.0  # steps; records farther away say less than the default, whose tile is known good everywhere

QUICK_TUNE_S = 60  # what `tune --effort quick` takes at most for one problem
MAX_MATCHES = 4096  # per GPU; a match is small, but lengths and windows come from callers
MAX_TABLES = 64

_log = logging.getLogger("autotune")


class NoKernelError(ValueError):
    """No kernel can serve a problem on a GPU; the message has every kernel's reason."""


@dataclass(frozen=True)
class Match:
    """The config to run, and how it is known.

    `problem` is the representative of the bucket that was asked for, `record` the record that the config is from (None for
    a default), `distance` how far that record's problem is in steps (0: the same bucket), `slowdown` the time to expect in
    units of the time of a config tuned here (1.0: none to expect).
    """

    config: Config
    tier: str
    evidence: str
    problem: Problem
    gpu: Gpu
    record: Record | None = None
    distance: float = 0.0
    slowdown: float = 1.0

    @property
    def tune_command(self) -> str:
        """The command that would make this match exact and measured."""
        return f"autotune tune --problem {self.problem.text}"

    def confirmed(self, binary) -> Match:
        """This match with its evidence checked against `binary`, which is today's build of its config.

        A record of another cubin and another source is "stale", or "other_toolkit" if that is because NVRTC differs.
        """
        record = self.record
        if record is None or record.evidence == "predicted":
            return self
        same = record.is_of(binary) if record.problem.static == self.problem.static else self._is_todays_source()
        evidence = "measured" if same else \
            "stale" if _minor(binary.nvrtc) == _minor(record.nvrtc) else "other_toolkit"
        change = SLOWDOWN_OF_EVIDENCE[evidence] - SLOWDOWN_OF_EVIDENCE[self.evidence]
        return replace(self, evidence=evidence, slowdown=self.slowdown + change)

    def _is_todays_source(self) -> bool:
        """Whether templates give the record's source: asked of one of the other 16-bit dtype, whose binary is not built here."""
        from ..cuda.compile import sha256_of
        from ..cuda.render import render

        record, target = self.record, KERNELS[self.config.kernel].target(self.gpu)
        return record.source_sha256 == sha256_of(render(record.problem.static, record.config, target))

    @cached_property
    def why(self) -> str:
        """A few sentences for people: where the config is from, what to expect, and what would improve it."""
        if not self.problem.flops:
            return f"{self.tier}: no query of {self.problem} sees a key, so there is nothing to compute and nothing to tune."
        record, percent = self.record, f"{100 * (self.slowdown - 1):.0f} %"
        if record is None:
            text = (f"default: no record suits {self.problem} on {self.gpu.name}, so this is the kernel's default. "
                    f"Expect about {percent} above a config tuned for this problem.")
        else:
            subject = {"exact": f"{self.problem}", "near": f"{record.problem}, {self.distance:.1f} steps away",
                       "same_arch": f"{record.problem} on {record.gpu.name}, another GPU of the same arch"}[self.tier]
            doubt = _DOUBT[self.evidence].format(nvrtc=record.nvrtc)
            text = f"{self.tier}, {self.evidence}: {_known(record)} {subject}{doubt}."
            if self.slowdown > 1:
                text += f" Expect about {percent} above a config tuned for this problem."
        if self.tier != "exact" or self.evidence != "measured":
            text += f" `{self.tune_command}` finds the best (at most {QUICK_TUNE_S} s)."
        return text


_DOUBT = {"measured": "", "predicted": ", never measured", "stale": ", with an older version of the kernel's source",
          "other_toolkit": ", compiled by NVRTC {nvrtc}, which is not the one here"}


def _known(record: Record) -> str:
    if record.evidence == "predicted":
        return f"estimated at {_us(record.time_us)} us, the best of {record.trials} compiled, for"
    gain = f", {record.speedup:.2f} x as fast as the default" if record.speedup else ""
    equals = f", {len(record.ties)} within noise of it" if record.ties else ""
    return f"the winner of {record.trials} measured ({_us(record.time_us)} us{gain}{equals}) for"


def _us(time_us: float) -> str:
    """4 digits, as people write them."""
    return f"{time_us:.4g}" if time_us < 1000 else f"{time_us:.0f}"


# The warm path

_TABLES: dict[int, _Table] = {}  # by id of the Gpu, which its table keeps alive: hashing a Gpu costs more than a lookup


def lookup(problem: Problem | str, gpu: Gpu | str | None = None) -> Match:
    """The best config known for `problem` on `gpu` (a name from the catalogue will do; None: the GPU at device 0).

    The same for every problem of a bucket. Reads the database on the first call for a GPU, and never again until `refresh`.
    Raises `NoKernelError` if no kernel can serve the problem, `GpuError` if there is no GPU and none is named or known, and
    `ProblemError` if `problem` is text that names none.
    """
    if gpu is None:
        gpu = detect()
    table = _TABLES.get(id(gpu))
    try:
        left, right, length_q, length_k = problem.window_left, problem.window_right, problem.seqlen_q, problem.seqlen_k
    except AttributeError:
        return lookup(Problem.parse(problem), gpu)
    if problem.kv == "dense":  # Problem.simplified
        if left is not None and left >= length_k - 1 and problem.op != "decode":
            left = None
        if right is not None and right >= length_q - 1:
            right = None
    batch = problem.batch
    if batch > 1:  # Problem.bucketed; written out because a call costs as much as the arithmetic
        batch = 1 << (batch - 1).bit_length()
    if length_q > 16:
        shift = (length_q - 1).bit_length() - 4
        length_q = ((length_q - 1 >> shift) + 1) << shift
    if length_k > 16:
        shift = (length_k - 1).bit_length() - 4
        length_k = ((length_k - 1 >> shift) + 1) << shift
    key = problem.unsized, left, right, batch, length_q, length_k
    try:
        return table.matches[key]
    except (AttributeError, KeyError):
        return _cold(key, problem, gpu)


def ranking(problem: Problem, gpu: Gpu) -> list[Match]:
    """A match for every record that could serve `problem` on `gpu`, best first: what `lookup` chooses from."""
    return sorted(_table(gpu).matches_of(problem.simplified().bucketed()), key=_rank)


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


def _cold(key: tuple, problem: Problem, gpu: Gpu | str) -> Match:
    if not isinstance(gpu, Gpu):
        return lookup(problem, resolve(gpu))
    table = _table(gpu)
    try:
        match = table.best(problem.simplified().bucketed())
    except NoKernelError:
        try:
            default_config(problem.simplified(), gpu)
        except ConfigError as error:  # the same of the problem as it was asked for, whose sizes people know
            raise NoKernelError(str(error)) from None
        raise
    if len(table.matches) >= MAX_MATCHES:
        table.matches.clear()
    table.matches[key] = match
    return match


# Ranking


class _Table:
    """What is known for one GPU."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self.matches: dict[tuple, Match] = {}
        self.views: dict[str, view.View] = {}

    def view(self, op: str) -> view.View:
        """The records for `op`, read at first use. Complains once of what cannot be used."""
        if op not in self.views:
            self.views[op] = opened = view.open_view(self.gpu, op)
            if opened.complaints:
                _log.warning("%d part(s) of the tuning database cannot be used; `autotune db check` says which and why. "
                             "The first: %s", len(opened.complaints), opened.complaints[0])
        return self.views[op]

    def best(self, problem: Problem) -> Match:
        """The best match for `problem`, which is simplified and bucketed."""
        return min(self.matches_of(problem), key=_rank, default=None) or self._default(problem, self.views[problem.op])

    def matches_of(self, problem: Problem) -> list[Match]:
        """A match for every record that could serve; those of other GPUs only if nothing measured on this one does."""
        view = self.view(problem.op)
        own = list(self._of(problem, view.records, False))
        if all(match.evidence == "predicted" for match in own):
            own += self._of(problem, view.same_arch, True)
        return own

    def _of(self, problem: Problem, records: tuple[Record, ...], foreign: bool) -> Iterator[Match]:
        """A match for each record near enough whose config is legal here, and no worse than a default for sizes like these."""
        for record in records:
            representative = record.problem.simplified().bucketed()
            if representative.static.in_bf16 != problem.static.in_bf16:
                continue
            steps = 0.0 if representative == problem else distance(representative, problem, self.gpu.sms)
            kernel = KERNELS[record.config.kernel]
            if steps > RADIUS or kernel.reject(problem, self.gpu) or kernel.illegal(problem.static, record.config, self.gpu):
                continue
            config = record.config if representative == problem else kernel.adapted(problem, record.config, self.gpu)
            if config is None:
                continue
            evidence = record.evidence
            if evidence == "measured" and (here := _toolkit_here()) and _minor(record.nvrtc) != here:
                evidence = "other_toolkit"
            tier = "same_arch" if foreign else "near" if representative != problem else "exact"
            slowdown = 1 + SLOWDOWN_PER_STEP * steps + SLOWDOWN_OF_EVIDENCE[evidence] + (SLOWDOWN_OTHER_GPU if foreign else 0)
            yield Match(config, tier, evidence, problem, self.gpu, record, steps, slowdown)

    def _default(self, problem: Problem, view: view.View) -> Match:
        try:
            config = default_config(problem, self.gpu)
        except ConfigError as error:
            raise NoKernelError(str(error)) from None
        like = [record for record in view.records if record.speedup and record.problem.static.in_bf16 == problem.static.in_bf16]
        like.sort(key=lambda record: distance(record.problem, problem, self.gpu.sms))
        nearest = next((record for record in like if distance(record.problem, problem, self.gpu.sms) <= RADIUS and
                        record.default_config == _default_of(record, self.gpu)), None)
        slowdown = max(1.0, nearest.speedup) if nearest else 1 + SLOWDOWN_OF_DEFAULT
        return Match(config, "default", "predicted", problem, self.gpu, None, 0.0, slowdown)


def _default_of(record: Record, gpu: Gpu) -> Config | None:
    """The default of a record's problem as it is today; records keep the one that they were compared with."""
    try:
        return default_config(record.problem, gpu)
    except ConfigError:
        return None


def _rank(match: Match) -> tuple:
    return (match.evidence == "predicted", TIERS.index(match.tier), match.slowdown, match.distance,
            match.record.problem != match.problem, match.record.problem.text, match.config.text)


def distance(a: Problem, b: Problem, sms: int) -> float:
    """How unlike two problems of one static part, or of two that differ in which 16 bits they take, are, in steps; one step is a
    doubling of both lengths. A metric."""
    return sum(abs(x - y) for x, y in zip(_features(a, sms), _features(b, sms)))


def _features(problem: Problem, sms: int) -> tuple[float, ...]:
    """Coordinates that choose a config, each in doublings times its weight. Sizes that fill the GPU many times over are alike."""
    def log2(value: float) -> float:
        return math.log2(max(value, 1))

    rows = problem.batch * problem.heads_q * problem.seqlen_q
    keys = problem.visible_pairs / max(problem.seqlen_q, 1)
    windows = (0.0 if width is None else log2(width + 1) for width in (problem.window_left, problem.window_right))
    return (0.5 * log2(min(rows, sms * 128 * 8)),  # blocks: below 8 waves of 128 rows the last wave counts
            0.5 * log2(problem.seqlen_q), 0.5 * log2(keys),
            0.25 * log2(problem.group), *(0.25 * width for width in windows),
            0.25 * log2(problem.page_size), 0.1 * problem.sinks, 0.1 * (problem.dtype == "fp16"))


def _minor(version: str) -> str:
    """"13.0" of "13.0.88": patch releases of one minor version are pinned together, and a difference shows in the cubin."""
    return ".".join(version.split(".")[:2])


def _toolkit_here() -> str:
    """Minor version of the NVRTC here, "" if there is none (then nothing can be compiled, and no record is to blame)."""
    from ..cuda import compile

    try:
        return _minor(compile.nvrtc_version())
    except compile.CompilerMissing:
        return ""
