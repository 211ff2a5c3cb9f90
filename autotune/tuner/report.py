"""The rows of a GPU's report: what the database holds of it, with the trials that are here and peers' times from `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping, Sequence

from ..core.gpu import Gpu
from ..core.measurement import OUTCOMES
from ..core.problem import OPS
from ..core.reading import ReadError, load_yaml, printable, read_text
from ..database import view
from ..kernels import kernel_of
from . import TuneError, insight
from .page import Row
from .storages import StoreError

MOST_BYTES = 8 << 20  # of a result file


def rows_of(gpu: Gpu, trials: str | None = None, benches: Sequence[Path] = ()) -> tuple[list[Row], list[str]]:
    """(a row for each recorded problem, by its text; notes on what could not be read).

    `trials`: the storage that has them, a folder (None: the user's) or a URL. `benches`: result files of `autotune bench --out`.
    Raises `TuneError` for one that is none.
    """
    peers = _peers(gpu, benches)
    with_trials, notes = set(insight.known_problems(gpu, trials)), []
    views = [view.open_view(gpu, op) for op in OPS]
    rows = []
    for record in sorted((record for opened in views for record in opened.records), key=lambda record: record.problem.text):
        problem, facts = record.problem, {}
        if problem in with_trials:
            try:
                told = insight.told(problem, gpu, trials)
            except StoreError as error:
                notes.append(str(error))
            else:
                mine = told.trials.get(kernel_of(record.config), [])
                facts = {"outcomes": {name: told.outcomes[name] for name in OUTCOMES if told.outcomes[name]},
                         "gains": insight.history(mine), "importance": insight.importance(kernel_of(record.config), mine)}
        roofline = gpu.roofline_us(problem.flops, problem.compulsory_bytes, problem.dtype != "fp32")
        rows.append(Row(problem.text, record.evidence, record.config.text, record.time_us, roofline, record.default_time_us,
                        peers.get(problem.text, {}), **facts))
    return rows, [*notes, *dict.fromkeys(complaint for opened in views for complaint in opened.complaints)]


def _peers(gpu: Gpu, paths: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Problem -> peer -> time in us, of result files of this GPU."""
    found: dict[str, dict[str, float]] = {}
    for path in paths:
        try:
            data = load_yaml(read_text(path, MOST_BYTES))
        except (ReadError, FileNotFoundError) as error:
            raise TuneError(f"{path}: {error}") from None
        if not isinstance(data, Mapping) or not isinstance(data.get("problems"), Mapping):
            raise TuneError(f"{path} is no result file of `autotune bench --out`: it has no problems")
        if data.get("gpu") != gpu.name:
            raise TuneError(f"{path} is of {printable(str(data.get('gpu'))[:60])}, not of {gpu.name}")
        for problem, facts in data["problems"].items():
            for name, entry in (facts.items() if isinstance(facts, Mapping) else ()):
                time_us = entry.get("time_us") if isinstance(entry, Mapping) else None
                if name != "autotune" and type(time_us) in (int, float) and time_us > 0:
                    found.setdefault(str(problem), {})[str(name)] = float(time_us)
    return found
