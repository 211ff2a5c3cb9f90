"""Headers of templates/lib/ compile alone, and what a template may look like."""

import re
from dataclasses import replace

import pytest

from autotune.core.gpu import by_name
from autotune.core.masks import TYPICAL
from autotune.core.problem import Problem
from autotune.cuda import compile as compiler
from autotune.cuda.render import TEMPLATES, headers
from autotune.kernels import KERNELS
from autotune.kernels.base import mask_fields
from autotune.kernels.forward.base import ALIBI_FIELDS, SOFTCAP_FIELD
from autotune.kernels.forward.varlen import FIELDS

LIB = sorted(path.relative_to(TEMPLATES).as_posix() for path in (TEMPLATES / "lib").rglob("*.cuh*"))


def params() -> list[dict[str, str]]:
    """Every field of Params that some kernel has and whose type is C++'s own or base.cuh's: masks and sequences read these."""
    declared = [*(field for kernel in KERNELS.values() for field in kernel.fields), *FIELDS["varlen"], *FIELDS["paged"],
                SOFTCAP_FIELD, *ALIBI_FIELDS]
    plain = Problem.parse("forward-bf16-b1-h1x1-q64-k64-d64")
    masks = [field for bounds in TYPICAL.values() for field in mask_fields(replace(plain, **bounds[0]._asdict()).static)]
    fields = {field.name: field.type for field in (*declared, *masks)}
    return [{"type": type, "name": name, "comment": ""} for name, type in fields.items()
            if not re.search("Element|TensorMap", type)]


def default(kernel: str, problem: str):
    return KERNELS[kernel].default(Problem.parse(problem), by_name("nvidia-h200"))


def values() -> dict[str, object]:
    """What Jinja in headers of lib/ asks for."""
    text = "backward-bf16-b1-h8x8-q512-k512-d64"
    backward = KERNELS["backward_fused"].operands(Problem.parse(text).static, default("backward_fused", text))
    text = text.replace("backward", "forward")
    forward = KERNELS["forward_wgmma"].operands(Problem.parse(text).static, default("forward_wgmma", text))
    return {**forward, **backward, "fields": params(), "constants": []}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIB)
def test_a_header_of_lib_compiles_alone(name):
    try:
        nvrtc = compiler._nvrtc()
    except compiler.CompilerMissing as error:
        pytest.skip(f"needs NVRTC: {error}")
    program = nvrtc.createProgram(headers(name, **values()), name, (), ())
    try:
        nvrtc.compileProgram(program, ("-std=c++17", "-default-device", "-arch=compute_90a"))
    except nvrtc.NVRTCError:
        pytest.fail(f"{name} alone: {nvrtc.getProgramLog(program)}")
    finally:
        nvrtc.destroyProgram(program)


def test_a_header_that_is_included_twice_is_there_once():
    text = headers("lib/softmax/sink.cuh", "lib/softmax/online.cuh", "lib/softmax/sink.cuh")
    assert text.count("#define DEVICE") == text.count("struct RowEnd {") == text.count("struct Rescale {") == 1
    assert text.index("DEVICE float exp2_approx") < text.index("struct RowEnd {") < text.index("struct RowStatistics {")


def test_jinja_stands_in_files_that_say_so():
    """A fixed header is included as in C++, one that is chosen by name."""
    jinja = re.compile(r"//%|//#|\$\{|/\*%")
    assert not [path.name for path in TEMPLATES.rglob("*.cuh") if jinja.search(path.read_text())]
    assert not [path.name for path in TEMPLATES.rglob("*.j2") if re.search(r'//%\s*include\s*"', path.read_text())]


def test_a_template_stands_in_the_room_of_its_kernel():
    """Sections of one kernel are included from its own folder, or from those of its operation and of all."""
    shared = {"lib": (), "attention": ("lib",), "forward": ("lib", "attention"), "backward": ("lib", "attention")}
    for path in (path for path in TEMPLATES.rglob("*") if path.is_file()):
        room = path.relative_to(TEMPLATES).parts[0]
        may = {*shared.get(room, tuple(shared)), room}
        for name in re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE):
            assert (TEMPLATES / name).is_file(), f"{path}: {name}"
            assert name.split("/")[0] in may, f"{path} includes {name}"


CONDITION = re.compile(r"^\s*//%-?\s*(if|elif|else|endif)\b", re.MULTILINE)
CHOICES = list(TEMPLATES.rglob("*.j2"))


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.relative_to(TEMPLATES).as_posix())
def test_conditions_are_few_and_cut_no_braces(path):
    """At most five in a kernel's body, none within another, and no brace that one branch opens is closed outside of it."""
    parts = CONDITION.split(path.read_text())
    words, branches = parts[1::2], parts[2::2]
    assert words.count("if") <= 5
    assert re.fullmatch(r"(if(elif)*(else)?endif)*", "".join(words)), "nested"
    for word, branch in zip(words, branches):
        if word != "endif":
            code = re.sub(r"\$\{[^}]*\}|//[^\n]*", "", branch)
            assert all(code.count(a) == code.count(b) for a, b in ("{}", "()", "[]")), branch


def test_python_hands_names_to_templates_and_no_code():
    """But for the operand lists of inline assembly, which neither C++ nor a template can write."""
    for kernel, text in (("forward_simt", "forward-fp32-b1-h1x1-q64-k64-d64-softcap30-alibi"),
                         ("forward_mma", "forward-bf16-b1-h2x1-q64-k64-d64-alibi-varlen"),
                         ("forward_wgmma", "forward-bf16-b1-h2x1-q64-k64-d64-causal-page16"),
                         ("decode_mma", "decode-bf16-b1-h8x2-q1-k4096-d64-kve4m3-page16-softcap30"),
                         ("backward_wgmma", "backward-bf16-b1-h2x1-q64-k64-d64-softcap30")):
        given = KERNELS[kernel].operands(Problem.parse(text).static, default(kernel, text))
        texts = [value for value in given.values() if isinstance(value, (str, list))]
        names = [name for value in texts for name in ([value] if isinstance(value, str) else value) if isinstance(name, str)]
        assert names and not [name for name in names if not re.fullmatch(r"[\w/.]+", name)]
