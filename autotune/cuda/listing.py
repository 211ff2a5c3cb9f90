"""What a source becomes: its PTX, with NVRTC, and a cubin's machine code (SASS), with nvdisasm. Text for people to read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .compile import OPTIONS, CompileError, nvrtc_version

_TIMEOUT_S = 120  # the largest kernel takes about a second


class ToolMissing(RuntimeError):
    """nvdisasm is nowhere to be found, with the command that brings it."""


def ptx(source: str, target: str) -> str:
    """The PTX of `source` for an -arch such as ``sm_90``. Raises `CompileError`, `CompilerMissing`."""
    nvrtc_version()  # says in one sentence what is missing, if something is
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch={target.replace('sm_', 'compute_')}"))
        return bytes(nvrtc.getPTX(program)).rstrip(b"\0").decode()
    except nvrtc.NVRTCError:
        raise CompileError(f"NVRTC {nvrtc_version()} refused the source for {target}", nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)


def find_nvdisasm() -> Path | None:
    """nvdisasm from the NVIDIA wheels, ``$CUDA_HOME``, PATH or /usr/local/cuda, in this order, or None."""
    folders = [Path(entry, "nvidia", part, "bin") for entry in sys.path if entry for part in ("cu13", "cuda_nvdisasm")]
    folders += [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders += [Path(found).parent] if (found := shutil.which("nvdisasm")) else []
    folders.append(Path("/usr/local/cuda/bin"))
    return next((path for folder in folders if (path := folder / "nvdisasm").is_file()), None)


def sass(cubin: bytes) -> str:
    """The SASS of every entry of `cubin`. Raises `ToolMissing` without nvdisasm or if it does not know the cubin's format."""
    tool = find_nvdisasm()
    if tool is None:
        raise ToolMissing("SASS needs nvdisasm, which is not in the nvidia wheels, on PATH or in /usr/local/cuda; "
                          "pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([str(tool), "--print-code", str(path)], capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise ToolMissing(f"{tool} cannot read this cubin ({(done.stderr or done.stdout).strip()[:200]}); "
                          "pip install --upgrade nvidia-cuda-nvdisasm")
    return done.stdout
