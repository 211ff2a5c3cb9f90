"""Are the kernels that serve a problem right? Each config is compiled, launched on the GPU and judged by `check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from ..calls import binding, decoding, gradients, packed
from ..cuda import compile
from .. import kernels
from ..device import launch
from .checkers import check_launch
from ..core.config import Config
from ..core.gpu import Gpu, detect
from .inputs import Inputs
from ..kernels.forward.base import TENSORS
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

    if problem.op == "backward":
        return gradients.runner(problem, config, binary, device)
    if problem.op == "decode":
        return decoding.runner(problem, config, binary, device)
    if problem.packed:
        return packed.runner(problem, config, binary, device)
    loaded = launch.load(binary, device)
    launches = [loaded.bound(step).launch for step in kernels.kernel_of(config).plan(problem, config)]
    fields, packer, idle, workspace = binding.bind(problem, config, detect(device).sms)
    counter = cupy.zeros(1, cupy.uint32)
    space = cupy.empty(workspace * problem.batch * problem.seqlen_q, cupy.float32)
    sizes = problem.batch, problem.seqlen_q, problem.seqlen_k

    def run(inputs: Inputs, out, lse) -> None:
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out}
        pointers = [arrays[name].data.ptr for name in TENSORS]
        pointers += [0 if array is None else array.data.ptr for array in (lse, inputs.sinks)]
        strides = [stride // array.itemsize for array in arrays.values() for stride in array.strides[:3]]
        slopes = () if inputs.alibi_slopes is None else (inputs.alibi_slopes.data.ptr, inputs.slopes_batch_stride)
        if lse is not None:
            space.fill(cupy.nan)
        grids, values, draws = fields(*sizes, (*pointers, *strides), inputs.scale, 0, slopes)
        values = *values, *((counter.data.ptr,) if draws else idle), *((space.data.ptr,) if workspace else ())
        stream = cupy.cuda.get_current_stream().ptr
        for launch_step, grid in zip(launches, grids):
            launch_step(grid, stream, packer, values)
        if lse is not None and draws and int(counter[0]):
            raise launch.LaunchError(f"{config} left its counter at {int(counter[0])}, not 0, so the next launch would be wrong")

    return run


def configs(problem: Problem, gpu: Gpu) -> list[Config]:
    """What may run for `problem` on `gpu`: what lookup chooses, then the default of every kernel that can serve it.

    Raises `NoKernelError` if none can.
    """
    from ..database.lookup import lookup

    chosen = [lookup(problem, gpu).config]
    chosen += [kernel.default(problem, gpu) for kernel in kernels.candidates(problem, gpu)]
    return list(dict.fromkeys(chosen))
