"""Copies the package's own log lines of a Ray job to this process's log, which Prefect shows.

Each line is copied once, and their number is limited. The job marks these lines (`MarkedLines`);
other output of the driver (Ray, vLLM, tokenizers) is only in Ray's dashboard. The whole log is read
again each time. Ray's websocket is not used: it ends silently when a proxy or the head drops it,
and repeats everything when reopened.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator

from prefect_raybatch.harmless import visible

log = logging.getLogger(__name__)

LOGS_EVERY = 5.0  # seconds between reads; longer if reading takes long
LOOK_SHARE = 0.1  # maximum share of the time spent on reading
LINES_A_MINUTE = 30  # maximum number of lines below ERROR
MOST_LOG_BYTES = 16 << 20  # a longer log is no longer read
_MARK = re.compile(r"\[raybatch (INFO|WARNING|ERROR|CRITICAL)\] (.*)\Z")
_MORE = "[raybatch ...] "
_DIGITS = re.compile(r"\d+")


class MarkedLines(logging.Formatter):
    """Formats a log record as `[raybatch LEVEL] text`, further lines as `[raybatch ...] text`."""

    def format(self, record: logging.LogRecord) -> str:
        first, *more = (visible(super().format(record)) or " ").split("\n")
        return "\n".join(
            [f"[raybatch {record.levelname}] {first}", *(f"{_MORE}{line}" for line in more)]
        )


def parse(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (level, message) of each record that `MarkedLines` wrote; skip other lines."""
    level, text = 0, ""
    for line in lines:
        match = _MARK.match(line)
        if line.startswith(_MORE) and text:
            text += "\n" + line.removeprefix(_MORE)
            continue
        if text:
            yield level, text
        level, text = (getattr(logging, match[1]), match[2]) if match else (0, "")
    if text:
        yield level, text


class LogFeed:
    """Reads a growing log with `read()`; passes new marked lines to `emit(level, message)`.

    A line is left out if it repeats an earlier line of the same minute, apart from numbers. Of the
    lines below ERROR, only LINES_A_MINUTE are passed on in a minute. The number of lines left out
    is reported. Reading stops once the log is longer than MOST_LOG_BYTES.
    """

    def __init__(
        self,
        read: Callable[[], str | None],
        emit: Callable[[int, str], None] = log.log,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.read, self.emit, self.clock = read, emit, clock
        self._taken = 0  # characters
        self._next = 0.0
        self._minute = float("-inf")
        self._shown = self._left_out = 0
        self._seen: dict[str, int] = {}  # in this minute
        self._given_up = False

    def poll(self, last: bool = False) -> None:
        """Read the log and pass on its new lines, unless the last reading was a moment ago.

        `last`: the job has ended, so read in any case and accept an unfinished last line.
        """
        began = self.clock()
        if self._given_up or (began < self._next and not last):
            return
        text = self.read()
        if text is not None:
            self._take(text, last)
        took = self.clock() - began
        self._next = began + max(LOGS_EVERY, took / LOOK_SHARE)

    def _take(self, text: str, last: bool) -> None:
        if len(text) < self._taken:  # the job was restarted with the same id, so its log is new
            self._taken = 0
        new = text[self._taken :]
        if not last:
            new = new[: new.rfind("\n") + 1]
        self._taken += len(new)
        for level, message in parse(new.splitlines()):
            self._pass_on(level, message)
        if last:
            self._end_minute()
        if len(text) > MOST_LOG_BYTES and not self._given_up:
            self._given_up = True
            text = "the job's log is too long to follow; see Ray's dashboard for further lines"
            self.emit(logging.WARNING, text)

    def _pass_on(self, level: int, message: str) -> None:
        now = self.clock()
        if now - self._minute >= 60:
            self._end_minute()
            self._minute = now
        shape = _DIGITS.sub("#", message)
        again = self._seen.get(shape, 0)
        self._seen[shape] = again + 1
        if again or (level < logging.ERROR and self._shown >= LINES_A_MINUTE):
            self._left_out += 1
            return
        self._shown += level < logging.ERROR
        self.emit(level, message)

    def _end_minute(self) -> None:
        if self._left_out:
            self.emit(
                logging.INFO,
                f"{self._left_out} more log lines, most of them repeated, are in Ray's dashboard",
            )
        self._shown = self._left_out = 0
        self._seen.clear()
