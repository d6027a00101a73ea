"""One process at a time trains in a folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from gradfilter.errors import CheckpointError, SettingsError
from gradfilter.files import remove_drafts

try:
    import fcntl
except ImportError:  # Windows: then users have to take care themselves
    fcntl = None

NAME = ".lock"

_open: list[IO[bytes]] = []


class Lock:
    """Keeps other processes from training in a folder, as a context: from its start, or from `take` where there is none yet.

    The system takes it away when the process ends, however that ends. The file is removed too, but for after a kill.
    """

    def __init__(self, folder: Path) -> None:
        """Lock nothing yet."""
        self.folder = folder
        self.is_taken = False
        self.file: IO[bytes] | None = None

    def take(self) -> bool:
        """Lock the folder, and remove what killed processes have left in it; return False where that was done before.

        Raises:
            SettingsError: Another process has locked it.
            CheckpointError: It cannot be written to.
        """
        if self.is_taken:
            return False
        try:
            self.file = open_locked(self.folder)
            remove_drafts(self.folder)
        except BlockingIOError as error:
            raise SettingsError(
                f"another run is at work in the folder '{self.folder}'. Wait until it ends, or give another folder (--out)."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"the folder '{self.folder}' cannot be written to: {error.strerror or error}. Give another one with --out."
            ) from error
        self.is_taken = True
        return True

    def __enter__(self) -> Lock:
        if self.folder.is_dir():
            self.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.file is not None:
            with suppress(OSError):
                (self.folder / NAME).unlink()
            _open.remove(self.file)
            self.file.close()


def open_locked(folder: Path) -> IO[bytes] | None:
    """Return the lock file of a folder, open and locked; None where the system, or the disk, knows no locks.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    while fcntl is not None:
        file = (folder / NAME).open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / NAME)):
                _open.append(file)
                return file
            file.close()
        except FileNotFoundError:  # its owner has removed it since we opened it: once more
            file.close()
        except BlockingIOError:
            file.close()
            raise
        except OSError:  # a network disk without locks
            file.close()
            return None
    return None


def leave_locks() -> None:
    """Let go of the locks that a process was forked with: they are its parent's, and must not outlive it."""
    for file in _open:
        file.close()
    _open.clear()
