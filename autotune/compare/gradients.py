"""The part of `bench` that times a backward: ours and the peers' through torch's autograd, on the same tensors and gradients.

Each has done its forward before; what is timed is `torch.autograd.grad`, with whatever kernels a library runs before and after
its main one. Without torch ours is launched alone.
"""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

import cupy

from ..calls.dense import attention, prepare
from ..calls.varlen import attention_varlen
from ..check.gradients import GradientInputs, Gradients, expect_gradients, units
from ..check.gradverdict import SAMPLED_FLOPS, compare_gradients
from ..check.numerics import array_dtype
from ..check.verdict import Verdict
from ..check.verify import runner
from ..core.gpu import Gpu
from ..core.problem import Problem
from ..timing.bench import Bench, Candidate
from .comparison import OURS, Row
from .peers import Peer

Backward = Callable[[int], tuple]  # of input set i: (dq, dk, dv), and of ours with sinks dsinks


def measure_backward(problem: Problem, peers: Sequence[Peer], gpu: Gpu, run) -> tuple[Row | None, list[tuple[str, str]]]:
    """`run.measure_row` for a backward problem; `run` is that module, which knows torch and how rounds are dealt out.

    Raises what `prepare` raises.
    """
    match = prepare(problem)[0]
    bench = Bench(problem, gpu)
    given = bench.sets[0].inputs
    failed, functions, verdicts = [], {}, {}
    with run._stream(bench.stream):
        run._round_sinks(given.inputs)
        expected = [expect_gradients(given, *unit) for unit in units(given.inputs, SAMPLED_FLOPS)]

        def take(name: str, make: Callable[[], Backward]) -> str:
            """Takes part if it is right; else why not."""
            function = make()
            verdict = compare_gradients(given, _as_gradients(function(0), problem, run.torch), expected)
            if not (verdict.ok if name == OURS else verdict.worst_ratio <= run.OTHER_RESULT):
                return verdict.message
            functions[name], verdicts[name] = function, verdict
            return ""

        if wrong := take(OURS, lambda: _ours(problem, bench, run) if run.torch else _alone(problem, match.config, bench)):
            return None, [(OURS, f"our result is wrong: {wrong}")]
        for peer in peers:
            try:
                served, note = peer.serves(problem)
                wrong = f"it has {note}" if note else take(peer.name, lambda: _recorded(
                    bench, run, peer.make(served, run._as_torch(given.inputs.sinks, "fp32") if served.sinks else None,
                                          run._places(given.inputs))))
                failed += [(peer.name, f"it computes something else: {wrong}")] if wrong else []
            except Exception as error:  # another library's: whatever it raises, it does not take part
                failed.append((peer.name, f"it fails: {(str(error).strip() or type(error).__name__).splitlines()[0]}"))
        timings = _timed(problem, gpu, bench, functions, verdicts, run)
    return Row(problem, match.config, f"{match.tier}, {match.evidence}", timings.pop(OURS), timings, match.why), failed


def _timed(problem: Problem, gpu: Gpu, bench: Bench, functions: Mapping[str, Backward], verdicts: Mapping[str, Verdict],
           run) -> dict:
    candidates = [run._candidate(bench, name, function) for name, function in functions.items()]
    rounds, runs = run._rounds(problem, gpu, len(candidates)), []
    for n in range(run.RUNS):
        order: list[Candidate] = candidates if n % 2 == 0 else candidates[::-1]
        runs.append(dict(zip((candidate.name for candidate in order), bench.interleave(order, rounds))))
    return {name: run._timing([each[name] for each in runs], verdicts[name].worst_ratio, 0, "") for name in functions}


def _alone(problem: Problem, config, bench: Bench) -> Backward:
    """Ours without torch."""
    from ..cuda.compile import build

    launch = runner(problem, config, build(problem.static, config, bench.gpu), 0)

    def backward(i: int) -> tuple:
        launch(bench.sets[i].inputs, bench.sets[i].out, None)
        return bench.sets[i].out

    return backward


def _ours(problem: Problem, bench: Bench, run) -> Backward:
    given = bench.sets[0].inputs
    sinks, slopes = (array if array is None else run._as_torch(array, "fp32")
                     for array in (given.inputs.sinks, given.inputs.alibi_slopes))
    sinks = sinks if sinks is None else sinks.requires_grad_()
    options = dict(**problem.bounds.arguments, softcap=problem.softcap, sinks=sinks,
                   alibi_slopes=slopes)
    places = run._places(given.inputs)
    if problem.kv == "varlen":
        backward = _recorded(bench, run, lambda q, k, v: attention_varlen(q[0], k[0], v[0], **options, **places)[None], sinks)
    else:
        backward = _recorded(bench, run, lambda q, k, v: attention(q, k, v, **options), sinks)
    return _alike(run.torch, backward) if problem.deterministic else backward


def _alike(torch, backward: Backward) -> Backward:
    """`backward` as it is under torch's deterministic setting, without what that writes to memory that is not initialised."""
    def alike(i: int) -> tuple:
        filled = torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            return backward(i)
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(False)

    return alike


def _recorded(bench: Bench, run, function: Callable, sinks=None) -> Backward:
    """The backward of `function`(q, k, v) on every input set, each with a forward that has been done."""
    torch, dtype = run.torch, bench.problem.dtype
    graphs = []
    with torch.enable_grad():
        for item in bench.sets:
            given: GradientInputs = item.inputs
            inputs = [run._as_torch(array, dtype).detach().requires_grad_()
                      for array in (given.inputs.q, given.inputs.k, given.inputs.v)]
            graphs.append((function(*inputs), inputs + ([] if sinks is None else [sinks]), run._as_torch(given.dout, dtype)))

    def backward(i: int) -> tuple:
        out, inputs, dout = graphs[i]
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return backward


def _as_gradients(found: tuple, problem: Problem, torch) -> Gradients:
    """What was found as CuPy arrays. A peer's are judged without sinks."""
    cupy.cuda.get_current_stream().synchronize()
    if isinstance(found, Gradients):
        return found
    whole = [cupy.asarray(each.contiguous().view(torch.int16)).view(array_dtype(problem.dtype)) for each in found[:3]]
    return Gradients(*whole, cupy.asarray(found[3]) if len(found) > 3 else None)
