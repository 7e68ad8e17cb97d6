"""Generates the demo's customers file, and the true industry of every company in it.

Row ``i`` is a pure function of ``(seed, i)``: values come from a counter-based hash, not from a
random stream. So any range of rows can be generated alone, and no numpy release can change them.
"""

from __future__ import annotations

import csv
import os
import uuid
from collections.abc import Iterator
from datetime import date, timedelta
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from prefect_raybatch.demo import LABELS
from prefect_raybatch.demo import lexicon as lex

Split = Literal["train", "heldout", "all"]

COLUMNS: tuple[str, ...] = (
    "Index",
    "Customer Id",
    "First Name",
    "Last Name",
    "Company",
    "City",
    "Country",
    "Phone",
    "Email",
    "Subscription Date",
    "Website",
)

_BLOCK = 8192  # rows made at a time; bounds memory and has no effect on the content
_HELDOUT_ONE_IN = 8

_STEMS = lex.SURNAMES + lex.PLACES + lex.INVENTED
# a, b, c: names; p: a place; w: the industry word; s: a legal suffix.
_TEMPLATES: dict[str, tuple[str, ...]] = {
    "after": (
        "{a} {w}",
        "{a} {w}",
        "{a} {w} {s}",
        "{a} {w} {s}",
        "{a} & {b} {w}",
        "{a} and {b} {w}",
        "{a}, {b} & {c} {w}",
        "{a}-{b} {w}",
        "The {a} {w}",
        "{a} {p} {w}",
        "{a} {w} of {p}",
        "{a} {w} {p}",
    ),
    "before": ("{w} {a}", "{w} {a}", "{w} {a} {s}", "{w} {a} and {b}", "The {w} {a}"),
    "fused": ("{a}{w}", "{a}{w} {s}", "{a}{w} {p}"),
    "plain": ("{a}{w}",),
}
# A name with no industry in it at all is "Other".
_PLAIN = tuple(" " + suffix for suffix in lex.SUFFIXES)


class _Word(NamedTuple):
    """An industry word, and the kind of company names that contain it (a key of `_TEMPLATES`)."""

    text: str
    kind: str


def _words_of(label: str) -> tuple[_Word, ...]:
    """Return every industry word of ``label``, with its kind."""
    kinds = {"after": lex.AFTER[label], "before": lex.BEFORE[label], "fused": lex.FUSED[label]}
    if label == "Other":
        kinds["plain"] = _PLAIN
    return tuple(_Word(text, kind) for kind, texts in kinds.items() for text in texts)


_WORDS = tuple(_words_of(label) for label in LABELS)
_WORD_COUNTS = np.array([len(words) for words in _WORDS], dtype=np.uint64)

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Company(NamedTuple):
    """A generated company: its full name, and its industry as the true ``label``.

    ``stem`` is the invented, family or place name and ``word`` the industry word in its name. The
    two together decide whether the company is for training or held out (``is_heldout``).
    """

    name: str
    label: str
    stem: str
    word: str


def _mix(value: int) -> int:
    """Apply the 64-bit finaliser of ``_hash`` to one integer; used to derive keys."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MIX[1]) & _MASK
    return value ^ (value >> 31)


def _hash(seed: int, rows: np.ndarray, field: int) -> np.ndarray:
    """Return a 64-bit hash of ``(seed, row, field)`` for each of ``rows``: uint64 of shape (n,).

    ``field`` is the number of the value that is drawn for a row, e.g. 0 for its label.
    """
    key = np.uint64(_mix(_mix(seed + _STEP) + (field + 1) * _STEP))
    value = rows * np.uint64(_STEP) + key
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX[0])
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX[1])
    return value ^ (value >> np.uint64(31))


def _pick(seed: int, rows: np.ndarray, field: int, size: int | np.ndarray) -> list[int]:
    """Return a pseudorandom index below ``size`` for each of ``rows``.

    ``size`` is one number, or an array with one for each row. For ``field`` see ``_hash``.
    """
    high = _hash(seed, rows, field) >> np.uint64(32)
    picked: list[int] = (high % np.asarray(size, dtype=np.uint64)).tolist()
    return picked


def is_heldout(stem: str, word: str) -> bool:
    """Return whether companies with this name and industry word are held out from training.

    A stable hash of the two holds out about one combination in eight, whatever the rest of the
    company's name, the seed or the row.
    """
    digest = blake2b(f"{stem}|{word}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELDOUT_ONE_IN == 0


def draw_companies(start: int, stop: int, seed: int = 7) -> list[Company]:
    """Return the companies of the rows from ``start`` up to, but not including, ``stop``.

    Rows are numbered from 0.
    """
    rows = np.arange(start, stop, dtype=np.uint64)
    labels = _pick(seed, rows, 0, len(LABELS))
    words = _pick(seed, rows, 1, _WORD_COUNTS[labels])
    # One wide draw per part, reduced below, because its range depends on the word's kind.
    stems = _pick(seed, rows, 2, 1 << 32)
    patterns = _pick(seed, rows, 3, 1 << 32)
    seconds = _pick(seed, rows, 4, len(lex.SURNAMES))
    thirds = _pick(seed, rows, 5, len(lex.SURNAMES))
    places = _pick(seed, rows, 6, len(lex.PLACES))
    suffixes = _pick(seed, rows, 7, len(lex.SUFFIXES))
    out = []
    for label, word, stem, pattern, second, third, place, suffix in zip(
        labels, words, stems, patterns, seconds, thirds, places, suffixes, strict=True
    ):
        text, kind = _WORDS[label][word]
        pool = lex.INVENTED if kind == "fused" else _STEMS
        name = pool[stem % len(pool)]
        templates = _TEMPLATES[kind]
        company = templates[pattern % len(templates)].format(
            a=name,
            b=lex.SURNAMES[second],
            c=lex.SURNAMES[third],
            p=lex.PLACES[place],
            w=text,
            s=lex.SUFFIXES[suffix],
        )
        out.append(Company(company, LABELS[label], name, text))
    return out


def _stream(seed: int) -> Iterator[Company]:
    """Yield the companies of rows 0, 1, 2, ... without end."""
    start = 0
    while True:
        yield from draw_companies(start, start + _BLOCK, seed)
        start += _BLOCK


def companies(count: int, seed: int, split: Split = "all") -> list[tuple[str, str]]:
    """Return ``count`` pairs of company name and true label.

    ``"all"`` gives the companies in the rows of ``write_customers(path, count, seed)``, in order.
    ``"train"`` and ``"heldout"`` give those of this sequence that :func:`is_heldout` assigns to
    training or holds out, so the two never have a combination of name and industry word in common,
    whatever the seeds. Names may repeat, as in the file.

    Raises ``ValueError`` for a negative count or an unknown split.
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    if split not in ("train", "heldout", "all"):
        raise ValueError(f'split must be "train", "heldout" or "all", got {split!r}')
    out: list[tuple[str, str]] = []
    stream = _stream(seed)
    while len(out) < count:
        company = next(stream)
        if split == "all" or is_heldout(company.stem, company.word) == (split == "heldout"):
            out.append((company.name, company.label))
    return out


_DATES = tuple((date(2020, 1, 1) + timedelta(days=day)).isoformat() for day in range(2192))
_DOMAINS = ("com", "net", "org", "biz", "info", "co")
_PHONES = (
    "{0}-{1}-{2}",
    "({0}){1}-{2}",
    "+1-{0}-{1}-{2}",
    "{0}.{1}.{2}",
    "{0}{1}{2}",
    "001-{0}-{1}-{2}x{3}",
)
# Characters of a company name that a host name cannot have.
_NOT_HOST = {ord(mark): None for mark in " &,.'-"}


def _customer_rows(start: int, stop: int, seed: int) -> Iterator[tuple[object, ...]]:
    """Yield the CSV rows from ``start`` up to, but not including, ``stop``.

    Rows are numbered from 0. A row has the values of ``COLUMNS`` in order.
    """
    rows = np.arange(start, stop, dtype=np.uint64)
    ids = _hash(seed, rows, 10).tolist()
    firsts = _pick(seed, rows, 11, len(lex.FIRST_NAMES))
    lasts = _pick(seed, rows, 12, len(lex.SURNAMES))
    cities = _pick(seed, rows, 13, len(lex.CITIES))
    phones = _hash(seed, rows, 14).tolist()
    dates = _pick(seed, rows, 15, len(_DATES))
    domains = _pick(seed, rows, 16, len(_DOMAINS))
    for i, company in enumerate(draw_companies(start, stop, seed)):
        first, last = lex.FIRST_NAMES[firsts[i]], lex.SURNAMES[lasts[i]]
        host = f"{company.name.lower().translate(_NOT_HOST)}.{_DOMAINS[domains[i]]}"
        number = phones[i]
        phone = _PHONES[number % len(_PHONES)].format(
            200 + (number >> 8) % 800,
            200 + (number >> 20) % 800,
            1000 + (number >> 32) % 9000,
            100 + (number >> 48) % 900,
        )
        yield (
            start + i + 1,
            f"{ids[i] >> 4:015x}",
            first,
            last,
            company.name,
            *lex.CITIES[cities[i]],
            phone,
            f"{first.lower()}.{last.lower()}@{host}",
            _DATES[dates[i]],
            f"https://www.{host}/",
        )


def write_customers(path: str | os.PathLike[str], rows: int = 10_000, seed: int = 7) -> Path:
    r"""Write a customers CSV with a header and ``rows`` data rows; return its path.

    The bytes depend only on ``(rows, seed)``, and a file with more rows and the same seed begins
    with the same rows. Rows are streamed, so memory does not grow with ``rows``. The file is
    written under another name and renamed, so an incomplete file is never seen. Missing parent
    folders are created. The text is UTF-8 with ``\n`` line ends; only names with a comma are
    quoted.

    Raises ``ValueError`` for negative ``rows`` and ``OSError`` if the file cannot be written.
    """
    if rows < 0:
        raise ValueError(f"rows must not be negative, got {rows}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The leading dot hides a half-written file from readers that list the folder.
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with partial.open("x", encoding="utf-8", newline="", buffering=1 << 20) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            starts = range(0, rows, _BLOCK)
            writer.writerows(
                chain.from_iterable(
                    _customer_rows(start, min(start + _BLOCK, rows), seed) for start in starts
                )
            )
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return target
