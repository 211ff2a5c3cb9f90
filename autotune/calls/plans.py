"""From a problem to something that can be launched: `Plan`, made once for each bucket of problems and device.

A miss costs a lookup, and perhaps a compile and a module load; a hit is one dict access.
"""

from __future__ import annotations

import math
import threading
import warnings

from . import binding, decoding, gradients, packed
from ..device import launch, counters
from ..device.arrays import AttentionError, is_capturing
from ..core.gpu import Gpu, detect
from ..kernels import candidates, kernel_of
from ..database.lookup import OF_DEFAULT, QUICK_TUNE_S, TIERS, Match, NoKernelError, lookup
from ..core.problem import Problem, bucket_batch, bucket_length

WORTH_SAYING = 1.05  # bound of the slowdown
MAX_PLANS = 4096  # a plan is small; its module stays loaded when it goes, for a captured graph may hold it

_plans: dict[tuple, Plan] = {}
_binaries: dict[tuple, object] = {}  # (static, what of the config is compiled in, device) -> Binary
_told: set[tuple] = set()
_retired: dict[str, int] = {}  # tier -> calls of plans that are no longer kept
_lock = threading.RLock()

find = _plans.get  # the plan of a key, or None: the warm path


class UntunedWarning(UserWarning):
    """A call is served by the nearest known config, because its problem has not been tuned on this GPU."""


class Plan:
    """A kernel, its config and its loaded binary, for every problem of one bucket on one device."""

    __slots__ = ("match", "kernel", "scale", "aligned", "unmapped", "calls", "_fields", "_packer", "_idle", "_workspace",
                 "_launches")

    def __init__(self, match: Match, loaded: launch.Loaded):
        problem, config = match.problem, match.config
        self.match, self.kernel = match, kernel_of(config)
        self.scale = problem.head_dim**-0.5
        self.aligned = self.kernel.aligned
        self.calls = 0  # for `stats`
        self.unmapped: Plan | None = None  # what runs instead for arrays that the kernel's tensor maps cannot describe
        self._fields, self._packer, self._idle, self._workspace = binding.bind(problem, config, match.gpu.sms)
        self._launches = tuple(loaded.bound(step).launch for step in self.kernel.plan(problem, config))

    def run(self, batch: int, seqlen_q: int, seqlen_k: int, library, like, device: int, stream: int, arrays: tuple, scale: float,
            sink_dtype: int, slopes: tuple = ()) -> None:
        """Launches on `stream` for exact sizes, which must be of this plan's bucket.

        `arrays` and `slopes` are what `binding.Binding` takes. A counter and workspace, if they are needed, come from `library`,
        for the device of `like`; the workspace may be used again once the call has returned, by later work on the stream. Raises
        `tensormap.Unmappable` for arrays that this plan's kernel cannot take in place; `without_maps` has the plan that can.
        """
        grids, values, draws = self._fields(batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes)
        if draws:
            pointer, keep = counters.take(library, like, device, stream, 1, is_capturing(stream))
            values = *values, pointer
        else:
            values += self._idle
        if self._workspace:
            space = library.workspace(like, self._workspace * batch * seqlen_q, is_capturing(stream))
            values = *values, library.pointer(space)
        for launch_step, grid in zip(self._launches, grids):
            launch_step(grid, stream, self._packer, values)
        self.calls += 1


def key_of(problem: Problem, device: int) -> tuple:
    """The key of `problem`'s bucket. `attention` writes the same tuple out, without a Problem."""
    p = problem.simplified()
    if p.op == "decode":
        return decoding.key_of(p, device)
    if p.op == "backward":
        return gradients.key_of(p, device)
    if p.packed:
        return packed.key_of(p, device)
    return (device, p.dtype, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v, p.window_left, p.window_right, float(p.softcap),
            p.alibi, p.sinks, bucket_batch(p.batch), bucket_length(p.seqlen_q), bucket_length(p.seqlen_k))


def make(problem: Problem, device: int, capturing: bool = False) -> Plan:
    """The plan for `problem` on CUDA device `device`, compiled and loaded if need be, and kept.

    Raises `AttentionError` if no kernel can serve it, or if `capturing` and something would have to be loaded.
    """
    problem = problem.simplified()
    key = key_of(problem, device)
    with _lock:
        plan = _plans.get(key)
        if plan is None:
            match = match_for(problem, detect(device))
            kind = gradients.BackwardPlan if problem.op == "backward" else decoding.DecodePlan if problem.op == "decode" else packed.PackedPlan if problem.packed else Plan
            plan = kind(*_load(match, device, capturing))
            _tell(plan.match)
            while len(_plans) >= MAX_PLANS:
                _retire(_plans.pop(next(iter(_plans))))
            _plans[key] = plan
    return plan


def without_maps(plan: Plan, device: int, capturing: bool = False) -> Plan:
    """The plan for arrays that `plan`'s tensor maps cannot describe, compiled and loaded if need be, and kept with `plan`.

    Raises `AttentionError` as `make` does.
    """
    with _lock:
        if plan.unmapped is None:
            match = match_without_maps(plan.match.problem, plan.match.gpu)
            plan.unmapped = type(plan)(*_load(match, device, capturing, "make this call once, with arrays of these strides,"))
    return plan.unmapped


def stats() -> dict[str, int]:
    """How many calls of this process each tier of lookup has served: tier -> calls that were launched, "exact" first.

    Replays of a captured graph are not calls. Threads that call at the very same time may be counted as one.
    """
    with _lock:
        counts = dict.fromkeys(TIERS, 0) | _retired
        for plan in _plans.values():
            _count(plan, counts)
    return counts


def _count(plan: Plan, counts: dict[str, int]) -> None:
    for served in filter(None, (plan, plan.unmapped)):
        counts[served.match.tier] = counts.get(served.match.tier, 0) + served.calls


def _retire(plan: Plan) -> None:
    """Keeps the count of a plan that is dropped."""
    _count(plan, _retired)


def match_without_maps(problem: Problem, gpu: Gpu) -> Match:
    """The default of the best kernel that reads arrays of any strides. Raises `AttentionError` if there is none."""
    for kernel in candidates(problem, gpu):
        if not kernel.mapped:
            return Match(kernel.default(problem, gpu), "default", "predicted", problem, gpu, None, *OF_DEFAULT)
    raise AttentionError(f"no kernel for {problem} on {gpu.name} reads arrays with strides that are 0 or negative")


def match_for(problem: Problem, gpu: Gpu) -> Match:
    """`lookup`, with an `AttentionError` where no kernel can serve."""
    try:
        return lookup(problem, gpu)
    except NoKernelError as error:
        raise AttentionError(str(error)) from None


def build(match: Match):
    """The binary of `match`'s config for its GPU. Compiles if the cache folder lacks it."""
    from ..cuda.compile import build as compile_or_read  # with it comes Jinja: not for the warm path

    return compile_or_read(match.problem.static, match.config, match.gpu)


def _load(match: Match, device: int, capturing: bool, remedy: str = "") -> tuple[Match, launch.Loaded]:
    problem = match.problem
    kernel = kernel_of(match.config)
    key = match.problem.static, kernel.name, kernel.compile_key(match.config), device
    binary = _binaries.get(key)
    if capturing and not (binary and launch.ready(binary, device, kernel.plan(problem, match.config))):
        remedy = remedy or f"call autotune.prepare({problem.text!r})"
        raise AttentionError(f"the kernel for {problem} is not loaded on device {device}, and loading it now would break the "
                             f"CUDA graph being captured; {remedy} before the capture")
    if binary is None:
        binary = _binaries[key] = build(match)
    return match.confirmed(binary), launch.load(binary, device)


def _tell(match: Match) -> None:
    """Says once for each kind of problem and GPU that calls are served by a config that was not tuned for them."""
    if match.bound <= WORTH_SAYING or match.tier == "exact" and match.evidence == "measured" or not match.problem.flops:
        return
    kind = match.problem.static, match.gpu.name
    if kind in _told:
        return
    _told.add(kind)
    slower = f"; expect {match.promise} above a tuned config"
    warnings.warn(
        f"autotune: {match.problem} is not tuned on {match.gpu.name}; it runs with a config that is {match.tier}, "
        f"{match.evidence}{slower}. `{match.tune_command}` tunes it in at most {math.ceil(QUICK_TUNE_S / 60)} min. "
        "Said once for each dtype, head dim and mask.", UntunedWarning, stacklevel=5)
