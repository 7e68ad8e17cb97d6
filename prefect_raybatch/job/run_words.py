"""{run_date} and {run_key} in a job: what is read and where it is written, night by night.

They are filled in once, where a run begins, and everything after that sees plain names; so they
must come out the same each time that the run is begun, continued or looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import check_run_key, nearest

if TYPE_CHECKING:
    from prefect_raybatch.job.batch_job import BatchJob

_WORD = re.compile(r"\{(run_[a-z_]*)(?::([^{}]*))?\}")
_STAMP = re.compile(r"-(\d{8})T\d{6}Z$")  # at the end of a default run key
RUN_WORDS = frozenset(("run_date", "run_key"))


def check_run_words(text: str) -> str:
    """`text` itself; ValueError for a word in braces that is nearly one of ours."""
    for name, form in _WORD.findall(text):
        if name not in RUN_WORDS:
            raise ValueError(f"{{{name}}} is not filled in{nearest(name, RUN_WORDS)}")
        if form and name == "run_key":
            raise ValueError("{run_key} takes no format; remove what follows the colon")
    return text


def run_words(job: BatchJob) -> set[str]:
    """Which of the words a job uses."""
    texts = [*job.source.uris, job.source.query, job.source.filter, job.output.uri]
    return {name for text in texts if text for name, _ in _WORD.findall(text)} & RUN_WORDS


def date_of_key(run_key: str) -> date | None:
    """The date in a default run key, which is that of the scheduled start in UTC."""
    stamp = _STAMP.search(run_key)
    try:
        return datetime.strptime(stamp[1], "%Y%m%d").date() if stamp else None
    except ValueError:
        return None


def date_of(text: str) -> date:
    """The date of a text such as 2026-07-01; `ConfigError` for another."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"run date {text!r} is none; write it as 2026-07-01") from None


def today() -> date:
    return datetime.now(UTC).date()


def with_run_words(job: BatchJob, run_key: str, run_date: date | None = None) -> BatchJob:
    """The job with {run_date} and {run_key} filled in. Without `run_date` it is the one in the run
    key; `ConfigError` where that has none. A job without such words stays as it is."""
    words = run_words(job)
    if not words:
        return job
    when = run_date or date_of_key(run_key)
    if "run_date" in words and when is None:
        raise ConfigError(
            f"{{run_date}}: the run key {run_key!r} tells no date; give --run-date, or leave the "
            "run key to its default"
        )
    key = check_run_key(run_key) if "run_key" in words else run_key

    def word(match: re.Match[str]) -> str:
        if match[1] == "run_key":
            return key
        return format(when, match[2] or "%Y-%m-%d") if match[1] == "run_date" else match[0]

    def fill(text: str) -> str:
        return _WORD.sub(word, text)

    return _changed(job, fill)


def _changed(job: BatchJob, fill: Callable[[str], str]) -> BatchJob:
    source = job.source
    uri = fill(source.uri) if isinstance(source.uri, str) else [fill(one) for one in source.uri]
    query, kept = (text and fill(text) for text in (source.query, source.filter))
    source = source.model_copy(update={"uri": uri, "query": query, "filter": kept})
    output = job.output.model_copy(update={"uri": fill(job.output.uri)})
    return job.model_copy(update={"source": source, "output": output})
