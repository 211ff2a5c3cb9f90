"""The folders that this user's files are kept in: the one that a variable names, or the platform's, below the home folder."""

from __future__ import annotations

import os
from pathlib import Path


class NoFolder(RuntimeError):
    """There is no home folder, and no variable that names another, with a sentence that says which variable helps."""


def named_folder(variable: str) -> Path | None:
    """The folder that an environment variable names, or None; a leading ``~`` is the home folder, if there is one."""
    given = os.environ.get(variable)
    return Path(os.path.expanduser(given)) if given else None  # Path's own raises for a user that is unknown


def user_folder(kind: str, variable: str) -> Path:
    """The platform's folder of `kind`, ``cache`` or ``data``, for autotune. Raises `NoFolder` naming the `variable` to set."""
    import platformdirs

    try:
        return getattr(platformdirs, f"user_{kind}_path")("autotune", appauthor=False)
    except RuntimeError:  # neither $HOME nor an entry for this user
        raise NoFolder(f"there is no home folder; set {variable} to a folder that can be written") from None
