"""What a model or a workload comes down to, shown before anything is tuned: kinds of layers, what is left out, problems."""

from __future__ import annotations

from typing import Iterable

from ..core.problem import Problem
from ..core.reading import printable
from ..core.tables import table


def model_text(model) -> str:
    """The kinds of layers of a `Model`, a line each, what is left out and which parts of its file were not read."""
    rows = [(layers.name, layers.layers, f"{kind.heads_q} over {kind.heads_kv}", _dims(kind), kind.features, len(layers.problems),
             len(layers.decode)) for layers in model.attention for kind in (layers.kind,)]
    lines = [f"{model.title}: {model.layers} layers attend ({model.source})",
             table(("layers", "count", "heads", "head dim", "mask and features", "prompts", "decode steps"), rows)]
    lines += model.left_out
    if model.unread:
        lines.append(f"not read, models of their own: {', '.join(model.unread)}")
    return printable("\n".join(lines))


def workload_text(workload) -> str:
    """The groups of a `Workload`, with the number of problems of each."""
    return printable("\n".join([f"{workload.title}: {len(workload.problems)} problems",
                                table(("group", "problems"), [(name, len(group)) for name, group in workload.groups.items()])]))


def problems_text(problems: Iterable[Problem]) -> str:
    """Every problem on a line."""
    listed = [str(problem) for problem in problems]
    return "\n".join([f"{len(listed)} problem{'s' * (len(listed) != 1)} to tune:", *(f"  {text}" for text in listed)])


def _dims(kind) -> str:
    return str(kind.head_dim) if kind.head_dim == kind.head_dim_v else f"{kind.head_dim}, values {kind.head_dim_v}"
