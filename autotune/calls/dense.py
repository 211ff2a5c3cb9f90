"""Attention on CuPy, torch and DLPack arrays: what callers import.

    out = attention(q, k, v, causal=True)             # q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)

A call never tunes and never measures. It looks up the best config known for the bucket of its sizes, compiles and loads it
the first time, and from then on costs the host a few microseconds, also when sizes change with every call.
"""

from __future__ import annotations

from ..device import launch
from .. import kernels
from . import again, plans
from .arguments import (UNREADABLE, bounds_of, check_out, describe, number, positive_scale, read_sinks, read_slopes, records,
                        refuse_config, sentence)
from .call import Call
from ..device.arrays import LIBRARIES, OTHER, AttentionError, library_of
from ..core.gpu import Gpu, detect, resolve
from ..database.lookup import Match
from .plans import UntunedWarning
from ..core.masks import CAUSAL, FULL
from ..core.problem import OPS, Problem, as_problems

__all__ = ["AttentionError", "UntunedWarning", "attention", "prepare", "source"]

NO_WINDOW, NO_PREFIX = (None, None), 0


def attention(q, k, v, *, causal=False, window=NO_WINDOW, prefix=NO_PREFIX, scale=None, softcap=0.0, sinks=None,
              alibi_slopes=None, return_lse=False, out=None, config=None):
    """softmax(scale * q k^T, masked) v on the arrays' GPU and their library's current stream.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), all of one dtype (bfloat16, float16 or float32), Hq a multiple of
    Hkv; returns out (B, Sq, Hq, Dv) of the same dtype and library, and with `return_lse` also lse (B, Hq, Sq) float32, the
    natural logarithm of each row's denominator.

    Query i sees key j iff i + Sk - Sq - left <= j <= i + Sk - Sq + right, where `window` is (left, right), inclusive, ints of
    at least 0 or None for no bound; `causal` makes right 0. With `causal` and no window, every query also sees the first
    `prefix` keys, an int, the same for all batch entries: a prefix LM's mask. `scale` is 1/sqrt(D) unless given. `sinks`
    (Hq,), of any float dtype, is one logit a head that joins the denominator only. With `alibi_slopes` (Hq,) or (B, Hq), of
    any float dtype, a score loses slope * |i + Sk - Sq - j|; with `softcap` above 0 it is softcap * tanh(score / softcap)
    before that. A row that sees no key gives 0, and -inf (or its sink) as lse. A V that is not finite may reach rows of its
    block of queries from which it is hidden; a K never does.

    Strides are free: an array whose last stride is not 1, or whose address or strides are not multiples of 16 bytes where
    the kernel needs that, is copied; for strides of 0 or below a kernel may have to run that is not the fastest (`explain` says
    both). `out`, if given, is written and returned; it must not overlap inputs. `config`, a `Config` or its line of text, is what
    runs instead of what lookup chooses.

    Raises `AttentionError` (a ValueError) or `ProblemError` with the argument that is wrong, `CompilerMissing` or
    `CompileError` when the kernel must be compiled and cannot be, `LaunchError` if the driver refuses. Warns once for each
    kind of problem that was never tuned on this GPU. While a CUDA graph is captured the kernel must already be loaded:
    `prepare` does that.
    """
    library = LIBRARIES.get(type(q)) or library_of(q)
    if library is OTHER:
        return _through_cupy((q, k, v), dict(
            causal=causal, window=window, prefix=prefix, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            return_lse=return_lse, out=out, config=config))
    if library.traced():
        refuse_config(config)
        return library.ops.attention(
            q, k, v, causal=causal,
            window=window, prefix=prefix, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            return_lse=return_lse, out=out)
    form = None
    if sinks is alibi_slopes is config is None and window is NO_WINDOW and prefix is NO_PREFIX and not return_lse:
        form, result = again.launch(library, "forward", q, k, v, None, None, None, out, None, None, causal, scale, softcap)
        if result is not None:
            return result
    read = library.read
    try:
        q_pointer, (batch, seqlen_q, heads_q, head_dim), q0, q1, q2, q3, dtype, device = read(q)
        k_pointer, (batch_k, seqlen_k, heads_kv, head_dim_k), k0, k1, k2, k3, dtype_k, device_k = read(k)
        v_pointer, (batch_v, seqlen_v, heads_v, head_dim_v), v0, v1, v2, v3, dtype_v, device_v = read(v)
        if not (batch == batch_k == batch_v and seqlen_k == seqlen_v and heads_kv == heads_v and not heads_q % heads_kv
                and head_dim == head_dim_k and dtype == dtype_k == dtype_v and device == device_k == device_v >= 0):
            raise AttentionError("q, k and v do not fit together")
        dtype_name = library.dtypes[dtype]
    except UNREADABLE as error:
        raise sentence(describe, error, q, k, v, bounds_of(causal, window, prefix), softcap, sinks, alibi_slopes) from None
    if window is NO_WINDOW and prefix is NO_PREFIX:
        bounds = CAUSAL if causal and seqlen_q > 1 else FULL
    else:
        bounds = bounds_of(causal, window, prefix).simplified(seqlen_q, seqlen_k)
    if library.grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or sinks is not None or out is not None
                                   or alibi_slopes is not None or library.forward_mode()):
        if records(library, q, k, v, sinks, alibi_slopes, out):
            from .autograd import attend  # with it comes torch

            return attend(attention, library, q, k, v, (), None, bounds=bounds, scale=scale, softcap=softcap, sinks=sinks,
                          alibi_slopes=alibi_slopes, return_lse=return_lse, out=out, config=config)
    if out is not None:
        check_out(library, out, (batch, seqlen_q, heads_q, head_dim_v), dtype, device)
    if type(softcap) is not float:
        softcap = number(softcap)
    call = Call()
    call.plan = call.params = None
    call.op, call.kv = "forward", "dense"
    call.library, call.device, call.config = library, device, config
    call.dtype = call.kv_dtype = dtype_name
    call.page_size, call.deterministic = 0, False
    call.heads_q, call.heads_kv, call.head_dim, call.head_dim_v = heads_q, heads_kv, head_dim, head_dim_v
    call.bounds, call.softcap = bounds, softcap
    call.batch = batch
    call.seqlen_q = call.longest_q = seqlen_q
    call.seqlen_k = call.longest_k = seqlen_k
    call.sinks = call.sink_dtype = call.alibi_slopes = 0
    if sinks is not None:
        sinks = read_sinks(call, sinks)
    if alibi_slopes is not None:
        alibi_slopes = read_slopes(call, alibi_slopes)
    if not (batch and seqlen_q and seqlen_k):
        return _empty(library, q, k, v, (batch, seqlen_q, heads_q, head_dim_v), bounds, scale, softcap, sinks, alibi_slopes,
                      return_lse, out)
    call.stream = library.stream(device)
    plan = plans.find(call.key()) or plans.plan_of(call)

    if scale is None:
        call.scale = plan.scale
    else:
        call.scale, negative = positive_scale(scale)
        if negative:
            q = library.negated(q)
            q_pointer, _, q0, q1, q2, q3, _, _ = read(q)
    aligned = plan.aligned
    if q3 != 1 or k3 != 1 or v3 != 1 or aligned and (
            (q_pointer | k_pointer | v_pointer) & 15 or (q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2) & 7):
        q, (q_pointer, _, q0, q1, q2, q3, _, _) = suited(library, q, aligned)
        k, (k_pointer, _, k0, k1, k2, k3, _, _) = suited(library, k, aligned)
        v, (v_pointer, _, v0, v1, v2, v3, _, _) = suited(library, v, aligned)
    call.like, call.q, call.k, call.v = q, q_pointer, k_pointer, v_pointer
    call.q_batch_stride, call.q_row_stride, call.q_head_stride = q0, q1, q2
    call.k_batch_stride, call.k_row_stride, call.k_head_stride = k0, k1, k2
    call.v_batch_stride, call.v_row_stride, call.v_head_stride = v0, v1, v2
    target = out
    if out is None or unsuited(read(out), aligned):
        o2 = head_dim_v
        o1 = heads_q * o2
        o0 = seqlen_q * o1
        target = library.dense(q, device, (batch, seqlen_q, heads_q, head_dim_v), (o0, o1, o2, 1))
        call.out = library.pointer(target)
    else:
        call.out, _, o0, o1, o2, _, _, _ = read(out)
    call.out_batch_stride, call.out_row_stride, call.out_head_stride = o0, o1, o2
    if return_lse:
        lse = library.empty_float32(q, (batch, heads_q, seqlen_q))
        call.lse = library.pointer(lse)
    else:
        call.lse = 0
    plans.run(plan, call)
    if out is None:
        out = target
    elif target is not out:
        library.assign(out, target)
    if form is not None:
        again.keep(form, call, q, k, v, None, None, None, out)
    return (out, lse) if return_lse else out


def prepare(problems, gpu: Gpu | str | int | None = None) -> list[Match]:
    """Compiles ahead what `problems` need, in threads, and loads it, so that no later call waits and a graph can be captured.

    `problems` is a `Problem`, its text, a list of problems and texts, or a model, for which it is all that serving takes
    (`models.serving`): a name (`autotune tune --model`), a config.json, or a model or config of transformers. A prepared
    problem stands for its whole bucket of sizes. `gpu` is a CUDA device index (None: the current one); a `Gpu` or a name from
    the catalogue fills the cache folder only, and needs no GPU. Returns the `Match` of each problem.
    Raises `AttentionError` if no kernel can serve one, `ProblemError` or `ModelError` for text that names nothing.
    """
    from concurrent.futures import ThreadPoolExecutor

    wanted, whole = _problems(problems)
    wanted = [problem.simplified() for problem in wanted]
    device = None
    if gpu is None:
        detect()  # says what is missing, if anything is
        device = launch.current_device()
    elif isinstance(gpu, int):
        device = gpu
    model = _gpu(gpu) if device is None else detect(device)
    matches = [plans.match_for(problem, model) for problem in wanted]
    distinct = {(match.problem.static, kernels.kernel_of(match.config).compile_key(match.config)): match for match in matches}
    with ThreadPoolExecutor() as pool:
        list(pool.map(plans.build, distinct.values()))
    if device is None:
        return matches
    if whole:  # its thousands of sizes would not all be kept: what takes time is a kernel's module, and there are some dozens
        for match in distinct.values():
            plans.make(match.problem, device)
        return matches
    return [plans.make(problem, device).match.at(problem) for problem in wanted]


def source(problem: Problem | str, config: kernels.Config | str | None = None, gpu: Gpu | str | None = None) -> str:
    """The CUDA source that computes `problem`: complete, and what is compiled.

    With the config that `lookup` chooses, unless one is given as a `Config` or its line of text. `gpu` is a `Gpu`, a name from
    the catalogue, or None for the GPU at hand. Raises `AttentionError` if no kernel, or not this config, can serve.
    """
    from ..cuda.render import render

    problem, = as_problems([problem])
    problem, gpu = problem.simplified(), _gpu(gpu)
    config = plans.match_for(problem, gpu).config if config is None else kernels.config_from_text(str(config))
    kernel = kernels.kernel_of(config)
    if reason := kernel.reject(problem, gpu) or kernel.illegal(problem.static, config, gpu):
        raise AttentionError(f"config {config} cannot serve {problem} on {gpu.name}: {reason}")
    return render(problem.static, config, kernel.target(gpu))


def unsuited(view: tuple, aligned: bool) -> str | None:
    """Why a kernel cannot read or write an array in place, given what its library's `read` returned, or None."""
    pointer, shape, *strides = view[:6]
    used = [stride for stride, size in zip(strides[:3], shape) if size > 1]  # the stride of a size of 1 means nothing
    if strides[3] != 1 and shape[3] > 1:
        return f"its last stride is {strides[3]}, not 1"
    if aligned and pointer % 16:
        return "its address is not a multiple of 16 bytes"
    if aligned and any(stride % 8 for stride in used):
        return f"its strides {tuple(strides)} are not multiples of 8 elements"
    return None


def suited(library, array, aligned: bool) -> tuple:
    """(array or a packed copy that a kernel can read in place, what `read` says of it)."""
    view = library.read(array)
    if unsuited(view, aligned):
        array = library.packed(array)
        view = library.read(array)
    return array, view


def _empty(library, q, k, v, shape, bounds, scale, softcap, sinks, alibi_slopes, return_lse, out):
    """The result where there is no query or no key: nothing to launch."""
    describe(q, k, v, bounds, softcap, sinks, alibi_slopes, out)
    if scale is not None:
        positive_scale(scale)
    out = library.empty(q, shape) if out is None else out
    if 0 not in shape:
        library.zero(out)
    if not return_lse:
        return out
    lse = library.empty_float32(q, (shape[0], shape[2], shape[1]))
    if 0 not in shape[:3]:
        library.fill_lse(lse, sinks)
    return out, lse


def _through_cupy(inputs: tuple, keywords: dict):
    """`attention` on arrays that only speak DLPack, with results in their library."""
    like, out = inputs[0], keywords["out"]
    for name in ("sinks", "alibi_slopes", "out"):
        keywords[name] = OTHER.if_given(keywords[name], name)
    results = attention(*(OTHER.to_cupy(array, name) for array, name in zip(inputs, "qkv")), **keywords)
    if keywords["return_lse"]:
        return (OTHER.from_cupy(results[0], like) if out is None else out), OTHER.from_cupy(results[1], like)
    return OTHER.from_cupy(results, like) if out is None else out


def _problems(problems) -> tuple[list[Problem], bool]:
    """(problems, whether they are all of a model's)"""
    texts = [problems] if isinstance(problems, (str, Problem)) else problems
    if isinstance(texts, (list, tuple)) and all(isinstance(one, Problem) or isinstance(one, str) and one.partition("-")[0] in OPS
                                                for one in texts):
        return as_problems(problems), False
    from ..models.serving import problems_of

    return problems_of(problems), True


def _gpu(gpu: Gpu | str | None) -> Gpu:
    return detect() if gpu is None else resolve(gpu)
