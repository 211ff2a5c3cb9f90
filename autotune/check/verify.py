"""Are the kernels that serve a problem right? Each config is compiled, launched on the GPU and judged by `check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from ..calls.call import Call
from ..calls.plan import Plan, place
from .calls import call_of, parts_of
from ..cuda import compile
from .. import kernels
from ..device import launch
from .checkers import check_launch
from ..core.config import Config
from ..core.gpu import Gpu, detect
from ..database.lookup import Match
from ..core.problem import Problem

SAMPLED_ABOVE_FLOPS = 1e12  # beyond this, a float64 reference of every block takes minutes
SAMPLE = 256  # (batch, head, 64 rows) blocks that are checked then


@dataclass(frozen=True)
class Result:
    """What came of one config. `worst_ratio` is error / allowed error; `message` says what is wrong, or "" if nothing is."""

    config: Config
    ok: bool
    worst_ratio: float
    message: str = ""


def verify(problem: Problem, config: Config, gpu: Gpu, seed: int = 0, device: int = 0) -> Result:
    """Checks `config` for `problem` on CUDA device `device`, which is a `gpu`, on every kind of inputs.

    A config that does not compile, spills or cannot be launched is a wrong result like any other. Raises `CompilerMissing`.
    """
    import cupy

    try:
        binary = compile.build(problem.static, config, gpu)
        if flaw := compile.flaw(binary):
            return Result(config, False, float("inf"), f"{flaw[0]}: {flaw[1]}")
        with cupy.cuda.Device(device):
            run = runner(problem, config, binary, device)
            sample = SAMPLE if problem.flops > SAMPLED_ABOVE_FLOPS else None
            verdict = check_launch(run, problem, seed=seed, xp=cupy, sample=sample)
    except (compile.CompileError, launch.LaunchError, cupy.cuda.runtime.CUDARuntimeError) as error:
        return Result(config, False, float("inf"), str(error))
    return Result(config, verdict.ok, verdict.worst_ratio, verdict.message)


def runner(problem: Problem, config: Config, binary, device: int) -> Callable:
    """``run(inputs, out, lse)``: launches `config`'s plan on CuPy arrays, on CuPy's current stream. `lse` may be None. Where it
    is asked for, which is when results are checked, the workspace is poisoned first and the counter must come back to 0."""
    import cupy

    plan = Plan(Match(config, "default", "predicted", problem, detect(device)), launch.load(binary, device))
    spaces: dict[int, object] = {}
    counters = cupy.zeros(0, cupy.uint32)

    def run(given, results, lse) -> None:
        nonlocal counters
        checked = lse is not None or problem.op == "backward"

        def lend(call: Call, *_) -> None:
            nonlocal counters
            floats = sum(floats + -floats % 4 for _, floats in call.lent)
            if floats:
                space = spaces.get(floats)
                if space is None:
                    space = spaces[floats] = cupy.empty(floats, cupy.float32)
                if checked:
                    space.fill(cupy.nan)
                place(call, space.data.ptr)
            if call.counters:
                if counters.size < call.counters:
                    counters = cupy.zeros(call.counters, cupy.uint32)
                call.tickets = counters.data.ptr

        inputs, arrays = parts_of(problem, given, results, lse)
        call = call_of(problem, inputs, arrays, lambda name, array: array.data.ptr)
        call.stream = cupy.cuda.get_current_stream().ptr
        plan.run(call, lend)
        if checked and call.counters and bool(counters.any()):
            raise launch.LaunchError(f"{config} left counters that are not 0 behind, so the next launch would be wrong")

    return run


def configs(problem: Problem, gpu: Gpu) -> list[Config]:
    """What may run for `problem` on `gpu`: what lookup chooses, then the default of every kernel that can serve it.

    Raises `NoKernelError` if none can.
    """
    from ..database.lookup import lookup

    chosen = [lookup(problem, gpu).config]
    chosen += [kernel.default(problem, gpu) for kernel in kernels.candidates(problem, gpu)]
    return list(dict.fromkeys(chosen))
