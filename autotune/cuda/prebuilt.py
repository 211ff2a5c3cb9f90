"""Cubins that were compiled ahead, for machines without a compiler: `autotune build --cubins DIR` writes them.

An entry is two files, <key>.cubin and <key>.json. The key is a hash of the source's code, target and options, not of NVRTC's
version, which only a machine with NVRTC knows. Two folders are read, and never written by a call: cubins/ in the cache folder,
then the package's own, autotune/_cubins. An entry that is damaged counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from .cache import Trust, read_file
from .elf import entry_resources

PACKAGE_FOLDER = Path(__file__).parents[1] / "_cubins"
NAME = "cubins"  # of the folder in the cache folder


def key_of(code: str, target: str, options: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join((target, *options, code)).encode()).hexdigest()[:32]


def find(root: Path | None, key: str, trust: Trust | None = None) -> tuple[bytes, dict] | None:
    """(cubin, facts) of the first intact entry called `key`, or None. `facts` has at least nvrtc, sha256 and log. `root` is the
    cache folder, if there is one, of which only what is to be trusted is read."""
    for folder, judge in ((root and root / NAME, trust or Trust.of(root)), (PACKAGE_FOLDER, None)):
        if folder is None:
            continue
        try:
            facts = json.loads(read_file(folder / f"{key}.json", judge))
            image = read_file(folder / f"{key}.cubin", judge)
            if hashlib.sha256(image).hexdigest() == facts["sha256"] and isinstance(facts["nvrtc"], str) and \
                    isinstance(facts.setdefault("log", ""), str) and entry_resources(image):
                return image, facts
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # ReadError is a ValueError
            continue
    return None


def put(cache: Path, key: str, image: bytes, facts: dict) -> None:
    """Writes an entry for those whose cache folder is `cache`: beside, then renamed, the cubin first. Raises OSError."""
    folder = cache / NAME
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in ((f"{key}.cubin", image), (f"{key}.json", json.dumps(facts, indent=1).encode())):
        handle, beside = tempfile.mkstemp(prefix=".new-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(beside, 0o644)
            os.replace(beside, folder / name)
        except OSError:
            Path(beside).unlink(missing_ok=True)
            raise
