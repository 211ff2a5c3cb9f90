"""What of a source counts: comments and blank lines neither make records stale nor compile anything again."""

import re

import pytest

from autotune.core.gpu import by_name
from autotune.core.problem import Problem
from autotune.cuda import compile as compiler
from autotune.cuda.code import code_of, sha256_of
from autotune.cuda.render import BANNER, TEMPLATES, render
from autotune.kernels import default_config, kernel_of

H200 = by_name("nvidia-h200")
PROBLEMS = ("forward-bf16-b1-h8x8-q512-k512-d64-causal-softcap30", "forward-fp32-b1-h2x1-q64-k64-d40",
            "decode-bf16-b2-h8x2-q1-k4096-d128-page16", "backward-bf16-b1-h8x8-q512-k512-d64-varlen")


def rendered(text: str) -> str:
    problem = Problem.parse(text)
    config = default_config(problem, H200)
    return render(problem.static, config, kernel_of(config).target(H200))


@pytest.mark.parametrize("one, other", [
    ("int x;  // why\n", "int x;\n"),
    ("// a\n\n\nint x;\n   \n", "int x;\n"),
    ("int/* a\n   // b\n*/x;\n", "int x;\n"),
    ("int x;  // goes on \\\n int y;\nint z;\n", "int x;\nint z;\n"),
    ("int x; // it's \"open\nint y;\n", "int x;\nint y;\n"),
])
def test_comments_and_blank_lines_do_not_count(one, other):
    assert code_of(one) == code_of(other) == other and sha256_of(one) == sha256_of(other)


@pytest.mark.parametrize("code", ['asm("add; // PTX\\n\\t" "/* mov */ \\" // x");\n', "char c = '\"'; int a = b / c;\n",
                                  "    int indented;\n", "#pragma unroll\n", "char slash = '/', star = '\\'';\n"])
def test_code_counts_whatever_it_looks_like(code):
    assert code_of(code) == code and code_of(code + "// end") == code


@pytest.mark.parametrize("text", PROBLEMS)
def test_a_rendered_source_says_where_each_header_begins(text):
    source = rendered(text)
    contents = re.search(r"^// Contents, ((?:.+\n// )*.+)\n\n", source, re.MULTILINE)
    rooms = [room.split(": ") for room in contents[1].replace("\n//", "").split("; ")]
    *listed, template = [f"{room}/{name}" for room, names in rooms for name in names.split()]
    headers = [name for name in dict.fromkeys(re.findall(rf"^{BANNER}(\S+)$", source, re.MULTILINE))
               if not name.startswith(f"{template}.cu.")]
    assert listed == [re.sub(r"\.cuh(\.j2)?$", "", name) for name in headers]
    assert (TEMPLATES / f"{template}.cu.j2").is_file() and all((TEMPLATES / name).is_file() for name in headers)
    assert source.index(contents[0]) < source.index("#define DEVICE") and "\x1f" not in source
    for name in headers:  # each banner stands above the first line of its own header
        text = (TEMPLATES / name).read_text().splitlines()
        first = next(line for line in text if line and not line.startswith("#include"))
        assert "//%" in first or "${" in first or f"{BANNER}{name}\n{first}\n" in source


@pytest.mark.slow
def test_what_was_compiled_serves_a_source_with_other_comments(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    source = 'extern "C" __global__ void f(int* x) { *x = 1; }'
    try:
        first = compiler.cached(f"{source}  // one\n", "sm_80")
    except compiler.CompilerMissing as error:
        pytest.skip(f"needs NVRTC: {error}")
    monkeypatch.setattr(compiler, "compile_source", lambda *_: pytest.fail("compiled twice"))
    again = compiler.cached(f"// two\n\n{source}\n", "sm_80")
    assert (again.sha256, again.source_sha256) == (first.sha256, first.source_sha256) and again.source.startswith("// two")
    compiler.store(first, tmp_path)
    next(path for path in tmp_path.iterdir() if path.name != "cubins").rename(tmp_path / "gone")
    assert compiler.cached(f"{source}  // three\n", "sm_80").image == first.image
