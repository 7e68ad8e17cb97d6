"""{run_date} and {run_key} in a job: placeholders in its input and output locations.

They are filled in once, where a run begins, and everything after that sees plain names. So they
must have the same values each time that the run is begun, resumed or looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import check_run_key, nearest

if TYPE_CHECKING:
    from prefect_raybatch.job.batch_job import BatchJob

_WORD = re.compile(r"\{(run_[a-z_]*)(?::([^{}]*))?\}")
# At the end of a default run key; a retry (.r1) and a repaired run (.m1) add a number to the key.
_STAMP = re.compile(r"-(\d{8}T\d{6})Z(?:\.[rm]\d+)*$")
_DIRECTIVE = re.compile(r"%-?[A-Za-z]")
_DIGITS = {"%Y": r"\d{4}", "%m": r"\d\d", "%d": r"\d\d", "%y": r"\d\d", "%j": r"\d{3}"}
_ANY = "\0"  # any part of a folder's name, until the folders are told apart
RUN_WORDS = frozenset(("run_date", "run_key"))


def check_run_words(text: str) -> str:
    """Return `text`; raise ValueError for a word in braces that resembles a placeholder."""
    for name, form in _WORD.findall(text):
        if name not in RUN_WORDS:
            raise ValueError(f"{{{name}}} is not a placeholder{nearest(name, RUN_WORDS)}")
        if form and name == "run_key":
            raise ValueError("{run_key} takes no format; remove the colon and the format")
    return text


def run_words(job: BatchJob) -> set[str]:
    """Return which placeholders a job uses.

    Of its targets only the date counts: {run_key} is filled in there when a run is published,
    because a retry has a key of its own.
    """
    return _place_words(job) | ({"run_date"} if targets_are_dated(job) else set())


def places_are_dated(job: BatchJob) -> bool:
    """Return whether {run_date} is in a job's input, or in the place where its runs are written."""
    return "run_date" in _place_words(job)


def _place_words(job: BatchJob) -> set[str]:
    texts = [*job.source.uris, job.source.query, job.source.filter, job.output.uri]
    return {name for text in texts if text for name, _ in _WORD.findall(text)} & RUN_WORDS


def targets_are_dated(job: BatchJob) -> bool:
    """Return whether {run_date} is in a target that the job publishes to."""
    texts = [text for target in job.output.publish for text in (target.uri, target.table) if text]
    return any(match[1] == "run_date" for text in texts for match in _WORD.finditer(text))


def date_of_key(run_key: str) -> date | None:
    """Return the date in a default run key, or None.

    It is the date of the scheduled start in UTC.
    """
    start = start_of_key(run_key)
    return start.date() if start else None


def start_of_key(run_key: str) -> datetime | None:
    """Return the scheduled start in UTC in a default run key; None for any other key."""
    stamp = _STAMP.search(run_key)
    try:
        return datetime.strptime(f"{stamp[1]}Z", "%Y%m%dT%H%M%S%z") if stamp else None
    except ValueError:
        return None


def date_of(text: str) -> date:
    """Return the date of a text such as 2026-07-01; raise `ConfigError` for any other."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"run date {text!r} is not a date; write it as 2026-07-01") from None


def today() -> date:
    return datetime.now(UTC).date()


def of_today(job: BatchJob) -> BatchJob:
    """Return the job with {run_date} and {run_key} filled in as a run of today would have them."""
    return with_run_words(job, f"{job.name}-{today():%Y%m%d}T000000Z")


def with_run_words(job: BatchJob, run_key: str, run_date: date | None = None) -> BatchJob:
    """Return the job with {run_date} and {run_key} filled in.

    Without `run_date`, use the date in the run key; raise `ConfigError` if there is none. A job
    without placeholders is unchanged.
    """
    return with_dated_targets(with_places(job, run_key, run_date), run_key, run_date)


def with_places(job: BatchJob, run_key: str, run_date: date | None = None) -> BatchJob:
    """Like `with_run_words`, except for the targets to publish to, which are unchanged."""
    words = _place_words(job)
    if not words:
        return job
    when = _day(run_key, run_date) if "run_date" in words else None
    key = check_run_key(run_key) if "run_key" in words else run_key

    def word(match: re.Match[str]) -> str:
        if match[1] == "run_key":
            return key
        return _formatted(match, when) if match[1] == "run_date" else match[0]

    return _changed(job, lambda text: _WORD.sub(word, text))


def with_dated_targets(job: BatchJob, run_key: str, run_date: date | None = None) -> BatchJob:
    """Return the job with {run_date} filled in for its targets, as by `with_run_words`."""
    if not targets_are_dated(job):
        return job
    when = _day(run_key, run_date)
    targets = [
        target.model_copy(
            update={
                "uri": target.uri and fill_date(target.uri, when),
                "table": target.table and fill_date(target.table, when),
            }
        )
        for target in job.output.publish
    ]
    output = job.output.model_copy(update={"publish": targets})
    return job.model_copy(update={"output": output})


def with_dated_publish(changes: Mapping[str, object], run_date: date) -> dict[str, object]:
    """Return changes of fields with {run_date} filled in for the targets in `output.publish`.

    Targets of a wrong form are unchanged, for the job's checks to refuse.
    """
    filled = dict(changes)
    targets = changes.get("output.publish")
    if isinstance(targets, list):
        filled["output.publish"] = [_dated_target(target, run_date) for target in targets]
    return filled


def _dated_target(target: object, run_date: date) -> object:
    if not isinstance(target, Mapping):
        return target
    return {
        name: fill_date(value, run_date)
        if name in ("uri", "table") and isinstance(value, str)
        else value
        for name, value in target.items()
    }


def fill_date(text: str, run_date: date) -> str:
    """Return `text` with {run_date} filled in; {run_key} is unchanged."""
    return _WORD.sub(
        lambda match: _formatted(match, run_date) if match[1] == "run_date" else match[0], text
    )


def filled_uri(uri: str, run_key: str, run_date: date) -> str:
    """Return a URI with {run_date} and {run_key} filled in."""
    return _WORD.sub(
        lambda match: run_key if match[1] == "run_key" else _formatted(match, run_date), uri
    )


def dated_parts(uri: str) -> tuple[str, list[re.Pattern[str]]]:
    """Return the folder that contains all dated folders of a URI, and a pattern for each level.

    There is a pattern for the name of each folder from there down to a dated one; none for a URI
    without placeholders.
    """
    first = _WORD.search(uri)
    if first is None:
        return uri, []
    base = uri[: first.start()].rpartition("/")[0]
    rest, at, made = uri[len(base) :].lstrip("/"), 0, ""
    for word in _WORD.finditer(rest):
        shape = _ANY
        if word[1] == "run_date":
            form = re.escape(word[2] or "%Y-%m-%d")
            shape = _DIRECTIVE.sub(lambda one: _DIGITS.get(one[0], _ANY), form)
        made += re.escape(rest[at : word.start()]) + shape
        at = word.end()
    made += re.escape(rest[at:].rstrip("/"))
    return base, [re.compile(part.replace(_ANY, ".+")) for part in made.split("/")]


def _day(run_key: str, run_date: date | None) -> date:
    when = run_date or date_of_key(run_key)
    if when is None:
        raise ConfigError(
            f"{{run_date}}: the run key {run_key!r} contains no date; set --run-date (run_date of "
            "the flow), write the date itself, or use the default run key"
        )
    return when


def _formatted(match: re.Match[str], when: date | None) -> str:
    return match[0] if when is None else format(when, match[2] or "%Y-%m-%d")


def _changed(job: BatchJob, fill: Callable[[str], str]) -> BatchJob:
    source = job.source
    uri = fill(source.uri) if isinstance(source.uri, str) else [fill(one) for one in source.uri]
    query, kept = (text and fill(text) for text in (source.query, source.filter))
    source = source.model_copy(update={"uri": uri, "query": query, "filter": kept})
    output = job.output.model_copy(update={"uri": fill(job.output.uri)})
    return job.model_copy(update={"source": source, "output": output})
