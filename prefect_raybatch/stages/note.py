"""What an engine's actor is doing, noted for the process that Ray starts in its place.

With vLLM's core in the actor's own process, as it is by default on a CPU, an engine that dies of a
signal takes the actor with it. Ray starts that anew and tells it nothing, so it would do the same
again. The note lies in the node's temporary folder while an engine starts, while it is asked the
fixed prompt and until its first rows are through, and Python writes a fatal signal into it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from prefect_raybatch.exits import signal_text

START, PROMPT, ROWS = "start", "prompt", "rows"  # what an actor can be doing
SILENT = "the engine's process ended without a word: killed, out of memory, or hung"
FATAL = {  # faulthandler's names
    "Illegal instruction": signal.SIGILL,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
}
WORDS = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Left:
    """What a process left: what it was `doing` for the how many-th time in a row (`times`), the
    `cause` of its end, and the one `before` it, empty where there was none."""

    doing: str
    times: int = 1
    before: str = ""
    cause: str = ""


class Note:
    """The note of one actor; of none (`actor` is None) nothing is written or found."""

    def __init__(self, actor: str | None) -> None:
        name = f"raybatch-{os.getuid()}-{actor}.note"
        self.path = Path(tempfile.gettempdir()) / name if actor else None
        self._lock = threading.RLock()
        self._file: IO[str] | None = None
        self._traced = False

    def left(self) -> Left | None:
        """What the process before this one left; None where it was at none of this."""
        if self.path is None:
            return None
        try:
            head, _, words = self.path.read_text(encoding="utf-8", errors="replace").partition("\n")
            found = json.loads(head)
            return Left(found["doing"], int(found["times"]), found["before"], _cause(words))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, doing: str, times: int = 1, before: str = "") -> None:
        """Notes what this process does from now on, in place of what it did."""
        if self.path is None:
            return
        with self._lock, contextlib.suppress(OSError):  # a full disk costs the note, no more
            self.over()
            self._file = self.path.open("w", encoding="utf-8")
            self._file.write(json.dumps(asdict(Left(doing, times, before))) + "\n")
            self._file.flush()
            self._traced = faulthandler.is_enabled()
            faulthandler.enable(self._file, all_threads=False)

    def over(self) -> None:
        """Nothing of the noted kind is being done any more; also where nothing was."""
        with self._lock:
            file, self._file = self._file, None
            if file is None or self.path is None:
                return
            faulthandler.disable()
            if self._traced and sys.__stderr__ is not None:
                faulthandler.enable(sys.__stderr__, all_threads=False)
            file.close()
            self.path.unlink(missing_ok=True)

    def forget(self) -> None:
        """At the end of an actor that nobody starts again: also what it found is removed."""
        self.over()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _cause(words: str) -> str:
    found = WORDS.search(words)
    if found is None:
        return SILENT
    number = FATAL.get(found[1].strip())
    said = signal_text(-number) if number else found[1].strip()
    return f"the engine's process ended with {said}"


def this_actor() -> str | None:
    """The id that Ray keeps for this actor over its restarts; None outside of an actor."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    found = ray.get_runtime_context().get_actor_id()
    return str(found) if found else None
