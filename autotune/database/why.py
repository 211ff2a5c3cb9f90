"""Why a `Match` is what it is, in full: for `explain` and `autotune lookup --why`."""

from __future__ import annotations

from ..core.problem import Problem
from ..kernels import KERNELS, kernel_of
from .expect import Expectation
from .lookup import Match, ranking

TIERS = {
    "exact": "a record of this problem's bucket of sizes on this GPU",
    "near": "the config with the least time to expect of those timed on this GPU for the same head dims and mask",
    "same_arch": "the same of those timed on other GPUs of the same architecture",
    "default": "nothing that was measured helps, so this is the default of the first kernel that can serve it",
}
EVIDENCE = {
    "measured": "timed on the GPU",
    "stale": "timed with an older version of the kernel: today's source compiles to other machine code",
    "other_toolkit": "timed with another version of NVRTC than the one here",
    "predicted": "never timed: an estimate from what the compiler said, or no record at all",
}
SHOWN = 3  # runners-up


def passed_over(match: Match) -> dict[str, str]:
    """Kernel -> why it does not run, for each of the same operation that is preferred to the one that does."""
    chosen, reasons = kernel_of(match.config), {}
    for kernel in KERNELS.values():
        if kernel is chosen:
            break
        if kernel.op != match.problem.op:
            continue
        reasons[kernel.name] = kernel.reject(match.problem, match.gpu) or \
            "it can serve this, but the database has a faster config"
    return reasons


def _cuts(match: Match, problem: Problem) -> list[str]:
    """How a decode kernel cuts the keys of sequences whose lengths the device has, and of full ones side by side."""
    kernel = kernel_of(match.config)
    full, others = (str(kernel.launches(problem, match.config, uniform)) for uniform in (True, False))
    if problem.kv == "paged" or problem.packed:
        return [others]
    return [f"full sequences: {full}", f"with cache_seqlens: {others}"]


def lines(match: Match, problem: Problem) -> list[tuple[str, str]]:
    """(name, text) for each thing to know about `match`, what lookup says of `problem`, most telling first."""
    evidence = EVIDENCE[match.evidence]
    if match.evidence == "measured" and (match.source or match.record.problem.static == match.problem.static):
        evidence += ", and the config compiles to the same machine code today"
    rows = [("tier", f"{match.tier}: {TIERS[match.tier]}"), ("evidence", f"{match.evidence}: {evidence}")]
    if match.expected:
        rows.append(("expected", _expected(match.expected)))
    rows.append(("slowdown", f"{match.promise} above a config tuned for this problem is to be expected"))
    rows += [("refused", f"{name}: {reason}") for name, reason in passed_over(match).items()]
    if match.problem.op == "decode":
        rows += [("splits", text) for text in _cuts(match, problem)]
    family = kernel_of(match.config).family(match.config)
    others = [other for other in ranking(match.problem, match.gpu) if kernel_of(other.config).family(other.config) != family]
    rows += [("next", f"{_expected(other)}: {other.config}") for other in others[:SHOWN]]
    return rows


def _expected(expectation: Expectation) -> str:
    """Time, where it is from, and what is charged for doubt."""
    doubt = expectation.charged_us / expectation.time_us - 1
    timed = f"timed on {expectation.nearest} and others, weight {expectation.support:.2f}" if expectation.nearest else \
        "never timed on a problem like this"
    return (f"{expectation.time_us:.4g} us (its own account says {expectation.account_us:.4g}; {timed}), and {100 * doubt:.1f} % "
            "for doubt")
