"""{run_date} and {run_key}: placeholders in the input and output locations of a job.

`job.edits` fills them in once, where a run begins; later code sees only the filled-in locations. So
they must have the same values each time that the run is started, resumed or looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import nearest

_WORD = re.compile(r"\{(run_[a-z_]*)(?::([^{}]*))?\}")
# At the end of a default run key; a retry (.r1) and a repaired run (.m1) add a number to the key.
_STAMP = re.compile(r"-(\d{8}T\d{6})Z(?:\.[rm]\d+)*$")
_DIRECTIVE = re.compile(r"(%[-_0^#]*\d*[EO]?[A-Za-z%])")
_SHAPES = {
    "%Y": r"\d{4}",
    "%m": r"\d\d",
    "%d": r"\d\d",
    "%y": r"\d\d",
    "%j": r"\d{3}",
    "%F": r"\d{4}-\d\d-\d\d",
    "%D": r"\d\d/\d\d/\d\d",
    "%x": r"\d\d/\d\d/\d\d",
    "%%": "%",
}
_YEARS = ((1969, 2068), (1600, 2199))  # tried for dates in turn: (first, last)
_ANY = "\0"  # any part of a folder's name, until the URI is split at each /
PLACEHOLDER_NAMES = frozenset(("run_date", "run_key"))


def check_placeholders(text: str) -> str:
    """Return `text`; raise ValueError for an unknown placeholder such as {run_day}.

    Also refuses a format in {run_key:...}. Ignores braces whose content does not begin with run_.
    """
    for name, form in _WORD.findall(text):
        if name not in PLACEHOLDER_NAMES:
            raise ValueError(f"{{{name}}} is not a placeholder{nearest(name, PLACEHOLDER_NAMES)}")
        if form and name == "run_key":
            raise ValueError("{run_key} takes no format; remove the colon and the format")
    return text


def placeholders_in(*texts: str | None) -> set[str]:
    """Return which of run_date and run_key are placeholders in any of the texts."""
    return {name for text in texts if text for name, _ in _WORD.findall(text)} & PLACEHOLDER_NAMES


def date_of_key(run_key: str) -> date | None:
    """Return the UTC date of the scheduled start in a default run key; None for any other key."""
    start = start_of_key(run_key)
    return start.date() if start else None


def start_of_key(run_key: str) -> datetime | None:
    """Return the scheduled start (UTC) in a default run key; None for any other key.

    Also found in the keys of retry runs and repaired runs, which end in .r1, .m1 and so on.
    """
    stamp = _STAMP.search(run_key)
    try:
        return datetime.strptime(f"{stamp[1]}Z", "%Y%m%dT%H%M%S%z") if stamp else None
    except ValueError:
        return None


def date_of(text: str) -> date:
    """Parse a date such as 2026-07-01; raise `ConfigError` if the text is no ISO date."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"run date {text!r} is not a date; write it as 2026-07-01") from None


def today() -> date:
    """Return today's date in UTC."""
    return datetime.now(UTC).date()


def render_target_changes(changes: Mapping[str, object], run_date: date) -> dict[str, object]:
    """Return `changes` with {run_date} filled in for the targets in `output.publish`.

    `changes` maps dotted job fields to new values. Only `uri` and `table` of each target are filled
    in. Invalid targets are unchanged; the job's checks reject them later.
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
        name: render_text(value, None, run_date)
        if name in ("uri", "table") and isinstance(value, str)
        else value
        for name, value in target.items()
    }


def render_text(text: str, run_key: str | None, run_date: date | None) -> str:
    """Return `text` with {run_key} and {run_date} filled in.

    A placeholder whose value is None stays. {run_date:FORMAT} uses a strftime format; the default
    is %Y-%m-%d.
    """

    def word(match: re.Match[str]) -> str:
        if match[1] == "run_key" and run_key is not None:
            return run_key
        if match[1] == "run_date" and run_date is not None:
            return format(run_date, match[2] or "%Y-%m-%d")
        return match[0]

    return _WORD.sub(word, text)


def dates_in(template: str, text: str) -> list[date]:
    """Return the dates with which {run_date} in `template` gives `text`; [] without {run_date}.

    There are several if the template has only a part of the date, such as {run_date:%Y-%m}. Tries
    all dates, because strptime cannot read every format. A year of two digits is one from 1969 to
    2068, as in strptime.
    """
    literals = [re.escape(part) for part in _WORD.split(template)[::3]]
    if len(literals) == 1 or re.fullmatch(".+".join(literals), text, re.DOTALL) is None:
        return []
    for first, last in _YEARS:
        days = range(date(first, 1, 1).toordinal(), date(last + 1, 1, 1).toordinal())
        dates = [
            when
            for when in map(date.fromordinal, days)
            if render_text(template, None, when) == text
        ]
        if dates:
            return dates
    return []


def dated_parts(uri: str) -> tuple[str, list[re.Pattern[str]]]:
    """Return the folder of a URI above its first placeholder, and a pattern for each level below.

    The first pattern matches names directly in that folder, the next one names one level deeper,
    and so on. For a URI without placeholders, return the URI and no patterns.
    """
    first = _WORD.search(uri)
    if first is None:
        return uri, []
    base = uri[: first.start()].rpartition("/")[0]
    rest, at, made = uri[len(base) :].lstrip("/"), 0, ""
    for word in _WORD.finditer(rest):
        shape = _form_pattern(word[2]) if word[1] == "run_date" else _ANY
        made += re.escape(rest[at : word.start()]) + shape
        at = word.end()
    made += re.escape(rest[at:].rstrip("/"))
    return base, [re.compile(part.replace(_ANY, ".+")) for part in made.split("/")]


def _form_pattern(form: str | None) -> str:
    """Return a regex for text in the strftime format of a {run_date}; by default %Y-%m-%d."""
    parts = _DIRECTIVE.split(form or "%Y-%m-%d")  # every second one is a directive
    return "".join(
        _SHAPES.get(part, _ANY) if at % 2 else re.escape(part) for at, part in enumerate(parts)
    )


def day_of_run(run_key: str, run_date: date | None) -> date:
    """Return `run_date`, or if it is None the date in the run key.

    Raises `ConfigError` if the key has no date.
    """
    when = run_date or date_of_key(run_key)
    if when is None:
        raise ConfigError(
            f"{{run_date}}: the run key {run_key!r} contains no date; set --run-date (run_date of "
            "the flow), write the date itself, or use the default run key"
        )
    return when
