"""The text of ``generated/<gpu>.md``: what was measured to be fastest on a GPU, a row a problem. And of which of these problems
generated/ shows the source."""

from __future__ import annotations

import re
from typing import Iterable

from ..core.gpu import Gpu
from ..core.masks import KINDS
from ..core.problem import Problem, Static
from ..database.record import Record
from ..kernels import default_config, kernel_of
from ..kernels.base import Kernel

HEAD = """\
`autotune source PROBLEM --gpu {name}` prints the source of a row, `autotune tune --problem PROBLEM` on this GPU measures it
again. Times are medians in microseconds. "Gain" is how many times as fast as the default of that day the winner was, in the
same session; of a winner that is the default today it says so and claims nothing. "Of" is how many configs were measured,
"ties" how many others were as fast within noise.
"""


def text_of(folder: str, gpu: Gpu, records: Iterable[Record], mark: str) -> str:
    """Markdown about `records`, all of `gpu`, with `mark` in its first line. `folder` is that of their file in the database."""
    by_kernel: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: (record.config.kernel, _natural(record.problem.text))):
        by_kernel.setdefault(record.config.kernel, []).append(record)
    tables = [_table(kernel_of(group[0].config), gpu, group) for group in by_kernel.values()]
    return "\n".join([f"<!-- {folder}; {mark} from tuning_db/ -->\n# Winners on {folder}\n", HEAD.format(name=gpu.name), *tables])


def _table(kernel: Kernel, gpu: Gpu, records: list[Record]) -> str:
    values = {parameter.name: [_value(record.config[parameter.name]) for record in records] for parameter in kernel.parameters}
    names = [name for name, those in values.items() if len(set(those)) > 1]
    common = ", ".join(f"{name} {those[0]}" for name, those in values.items() if name not in names)
    kinds = sorted({kind_of(record.problem.static) for record in records})
    sources = ", ".join(f"[{kind}]({kernel.name}-{kind}.cu)" for kind in kinds)
    rows = [_row(["problem", "us", "gain", "of", "ties", "date", *names]), _row(["---"] * (6 + len(names)))]
    for n, record in enumerate(records):
        rows.append(_row([record.problem.text, f"{record.time_us:.6g}", _gain(record, gpu), record.trials, len(record.ties),
                          record.date[:10], *(values[name][n] for name in names)]))
    return f"## {kernel.name}\n\nSources: {sources}\n\nIn all rows: {common or 'nothing'}\n\n{''.join(rows)}"


def kind_of(static: Static) -> str:
    """What sources of a kernel differ in most: where keys come from, and their dtype if it is not one of 16 bits; ``paged-e4m3``.
    Sources of one kind differ in numbers, and by the lines of a mask, a soft cap or ALiBi."""
    return static.kv if static.kv_dtype in ("bf16", "fp16") else f"{static.kv}-{static.kv_dtype}"


def telling(problem: Problem) -> tuple:
    """Sort key. Of a kind's problems the last has most to show: its mask counts first, in the order of `KINDS` (none, causal,
    window, prefix), then a soft cap, ALiBi and sinks; of equals the largest is last."""
    return (list(KINDS).index(problem.mask), problem.softcap > 0, problem.alibi, problem.sinks, problem.flops, problem.text)


def _gain(record: Record, gpu: Gpu) -> str:
    if record.evidence != "measured":
        return record.evidence
    if record.config == default_config(record.problem, gpu):
        return "the default"
    return f"{record.speedup:.3f}" if record.speedup else "-"


def _value(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _row(cells: list) -> str:
    return f"|{'|'.join(map(str, cells))}|\n"


def _natural(text: str) -> list:
    """Sort key by which q8192 comes before q16384."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
