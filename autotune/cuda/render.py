"""Templates and a config in, one self-contained CUDA file out.

`render` is deterministic: the same static part, config and target give the same text. Delimiters leave a template
looking like CUDA (Jinja's own cannot parse ``"{%0, %1}"`` in inline PTX): ``${name}`` and lines that begin with ``//%``.
Headers are included as in C++, by ``#include "lib/tile/smem.cuh"``, or by ``//% include name`` where the problem or the
config chooses one; each is there once, however many ask for it. A line says where each begins, and a list on top which there are.
"""

from __future__ import annotations

import re
import textwrap
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined

from ..core.config import Config, Value
from ..kernels import kernel_of
from ..kernels.base import Field, header_if
from ..kernels.forward.base import ELEMENTS
from ..kernels.writing import FIELDS, TEMPLATE, CacheWrite
from ..core.problem import Static

PACKAGE = Path(__file__).parents[1]
TEMPLATES = next(p for p in (PACKAGE / "_templates", PACKAGE.parent / "templates") if p.is_dir())
HOST_TWINS = PACKAGE / "simulator" / "host"  # lib/base.cuh and lib/ptx/ once more, in plain C++
BANNER = "// ---- "  # before the name of the header, or of the template, whose lines follow
_BEGIN, _END = "//\x1fbegin ", "//\x1fend "  # as headers come from the loader
_INCLUDE = re.compile(r'^#include ("[^"]+\.cuh(?:\.j2)?")$', re.MULTILINE)


class _Headers(FileSystemLoader):
    """Files whose `#include "lib/tile/smem.cuh"` Jinja includes, headers with a line before and after them that says which."""

    def get_source(self, environment: Environment, template: str):
        source, path, current = super().get_source(environment, template)
        source = _INCLUDE.sub(r"//% include \1", source)
        if ".cuh" in template:
            source = f"{_BEGIN}{template}\n{source}{_END}{template}\n"
        return source, path, current


@lru_cache(maxsize=None)
def _environment(ptx: str) -> Environment:
    folders = [_Headers(TEMPLATES)]
    if ptx == "host":
        folders.insert(0, _Headers(HOST_TWINS))
    return Environment(
        loader=ChoiceLoader(folders), undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True,
        trim_blocks=True, lstrip_blocks=True, variable_start_string="${", variable_end_string="}",
        line_statement_prefix="//%", line_comment_prefix="//#", block_start_string="/*%", block_end_string="%*/",
        comment_start_string="/*#", comment_end_string="#*/")


def render(static: Static, config: Config, target: str, ptx: str = "cuda") -> str:
    """The CUDA source of `config` for problems of `static`, without header: what is compiled and hashed.

    `config` must be legal for `static`. `target` is an -arch such as ``sm_90``. With ``ptx="host"`` the machine-specific
    headers are replaced by their C++ twins, for the simulator.
    """
    kernel = kernel_of(config)
    constants = [{"type": type, "name": name, "value": _literal(value)}
                 for type, name, value in kernel.constants(static, config)]
    return _rendered(
        kernel.template, ptx, element=ELEMENTS[static.dtype], constants=constants,
        fields=_fields(kernel.params(static, config)), mask=static.mask, softcap=static.softcap, alibi=static.alibi,
        softcap_header=header_if(static.softcap, "lib/scores/softcap.cuh"),
        mask_header=f"lib/masks/{'packed/' if static.packed else ''}{static.mask}.cuh", target=target,
        **kernel.operands(static, config))


def render_write(write: CacheWrite, target: str, ptx: str = "cuda") -> str:
    """The CUDA source of the kernel that writes into caches, likewise."""
    constants = [{"type": type, "name": name, "value": _literal(value)} for type, name, value in write.constants]
    eight_bit = write.cache_dtype == "e4m3"
    return _rendered(
        TEMPLATE, ptx, element=ELEMENTS[write.dtype], cache_element="e4m3" if eight_bit else ELEMENTS[write.cache_dtype],
        eight_bit=eight_bit, constants=constants, fields=_fields(FIELDS), target=target)


def headers(*names: str, ptx: str = "cuda", **values: object) -> str:
    """The headers of templates/ called `names`, each after those that it includes, as one text. `values` are for Jinja."""
    asked = "".join(f'//% include "{name}"\n' for name in names)
    return _with_banners("headers", _environment(ptx).from_string(asked).render(**values))


def _rendered(template: str, ptx: str, **names: object) -> str:
    return _with_banners(template, _environment(ptx).get_template(template).render(**names))


def _with_banners(template: str, text: str) -> str:
    """`text` with each header once, a banner where it begins and where the file that includes it goes on, and a list on top."""
    stack, there, skipped = [template], set(), 0  # `skipped`: how deep in headers that are there already
    lines, headers, said, first = [], [], template, None
    for line in text.splitlines(keepends=True):
        if line.startswith(_BEGIN):
            stack.append(line[len(_BEGIN):].strip())
            skipped += bool(skipped or stack[-1] in there)
            there.add(stack[-1])
        elif line.startswith(_END):
            stack.pop()
            skipped -= bool(skipped)
        elif not skipped:
            if stack[-1] != said and line.strip():
                said = stack[-1]
                first = len(lines) if first is None else first
                headers += [said] if said not in (template, *headers) else []
                lines += ["\n"] if lines and lines[-1].strip() else []
                lines.append(f"{BANNER}{said}\n")
            if line.strip() or lines and lines[-1].strip():
                lines.append(line)
    rooms = [f"{room}: {' '.join(name.rpartition('/')[2].partition('.')[0] for name in names)}"
             for room, names in groupby([*headers, template], lambda name: name.rpartition("/")[0])]
    contents = [*(f"// {line}\n" for line in textwrap.wrap(f"Contents, {'; '.join(rooms)}", 117)), "\n"]
    return "".join([*lines[:first], *contents, *lines[first:]] if headers else lines)


def _fields(fields: tuple[Field, ...]) -> list[dict[str, str]]:
    return [{"type": f.type, "name": f.name, "comment": f"  // {f.doc}" if f.doc else ""} for f in fields]


def _literal(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
