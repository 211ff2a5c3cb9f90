"""`prepare`, which may also measure: what a server calls before it serves."""

from __future__ import annotations

from ..calls import dense
from ..core.gpu import Gpu
from ..database.lookup import Match, lookup


def prepare(problems, gpu: Gpu | str | int | None = None, measure: bool = False) -> list[Match]:
    """Compiles ahead what `problems` need, in threads, and loads it, so that no later call waits and a graph can be captured.

    `problems` is a `Problem`, its text, a list of problems and texts, or a model, for which it is all that serving takes
    (`models.serving`): a name (`autotune tune --model`), a config.json, or a model or config of transformers. A prepared
    problem stands for its whole bucket of sizes. `gpu` is a CUDA device index (None: the current one); a `Gpu` or a name from
    the catalogue fills the cache folder only, and needs no GPU. Returns the `Match` of each problem.

    With `measure`, problems that were not measured on this GPU are timed first with the few configs that should be fastest, half
    a second each once these are compiled, and the winners stay in the user's database: for a list of problems, not a model.
    Raises `AttentionError` if no kernel can serve one, `ProblemError` or `ModelError` for text that names nothing, and with
    `measure` what `autotune.tune` raises.
    """
    if measure:
        from ..core.gpu import detect
        from ..core.problem import as_problems
        from ..device.launch import current_device
        from . import TuneError, tune

        if not isinstance(gpu, (int, type(None))):
            raise TuneError(f"gpu is {gpu!r}; measuring needs a GPU that is here: give its CUDA index, or None for the current "
                            "one")
        device = current_device() if gpu is None else gpu
        here = detect(device)
        unknown = [problem for problem in as_problems(problems) if problem.flops and not _measured(lookup(problem, here))]
        if unknown:
            tune([problem.simplified().bucketed() for problem in unknown], effort="instant", device=device)
    return dense.prepare(problems, gpu)


def _measured(match: Match) -> bool:
    return match.tier == "exact" and match.evidence == "measured"
