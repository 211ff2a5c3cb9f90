"""What of a CUDA source makes its machine code: `code_of` leaves out comments and blank lines, and `sha256_of` hashes that.

Records, covers, stored trials and the cache of binaries all know a source by this hash, so a comment makes none of them stale.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

# A text between quotes, which may hold two slashes; or a comment. A backslash at a line's end carries a comment on.
_TEXT_OR_COMMENT = re.compile(r'''"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'|//(?:\\\n|[^\n])*|/\*.*?\*/''', re.DOTALL)


@lru_cache(maxsize=16)  # a cold call asks three times for one
def code_of(source: str) -> str:
    """`source` without comments, blank lines and spaces at the ends of lines."""
    bare = _TEXT_OR_COMMENT.sub(lambda found: " " if found[0][0] == "/" else found[0], source)
    return "".join(f"{line}\n" for line in map(str.rstrip, bare.split("\n")) if line)


def sha256_of(source: str) -> str:
    """64 hex digits, the same for sources that differ in comments and blank lines only."""
    return hashlib.sha256(code_of(source).encode()).hexdigest()
