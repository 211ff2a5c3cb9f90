"""Where trials and plans are kept: a folder of journal files, on one machine or on a disk that many share, or PostgreSQL.

    storage = open_storage(None, "nvidia-h200/forward-...")           a journal in the user's folder
    storage = open_storage("/shared/tune", "nvidia-h200/forward-...") a journal in that folder
    storage = open_storage("postgresql://tune@db/autotune", ...)      one database for everything

What comes back has the methods of an Optuna storage. A database that is away for a while, because it is restarted, is waited for.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.storages import JournalStorage, RDBStorage, get_storage

from ..database.view import user_root
from .journal import Journal

PATIENCE_SECONDS = 120.0  # that a database may be away
FIRST_PATIENCE_SECONDS = 15.0  # when it was never there: the address may be wrong
MAKING_TABLES = 0x6175746F  # a number for the lock: "auto"
PAUSE_SECONDS = (0.1, 3.0)  # between attempts, doubling
MOST_REFUSED = 1000  # lines of a journal that are JSON and nonsense; each costs a reading of the whole
DRIVERS = ("psycopg", "psycopg2")
SCHEMES = ("postgresql", *(f"postgresql+{driver}" for driver in DRIVERS))


_DATABASES: dict[str, Patient] = {}  # one for each URL: to open one takes 40 queries and a lock
_OPENING = threading.Lock()


class StoreError(OSError):
    """The store cannot be read or written, with a sentence that says which file and what to do."""


def trials_root() -> Path:
    """The folder of all journals: ``trials`` in the user's database folder."""
    return user_root() / "trials"


def is_database(where: str | None) -> bool:
    """Whether `where` is a URL of a database, not a folder."""
    return where is not None and "://" in where


def shown(where: str) -> str:
    """`where` as it may be printed: without a password."""
    scheme, separator, rest = where.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{host}" if separator else where


def open_storage(where: str | None, name: str, root: Path | None = None) -> Patient:
    """The Optuna storage for `name`, a file in the folder `where`, or in `root` (None: `trials_root`), or the database at the
    URL `where`. Raises `StoreError`."""
    if is_database(where):
        with _OPENING:
            if where not in _DATABASES:
                _DATABASES[where] = _open_database(where)
        return _DATABASES[where]
    folder = Path(where).expanduser() if where else root or trials_root()
    path = folder / f"{name}.journal"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(_cannot(path, error)) from None
    return open_journal(path)


def open_journal(path: Path) -> Patient:
    """The journal file at `path`. Lines that cannot be understood are passed over, and stderr is told how many."""
    try:
        journal = Journal(path)
    except OSError as error:
        raise StoreError(_cannot(path, error)) from None
    for _ in range(MOST_REFUSED):
        try:
            storage = JournalStorage(journal)
            break
        except OSError as error:
            raise StoreError(_cannot(path, error)) from None
        except Exception as error:  # whatever a line that is JSON and nonsense makes Optuna raise
            if not journal.refuse_last():
                raise StoreError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    else:
        raise StoreError(f"{path} is no journal of trials: {MOST_REFUSED} lines of it mean nothing; move it away")
    if journal.spoiled:
        lines = "1 line is" if journal.spoiled == 1 else f"{journal.spoiled} lines are"
        print(f"autotune: {path}: {lines} damaged and passed over; the others count", file=sys.stderr)
    return Patient(storage, str(path), path)


def _open_database(url: str) -> Patient:
    from sqlalchemy import create_engine, text

    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise StoreError(f"a storage is a folder or postgresql://USER@HOST/DATABASE, not {scheme}://")
    if scheme == "postgresql":  # SQLAlchemy's own choice of a driver depends on its version, not on what is there
        scheme += next((f"+{driver}" for driver in DRIVERS if importlib.util.find_spec(driver)), "")
    if not importlib.util.find_spec(scheme.partition("+")[2] or "psycopg"):
        raise StoreError("PostgreSQL needs a driver; pip install 'psycopg[binary]'")
    safe = shown(url)
    asked = {"connect_timeout": 5, "client_encoding": "utf8"}  # psycopg gives bytes for text of a database in SQL_ASCII
    options = {"pool_pre_ping": True, "pool_size": 2, "connect_args": asked}

    def connect():
        engine = create_engine(f"{scheme}://{rest}", **options)
        try:
            with engine.connect() as connection:  # two that make the tables at once would fail; the lock ends with the connection
                connection.execute(text(f"SELECT pg_advisory_lock({MAKING_TABLES})"))
                return get_storage(RDBStorage(f"{scheme}://{rest}", engine_kwargs=options))
        finally:
            engine.dispose()

    storage = _patiently(connect, safe, FIRST_PATIENCE_SECONDS)
    return Patient(storage, safe, None)


class Patient:
    """An Optuna storage whose calls wait for a database that is away, and whose faults are `StoreError`."""

    def __init__(self, storage, name: str, path: Path | None):
        self._storage, self._name = storage, name
        self.path = path

    def __getattr__(self, method: str):
        call = getattr(self._storage, method)
        if self.path:
            def work(*arguments, **keywords):
                try:
                    return call(*arguments, **keywords)
                except OSError as error:
                    raise StoreError(_cannot(self.path, error)) from None
        else:
            def work(*arguments, **keywords):
                return _patiently(lambda: call(*arguments, **keywords), self._name, PATIENCE_SECONDS)
        return work


def _patiently(call, name: str, seconds: float):
    """`call()`, again until it works or `seconds` are over. A call that worked and could not say so is made twice."""
    from sqlalchemy.exc import SQLAlchemyError

    from optuna.exceptions import StorageInternalError

    deadline, pause = time.monotonic() + seconds, PAUSE_SECONDS[0]
    while True:
        try:
            return call()
        except (SQLAlchemyError, StorageInternalError) as error:
            if time.monotonic() > deadline:
                reason = " ".join(str(error.__cause__ or error).split())[:300]
                raise StoreError(f"{name} cannot be used: {reason}; what was measured before is kept there") from None
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_SECONDS[1])


def _cannot(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror or error}); set AUTOTUNE_DB to a folder that can, with free space"


@contextmanager
def quiet_optuna():
    """Without Optuna's line for each new study. Its verbosity is the whole process's, so it is put back."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
