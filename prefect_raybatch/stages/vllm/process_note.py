"""Notes in a file what an engine's actor is doing, for the actor that replaces it.

With vLLM's core in the actor's own process, as by default on a CPU, a signal that kills the engine
kills the actor too. Ray restarts the actor, or the next pass starts another one; without the note,
it would do the same again. The note is a file in a temporary folder on the node that only this user
can enter. It exists while an engine starts, during the health-check prompt, and until the engine
has answered its first rows. Python's faulthandler writes a fatal signal into it. A live process
holds a lock on its note.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from prefect_raybatch.exit_codes import signal_text
from prefect_raybatch.storage.private import make_private_folder, open_regular, private_folders

START, PROMPT, ROWS = "start", "prompt", "rows"  # what an actor does while its note exists
NOTES_FOLDER = "raybatch-notes"
LONGEST_NOTE = 65536  # characters of a note that are read
NOTE_MAX_AGE = 86400.0  # seconds after which a note that no actor has read is removed
SILENT = "the engine's process ended without an error message: killed, out of memory, or hung"
FAULTS = {  # faulthandler's names
    "Illegal instruction": signal.SIGILL,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
}
ENDED_ITSELF = "Ended: "  # begins the line of a process that ended itself
ENDED_ITSELF_LINE = re.compile(rf"^{ENDED_ITSELF}(.+)$", re.MULTILINE)
FATAL_LINE = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class PredecessorNote:
    """The note that an ended process left: what it was doing, and the `cause` of its end.

    `doing` is START, PROMPT or ROWS. `times`: how many processes in a row ended in that state, this
    one included. `before`: why the process before this one ended, "" if there was none.
    """

    doing: str
    times: int = 1
    before: str = ""
    cause: str = ""


class ProcessNote:
    """The file in which an engine's actor notes its work for its replacement; see the module.

    Actors of the same `attempt` find each other's notes. With attempt "" nothing is written or
    found.
    """

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt
        self._lock = threading.RLock()
        self.file: IO[str] | None = None
        self._path = Path()
        self._traced = False

    def read_predecessor(self) -> PredecessorNote | None:
        """Return and delete the note of a dead actor of this attempt on this node; None if none.

        Also deletes notes of other attempts that are over a day old.
        """
        if not self.attempt:
            return None
        for path in (
            path for folder in private_folders(NOTES_FOLDER) for path in folder.glob("*.note")
        ):
            ours = path.name.split("-")[:-1] == [_plain(self.attempt)]
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if not ours and time.time() - path.lstat().st_mtime < NOTE_MAX_AGE:
                    continue
                with open_regular(path, os.O_RDONLY, "r") as file:
                    # a lock that cannot be had means that the note's process is alive
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # of several actors that take it one succeeds, the others get an error
                    path.unlink()
                    head, _, words = file.read(LONGEST_NOTE).partition("\n")
                if ours:
                    found = json.loads(head)
                    times, before = int(found["times"]), str(found["before"])
                    return PredecessorNote(str(found["doing"]), times, before, _cause(words))
        return None

    def write(self, doing: str, times: int = 1, before: str = "") -> None:
        """Note what this process does from now on, replacing the earlier note.

        The arguments are fields of `PredecessorNote`.
        """
        if not self.attempt:
            return
        name = f"{_plain(self.attempt)}-{uuid.uuid4().hex}.note"
        # on a full disk there is no note, and nothing else is lost
        with self._lock, contextlib.suppress(OSError):
            self.remove_note()
            self._path = make_private_folder(NOTES_FOLDER) / name
            self.file = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "w")
            fcntl.flock(self.file, fcntl.LOCK_EX)
            self.file.write(json.dumps(asdict(PredecessorNote(doing, times, before))) + "\n")
            self.file.flush()
            self._traced = faulthandler.is_enabled()
            # Disable it first. If it was enabled before Ray installed its signal handlers, enabling
            # it again would leave Ray's in place, and these do not write to this file.
            faulthandler.disable()
            faulthandler.enable(self.file, all_threads=False)
            global _live
            _live = self

    def remove_note(self) -> None:
        """Remove this process's note, if any, because the work that it describes is over."""
        with self._lock:
            file, self.file = self.file, None
            if file is None:
                return
            faulthandler.disable()
            if self._traced and sys.__stderr__ is not None:
                faulthandler.enable(sys.__stderr__, all_threads=False)
            self._path.unlink(missing_ok=True)
            file.close()


_live: ProcessNote | None = None  # the note that this process has


def add_cause(cause: str) -> None:
    """Add to this process's note, if it has one, why the process is about to end itself."""
    file = _live.file if _live is not None else None
    with contextlib.suppress(Exception):  # whatever happens, the process must end
        if file is not None:
            file.write(f"{ENDED_ITSELF}{' '.join(cause.split())}\n")
            file.flush()


def _cause(words: str) -> str:
    if told := ENDED_ITSELF_LINE.search(words):
        return told[1]
    found = FATAL_LINE.search(words)
    if found is None:
        return SILENT
    number = FAULTS.get(found[1].strip())
    said = signal_text(-number) if number else found[1].strip()
    return f"the engine's process ended with {said}"


def _plain(attempt: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", attempt)
