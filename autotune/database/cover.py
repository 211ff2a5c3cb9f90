"""A cover: the times of a few configs of one static part on a grid of problems, measured on one GPU.

``<folder>/<gpu>/cover/<static part>.yaml``, so that a lookup reads what it needs and nothing else:

    schema: 3
    gpu: {name: nvidia-h200, ...}
    static: forward-bf16-d128-causal
    nvrtc: 13.0.88
    date: 2026-01-31 12:00:00 UTC
    raced: 44                             # configs from which those below were chosen
    parameters: {forward_wgmma: num_warpgroups block_heads ...}
    configs:                              # kernel, its values, the first 12 digits of the hash of its source's code
    - forward_wgmma 2 1 ... 0a5f6e1bd38c
    problems:                             # the least time in us, then how much more each config takes, in thousandths of it;
      b3-h40x8-q1711-k1711-causal: 81.3 0 34 -                            # -: it could not be launched or was not tried

Of a problem's text what all have in common (forward-bf16, d128) does not stand there.
A row is one text, because reading YAML takes time by the value: 2 ms for a cover, where lists of numbers would take 10.
Launch parameters that follow from sizes (`Kernel.fitted`) are those of the sizes that were timed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Mapping, Sequence

from ..core.config import Config, ConfigError
from ..core.gpu import Gpu
from ..core.problem import Problem, ProblemError, Static
from ..kernels import config_from_dict, kernel_of
from . import file
from .record import GpuKey, RecordError
from .view import gpu_of

SCHEMA, WITH_TIMES, WITH_COMMENTS = 3, 2, 1  # before, a row was the times; before that, hashes were of sources with comments
FOLDER = "cover"
FIELDS = {"schema", "gpu", "static", "nvrtc", "date", "parameters", "configs", "problems"}
RACED = "raced"  # since schema 3
NO_LONGER = {"losses"}  # read, and not used
MAX_BYTES, MAX_CONFIGS, MAX_PROBLEMS = 1 << 20, 64, 512
MOST_SHARE = 1e6  # thousandths: a thousand times the least
DIGITS = 12  # of a source's hash
UNKNOWN = "-"  # instead of it
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")


@dataclass(frozen=True)
class Cover:
    """`times[i][j]` is the time of `configs[j]` on `problems[i]` in us, or None. `sources[j]` begins the hash of its source, or
    is `UNKNOWN`."""

    gpu: GpuKey
    static: Static  # in bf16
    configs: tuple[Config, ...]
    sources: tuple[str, ...]
    problems: tuple[Problem, ...]
    times: tuple[tuple[float | None, ...], ...]
    nvrtc: str
    date: str
    raced: int = 0  # configs from which these were chosen; 0: before it was written


def file_of(folder: Path, gpu_name: str, static: Static) -> Path:
    return folder / gpu_name / FOLDER / f"{static.in_bf16.text}.yaml"


def of_static(roots: Iterable[Path], static: Static) -> list[Cover]:
    """The covers of `static` on any GPU that can be read in `roots`."""
    paths = [path for root in roots for path in sorted(Path(root).glob(f"*/{FOLDER}/{static.in_bf16.text}.yaml"))]
    return [found for path in paths if isinstance(found := read(path), Cover)]


def paths(root: Path) -> list[Path]:
    """The covers in `root`, of all GPUs."""
    return sorted(Path(root).glob(f"*/{FOLDER}/*.yaml"))


def check(files: Iterable[Path], compiled: bool = True) -> list[str]:
    """One sentence for each cover in `files` that cannot be used, or that has a config which rules forbid; with `compiled`, for
    each that is not current instead. Renders sources, and compiles nothing. Raises `CompilerMissing` if no NVRTC says its
    version."""
    found = []
    for path in files:
        cover = read(path)
        if isinstance(cover, Cover):
            reason = _stale(cover) if compiled else _illegal(cover)
            found += [f"{path}: {reason}"] if reason else []
        elif cover and not compiled:
            found.append(cover)
    return found


def _illegal(cover: Cover) -> str | None:
    gpu = gpu_of(cover.gpu)
    for config in cover.configs if gpu else ():
        if reason := kernel_of(config).illegal(cover.static, config, gpu):
            return f"illegal config {config}: {reason}"
    return None


def _stale(cover: Cover) -> str | None:
    from ..cuda.compile import nvrtc_version

    gpu = gpu_of(cover.gpu)
    if gpu is None or cover.nvrtc != nvrtc_version() or not (count := stale_configs(cover, gpu)):
        return None
    return (f"{count} of {len(cover.configs)} configs are of another source than today's; `autotune tune --cover --model all` on "
            f"{cover.gpu.name} measures such covers again")


def stale_configs(cover: Cover, gpu: Gpu) -> int:
    """How many configs have another source today than when they were timed. Needs no GPU and compiles nothing."""
    from ..cuda.compile import source_sha256

    sources = (source_sha256(cover.static, config, gpu) for config in cover.configs)
    return sum(not source.startswith(known) for source, known in zip(sources, cover.sources))


def read(path: Path) -> Cover | str | None:
    """The cover in `path`, None if there is no such file, or a sentence that says why it cannot be used."""
    import yaml

    try:
        if path.stat().st_size > MAX_BYTES:
            return f"{path}: larger than {MAX_BYTES} bytes; no cover is"
        text = path.read_bytes().decode()
        if "*" in text or "&" in text:
            return f"{path}: an alias or anchor; a cover has none"
        return from_data(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # ValueError: RecordError and not UTF-8, too
        return f"{path}: {' '.join(str(error).split())[:300]}"


def from_data(data: object) -> Cover:
    """The cover that plain `data` says. Raises `RecordError` naming what is wrong."""
    if not isinstance(data, dict) or set(data) - NO_LONGER != FIELDS | ({RACED} if data.get("schema") == SCHEMA else set()):
        raise RecordError(f"a cover is a mapping with exactly {', '.join(sorted(FIELDS | {RACED}))}")
    if data["schema"] not in (WITH_COMMENTS, WITH_TIMES, SCHEMA):
        raise RecordError(f"schema is {data['schema']!r}; this autotune reads covers of schema {WITH_COMMENTS} to {SCHEMA}")
    for name, pattern in (("date", _DATE), ("nvrtc", re.compile(r"\d+\.\d+(\.\d+)*"))):
        if not isinstance(data[name], str) or not pattern.fullmatch(data[name]):
            raise RecordError(f"{name} is {data[name]!r}; expected is something such as 13.0.88 or 2026-01-31 12:00:00 UTC")
    configs, sources = _configs(data["parameters"], data["configs"])
    if data["schema"] == WITH_COMMENTS:
        sources = (UNKNOWN,) * len(sources)
    raced, raw = data.get(RACED, 0), data["problems"]
    if type(raced) is not int or raced < 0:
        raise RecordError(f"raced is {raced!r}; expected is how many configs were compared")
    if not isinstance(raw, dict) or not 0 < len(raw) <= MAX_PROBLEMS:
        raise RecordError(f"problems must be a mapping from problem to times, of 1 to {MAX_PROBLEMS}")
    try:
        problems = tuple(Problem.parse(_whole(text, data["static"])) for text in raw)
    except ProblemError as error:
        raise RecordError(str(error)) from None
    static = problems[0].static.in_bf16
    times = []
    for problem, row in zip(problems, raw.values()):
        if problem.static.in_bf16.text != data["static"]:
            raise RecordError(f"{problem} is not of {data['static']}")
        times.append((_of_least if data["schema"] == SCHEMA else _times)(row, len(configs), f"times of {problem}"))
    return Cover(GpuKey.from_entry(data["gpu"]), static, configs, sources, problems, tuple(times), data["nvrtc"], data["date"],
                 raced)


def as_data(cover: Cover) -> dict:
    parameters = {config.kernel: " ".join(name for name, _ in config.items) for config in cover.configs}
    rows = [" ".join([config.kernel, *(pair.partition("=")[2] for pair in config.text.split()[1:]), source])
            for config, source in zip(cover.configs, cover.sources)]
    problems = {_short(problem.text): _row(row) for problem, row in zip(cover.problems, cover.times)}
    return {"schema": SCHEMA, "gpu": cover.gpu.as_entry(), "static": cover.static.text, "nvrtc": cover.nvrtc, "date": cover.date,
            "raced": cover.raced, "parameters": parameters, "configs": rows, "problems": problems}


def write(cover: Cover, folder: Path) -> Path:
    """Writes `cover` in place of the one before, in one step. Raises `OSError`."""
    import yaml

    path = file_of(folder, cover.gpu.name, cover.static)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.dump(as_data(cover), Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False,
                     default_flow_style=False, width=1000)
    file.replace(path, text)
    return path


def _configs(parameters: object, rows: object) -> tuple[tuple[Config, ...], tuple[str, ...]]:
    if not isinstance(parameters, Mapping) or not all(isinstance(names, str) for names in parameters.values()):
        raise RecordError("parameters must be a mapping from kernel to names in one line")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_CONFIGS:
        raise RecordError(f"configs must be a list of 1 to {MAX_CONFIGS} lines")
    configs, sources = [], []
    for n, row in enumerate(rows):
        kernel, *values, source = row.split() if isinstance(row, str) and " " in row else ("", "")
        if kernel not in parameters:
            raise RecordError(f"configs: line {n} must begin with a kernel of which parameters has the names")
        names = parameters[kernel].split()
        if len(values) != len(names):
            raise RecordError(f"configs: line {n} has {len(values)} values for {len(names)} parameters")
        try:
            configs.append(config_from_dict({"kernel": kernel, **dict(zip(names, values))}, f"configs: line {n}"))
        except ConfigError as error:
            raise RecordError(str(error)) from None
        sources.append(source)
    if len(set(configs)) != len(configs):
        raise RecordError("configs: one stands twice")
    return tuple(configs), tuple(sources)


def _short(text: str) -> str:
    """A problem's text without op, dtype and head dims, which its static part says."""
    return "-".join(token for n, token in enumerate(text.split("-")) if n > 1 and n != 6)


def _whole(short: object, static: object) -> str:
    """The text that `_short` made shorter."""
    tokens, common = str(short).split("-"), str(static).split("-")
    head_dim = next((token for token in common if re.fullmatch(r"d\d+(x\d+)?", token)), "")
    return "-".join([*common[:2], *tokens[:4], head_dim, *tokens[4:]])


def _row(times: Sequence[float | None]) -> str:
    """The least of `times` in us, and how many thousandths of it each takes more."""
    least = float(f"{min(time for time in times if time is not None):.4g}")
    return " ".join([f"{least:.4g}", *("-" if time is None else str(max(0, round(1000 * (time / least - 1)))) for time in times)])


def _of_least(text: object, count: int, what: str) -> tuple[float | None, ...]:
    """What `_row` wrote of `count` times. Raises `RecordError`."""
    first, *rest = str(text).split()[:MAX_CONFIGS + 1] or ("",)
    least, shares = _number(first), [None if part == "-" else _number(part) for part in rest]
    if len(rest) != count or not 0 < least < math.inf or not all(share is None or 0 <= share < MOST_SHARE for share in shares):
        raise RecordError(f"{what} must be a number above 0 and {count} thousandths from 0, or - for none")
    return tuple(None if share is None else least * (1 + share / 1000) for share in shares)


def _times(text: object, count: int, what: str) -> tuple[float | None, ...]:
    """The `count` numbers above 0 of a line, None for each ``-``. Raises `RecordError`."""
    found = [None if part == "-" else _number(part) for part in str(text).split()]
    if len(found) != count or not all(number is None or 0 < number < math.inf for number in found):
        raise RecordError(f"{what} must be {count} numbers above 0, or - for none")
    return tuple(found)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
