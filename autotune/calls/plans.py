"""From a problem to something that can be launched: `Plan`, made once for each bucket of problems and device.

A miss costs a lookup, and perhaps a compile and a module load; a hit is one dict access.
"""

from __future__ import annotations

import math
import threading
import warnings
from typing import Callable

from .call import Call
from .plan import Plan
from ..device import counters, launch
from ..device.arrays import AttentionError, is_capturing
from ..device.tensormap import Unmappable
from ..core.config import Config, ConfigError
from ..core.gpu import Gpu, detect
from ..kernels import candidates, config_from_text, kernel_of
from ..database.lookup import OF_DEFAULT, QUICK_TUNE_S, TIERS, Match, NoKernelError, lookup, of_bucket
from ..core.problem import Problem

WORTH_SAYING = 1.05  # bound of the slowdown
MAX_PLANS = 4096  # a plan is small; its module stays loaded when it goes, for a captured graph may hold it

_plans: dict[tuple, Plan] = {}
repeatable: dict[tuple, list] = {}  # what `calls.again` keeps, which refers to plans
_binaries: dict[tuple, object] = {}  # (static, what of the config is compiled in, device) -> Binary
_told: set[tuple] = set()
_retired: dict[str, int] = {}  # tier -> calls of plans that are no longer kept
_lock = threading.RLock()

find = _plans.get  # the plan of a key, or None: the warm path


class UntunedWarning(UserWarning):
    """A call is served by the nearest known config, because its problem has not been tuned on this GPU."""


def plan_of(call: Call) -> Plan:
    """The plan that serves `call`, for which `find` knows none: made, unless another thread was quicker. Raises as `make`
    does."""
    return make(call.problem(), call.device, is_capturing(call.stream), call.config)


def run(plan: Plan, call: Call) -> None:
    """Launches `call`, with the plan that takes its arrays if `plan` cannot."""
    try:
        plan.run(call)
        call.plan = plan
    except Unmappable:  # strides of 0 or below, which only TMA refuses: asked afterwards, it costs others nothing
        without_maps(plan, call.device, is_capturing(call.stream)).run(call)


def make(problem: Problem, device: int, capturing: bool = False, config: Config | str | None = None) -> Plan:
    """The plan for `problem` on CUDA device `device`, compiled and loaded if need be, and kept; with `config`, or else with what
    lookup chooses.

    Raises `AttentionError` if no kernel, or not this config, can serve it, or if `capturing` and something would have to be
    loaded.
    """
    problem = problem.simplified()
    key = Call.of(problem, device, config).key()
    with _lock:
        plan = _plans.get(key)
        if plan is None:
            gpu = detect(device)
            match = match_for(problem, gpu, of_bucket) if config is None else match_of(problem, config, gpu)
            plan = Plan(*_load(match, device, capturing), resize=config is None)
            if config is None:
                _tell(plan.match)
            while len(_plans) >= MAX_PLANS:
                _retire(_plans.pop(next(iter(_plans))))
                repeatable.clear()
            _plans[key] = plan
    return plan


def op_of(config: Config | str) -> str:
    """The operation that a config's kernel computes. Raises `AttentionError` for text that is no config."""
    return kernel_of(_config(config)).op


def _config(config: Config | str) -> Config:
    try:
        return config_from_text(str(config))
    except ConfigError as error:
        raise AttentionError(f"{error}; `autotune lookup` prints configs as they are written") from None


def match_of(problem: Problem, config: Config | str, gpu: Gpu) -> Match:
    """The match of a config that the caller chose. Raises `AttentionError` unless it can serve."""
    config = _config(config)
    kernel = kernel_of(config)
    if reason := kernel.reject(problem, gpu) or kernel.illegal(problem.static, config, gpu):
        raise AttentionError(f"config {config} cannot serve {problem} on {gpu.name}: {reason}")
    return Match(config, "exact", "predicted", problem, gpu)


def without_maps(plan: Plan, device: int, capturing: bool = False) -> Plan:
    """The plan for arrays that `plan`'s tensor maps cannot describe, compiled and loaded if need be, and kept with `plan`.

    Raises `AttentionError` as `make` does.
    """
    with _lock:
        if plan.unmapped is None:
            match = match_without_maps(plan.match.problem, plan.match.gpu)
            plan.unmapped = Plan(*_load(match, device, capturing, "make this call once, with arrays of these strides,"))
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


def match_for(problem: Problem, gpu: Gpu, choose: Callable[[Problem, Gpu], Match] = lookup) -> Match:
    """What `choose` says, with an `AttentionError` where no kernel can serve."""
    try:
        return choose(problem, gpu)
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
    if not capturing:
        counters.set_aside(device)
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
