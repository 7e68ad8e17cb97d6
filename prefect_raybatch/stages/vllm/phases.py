"""Reports the progress of an engine's start while it starts: when each phase began.

vLLM logs what it does next, in the engine's core process or in a worker of that core. Our plugin
listens there and writes the time of each phase to a file of the process that starts the engine. A
thread in that process reads the file and reports new entries.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import IO

from prefect_raybatch.stages.vllm.internals import PHASE_LINES
from prefect_raybatch.stages.vllm.log_tap import listen_to_vllm

log = logging.getLogger(__name__)

PHASES_PLACE = "RAYBATCH_START_PHASES"  # environment variable of an engine's processes: a path
ENGINE_IMPORTS, FIRST_STEP, STEPPED = "imports", "first step", "stepped"
ENGINE_PHASES = (ENGINE_IMPORTS, "weights", "compile", "graphs", FIRST_STEP)  # in order
ON_CLUSTER = "cluster"  # the run connects to a Ray cluster, or starts one
ON_TURN = "turn"  # the run waits for resources that other runs of its process hold
ON_WORKERS = "workers"  # Ray places the engines' actors and starts their processes
ON_ROWS = "rows"  # from an engine's first step to the first commit
START_PHASES = (ON_CLUSTER, ON_TURN, ON_WORKERS, *ENGINE_PHASES, ON_ROWS)
REPORT_SECONDS = 0.5  # seconds between two reads of the marks
MOST_READ = 1 << 16  # bytes of the file that are read

Marks = Mapping[str, float]
"""{phase: when it began, in seconds since 1970}; `stepped`: when the first step was over."""
ReportStart = Callable[[str, Marks], None]
"""Type of functions that take an engine's id and its marks so far; they may be slow or raise."""


def _note_phase(path: str, record: logging.LogRecord) -> None:
    """Append a phase and its time to the file `path` if this log record says that it begins."""
    phase = next((p for line, p in PHASE_LINES.items() if line in str(record.msg)), "")
    if phase:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{phase} {record.created}\n")


def listen_for_phases() -> None:
    """Record the start phases of this process and its forks in the file that PHASES_PLACE names.

    If this environment variable is not set, stop recording.
    """
    place = os.environ.get(PHASES_PLACE)
    listen_to_vllm("phases", partial(_note_phase, place) if place else None)


class StartMarks:
    """Collects when each phase of one engine's start began (its marks, see `Marks`).

    Start the engine inside `capture_phases()`, and call `stepped` with the time when its first step
    is over. `read` returns the marks so far.
    """

    def __init__(self) -> None:
        self._marks = {ENGINE_IMPORTS: time.time()}
        self._file: IO[bytes] | None = None

    @classmethod
    def of_warm(cls) -> StartMarks:
        """Return the marks of an engine that runs already: its first step begins and ends now."""
        made, now = cls(), time.time()
        made._marks = {FIRST_STEP: now, STEPPED: now}
        return made

    @contextlib.contextmanager
    def capture_phases(self) -> Iterator[None]:
        """Make processes that are started in the `with` block report their phases to these marks.

        The end of the block counts as the beginning of the first step. Only one engine may start at
        a time, because an environment variable names the file.
        """
        # Has no name, so nothing is left after a kill -9.
        with tempfile.TemporaryFile() as self._file:
            os.environ[PHASES_PLACE] = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
            try:
                yield
                self._marks[FIRST_STEP] = time.time()
            finally:
                os.environ.pop(PHASES_PLACE, None)
                self._marks, self._file = self.read(), None

    def stepped(self, at: float) -> None:
        """Record that the engine's first step (one call of vLLM's `step`) was over at `at`.

        `at` is in seconds since 1970.
        """
        self._marks[STEPPED] = at

    def read(self) -> dict[str, float]:
        """Return the marks so far: {phase: when it began, in seconds since 1970}.

        If several workers report a phase, the first report in the file counts.
        """
        marks, file = dict(self._marks), self._file
        lines: list[bytes] = []
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile, by the other thread
            lines = os.pread(file.fileno(), MOST_READ, 0).splitlines() if file is not None else []
        for line in lines:
            phase, _, at = line.decode(errors="replace").rpartition(" ")
            with contextlib.suppress(ValueError):
                if phase in ENGINE_PHASES:
                    marks.setdefault(phase, float(at))
        return marks


class StartReporter:
    """Reports an engine's start from a thread, until its first step is over or `end` is called."""

    def __init__(
        self, tell: ReportStart | None, marks: StartMarks, stepped: Callable[[], float], id: str
    ):
        """Store the arguments; `id` identifies the engine.

        `tell` gets the id and the marks whenever these have changed; None: nothing is reported.
        `stepped` returns when the first step was over, in seconds since 1970; 0 before that.
        """
        self.tell, self.marks, self.stepped, self.id = tell, marks, stepped, id
        self._wake, self._over = threading.Event(), False

    def start(self) -> StartReporter:
        if self.tell is not None:
            threading.Thread(target=self._main, name="raybatch-start", daemon=True).start()
        return self

    def end(self) -> None:
        """Stop the thread, because the engine will make no first step."""
        self._over = True  # before the thread wakes
        self._wake.set()

    def answered(self) -> None:
        """Make the thread report at once that the first step is over."""
        self._wake.set()

    def _main(self) -> None:
        said: Marks = {}
        while True:
            if at := self.stepped():
                self.marks.stepped(at)
            marks = self.marks.read()
            if marks != said and self.tell is not None:
                try:
                    self.tell(self.id, marks)
                except Exception as error:  # only people read the report, so the engine works on
                    log.info(
                        "cannot report the engine's start: %s: %s", type(error).__name__, error
                    )
                said = marks
            if STEPPED in marks or self._over:
                return
            self._wake.wait(REPORT_SECONDS)
            self._wake.clear()
