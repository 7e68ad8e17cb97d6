"""Golden rows: reads the file that has their right answers, and compares a result with it."""

from __future__ import annotations

import ast
import csv
import difflib
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.quality.accuracy import Accuracy, WrongAnswer, accuracy_of
from prefect_raybatch.storage import open_store
from prefect_raybatch.storage.parquet import parquet_table
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset

MOST_GOLDEN_BYTES = 64 << 20  # size limit of a golden file
WRONG_SHOWN = 10
VALUES_SHOWN = 10
GOLDEN_FIELD = "quality.golden"
FAILED_ANSWER = "(failed)"
LONGEST_TEXT = 200  # characters of a shown value
GoldenKey = tuple[str, ...]
GoldenRow = Mapping[str, object]


@dataclass(frozen=True)
class Golden:
    """The right answers of a golden file: `answers` is {values of the key columns: right answer}.

    `columns` are the key columns, by which rows are found in a result; `answer` is the column of
    the right answer. All values are texts, as `as_text` returns them. `places` says where in the
    file each answer is, e.g. `line 3`. `key_field` and `answer_field` are the job fields that name
    the columns: quality.key and quality.answer, or quality.golden for defaults.
    """

    uri: str
    columns: tuple[str, ...]
    answer: str
    answers: Mapping[GoldenKey, str]
    places: tuple[str, ...]
    key_field: str
    answer_field: str

    @property
    def digest(self) -> str:
        """Return a hash of the columns, keys and right answers (16 hex digits)."""
        rows = sorted([*key, text] for key, text in self.answers.items())
        found = json.dumps([self.columns, self.answer, rows])
        return hashlib.sha256(found.encode()).hexdigest()[:16]


def read_golden(
    uri: str,
    options: Mapping[str, object],
    key: Sequence[str],
    answer: str,
    answer_field: str = GOLDEN_FIELD,
) -> Golden:
    """Read a golden file, whose column `answer` has the right answer of each row.

    The columns `key` identify a row in the file and in a result; if `key` is empty, all columns
    except `answer` do. `answer_field` is the job field that names the answer column, for errors.
    `options` are the options of the store that has the file. Raises `ConfigError` if the file is
    missing, unreadable or has no rows, if a column or an answer is missing, or if two rows have the
    same key.
    """
    rows = _rows(uri, _bytes(uri, options))
    if not rows:
        raise ConfigError(f"quality.golden: {uri} has no rows. Add rows with right answers")
    there = list(dict.fromkeys(name for _, row in rows for name in row))
    columns = _key_columns(uri, there, key, answer, answer_field)
    answers: dict[GoldenKey, str] = {}
    for place, row in rows:
        value, of_row = row.get(answer), tuple(as_text(row.get(name)) for name in columns)
        if value is None or value == "":
            raise ConfigError(
                f"quality.golden: {uri}, {place}: column {answer!r} is empty. Write the right "
                "answer, or remove the row"
            )
        if of_row in answers:
            raise ConfigError(
                f"quality.golden: {uri}, {place}: an earlier row has the same "
                f"{', '.join(columns)}. Remove one of them, or name more columns in quality.key"
            )
        answers[of_row] = as_text(value)
    places = tuple(place for place, _ in rows)
    key_field = "quality.key" if key else GOLDEN_FIELD
    return Golden(uri, columns, answer, answers, places, key_field, answer_field)


def _key_columns(
    uri: str, there: Sequence[str], key: Sequence[str], answer: str, answer_field: str
) -> tuple[str, ...]:
    """Return the key columns of a golden file: `key`, or all columns except `answer`.

    `there` are the columns of the file. The other parameters are as in `read_golden`. Raises
    `ConfigError` if the file lacks the column `answer` or a column in `key`, or has no column
    except `answer`.
    """
    has = f"(it has: {', '.join(there)})"
    if answer not in there:
        raise ConfigError(
            f"{answer_field}: {uri} has no column {answer!r} {has}. Name its column of right "
            "answers so, or set quality.answer to a column that file and result have"
        )
    for name in key:
        if name not in there:
            raise ConfigError(
                f"quality.key: {uri} has no column {name!r} {has}. Name columns of the file, or "
                "add it to the file"
            )
    columns = tuple(key or (name for name in there if name != answer))
    if not columns:
        raise ConfigError(
            f"quality.golden: {uri} has only the column {answer!r}. Add the columns of the input "
            "by which its rows are found"
        )
    return columns


def as_text(value: object) -> str:
    """Return a value as the text by which it is compared.

    Surrounding spaces are removed, null is "", booleans are "true" and "false", and whole numbers
    have no decimal point. Objects and lists are JSON, without fields that are null.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (dict, list)):
        return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, default=str)
    return "" if value is None else str(value).strip()


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_typed(golden: Golden, schema: pa.Schema) -> Golden:
    """Return the golden rows with texts that can be compared with the values of a result.

    Each text becomes the text that `as_text` returns for a value of its column's type in `schema`,
    the result's schema. For example, 4.0 in a CSV file becomes 4 for a column of integers, and True
    becomes true for a column of booleans.
    """

    def typed(name: str, text: str) -> str:
        return _typed_text(text, schema.field(name).type)

    answers: dict[GoldenKey, str] = {}
    for key, answer in golden.answers.items():
        made = tuple(map(typed, golden.columns, key))
        answers.setdefault(made, typed(golden.answer, answer))
    return replace(golden, answers=answers)


def _typed_text(text: str, kind: pa.DataType) -> str:
    import pyarrow as pa

    if pa.types.is_nested(kind):
        for read in (json.loads, ast.literal_eval):  # JSON, or as pandas writes it
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                found = read(text)
                return as_text(found) if isinstance(found, (dict, list)) else text
    if pa.types.is_boolean(kind) and text.casefold() in ("true", "false"):
        return text.casefold()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        for number in (int, float):
            with suppress(ValueError, OverflowError):
                return as_text(number(text))
    return text


def accuracy_on(
    golden: Golden,
    result: pyarrow.dataset.Dataset,
    quarantine: pyarrow.dataset.Dataset | None,
    plan: str,
) -> Accuracy:
    """Return the accuracy of a run on the golden rows; a failed row is a wrong answer.

    If several rows of the result have the key of a golden row, the first one counts, since equal
    rows are no independent evidence. `quarantine` has the failed rows, None if there are none.
    `plan` is the hash of the run's plan. Raises `ConfigError` if the result lacks a key column or
    the answer column.
    """
    golden, found = _answers(golden, result)
    answers = {key: text for key, (_, text) in found.items()}
    for key in _failed(golden, quarantine):
        answers.setdefault(key, FAILED_ANSWER)
    wrong = [
        WrongAnswer(_cut(", ".join(key)), _cut(golden.answers[key]), _cut(answers[key]))
        for key in answers
        if answers[key] != golden.answers[key]
    ]
    right, unanswered = len(answers) - len(wrong), len(golden.answers) - len(answers)
    return accuracy_of(plan, right, len(answers), unanswered, wrong[:WRONG_SHOWN])


def golden_numbers(
    golden: Golden, result: pyarrow.dataset.Dataset, row_number: str
) -> dict[int, bool]:
    """Return {row number: whether the answer is right} for the golden rows in a result.

    `row_number` is the column with the row's number. Raises `ConfigError` if the result lacks a key
    column or the answer column.
    """
    golden, answers = _answers(golden, result, row_number)
    return {number: text == golden.answers[key] for key, (number, text) in answers.items()}


def check_golden_columns(golden: Golden, there: Sequence[str]) -> None:
    """Raise `ConfigError` if a key column or the answer column is not in `there`.

    `there` are the columns of the result.
    """
    has = f"(it has: {', '.join(there)})"
    if golden.answer not in there:
        raise ConfigError(
            f"{golden.answer_field}: the result has no column {golden.answer!r} to compare with "
            f"the answers of {golden.uri} {has}. Set quality.answer to a column of the result, and "
            "name the column of the file so"
        )
    for name in golden.columns:
        if name not in there:
            raise ConfigError(
                f"{golden.key_field}: the result has no column {name!r} to find the rows of "
                f"{golden.uri} by {has}. Add a column of the input to output.columns, or set "
                "quality.key to columns of the result"
            )


def check_golden_answers(golden: Golden, field: str, values: Sequence[object]) -> None:
    """Raise `ConfigError` if a right answer is none of the `values` that an answer can have.

    `field` is the job field that lists the values. Does nothing if `values` is empty.
    """
    texts = dict.fromkeys(as_text(value) for value in values)
    answers = zip(golden.places, golden.answers.values(), strict=True)
    wrong = [(place, text) for place, text in answers if text not in texts]
    if not texts or not wrong:
        return
    place, answer = wrong[0]
    others = counted(len(wrong) - 1, "other row")
    more = f" (nor are the answers of {others})" if len(wrong) > 1 else ""
    raise ConfigError(
        f"{GOLDEN_FIELD}: {golden.uri}, {place}: no answer can be {_cut(answer)!r}, because it is "
        f"not in {field}{more}. Write {_nearest(answer, list(texts))}, or change {field}"
    )


def _nearest(answer: str, texts: Sequence[str]) -> str:
    """Return, in quotes, the text most like `answer`; the first few texts if none is similar."""
    alike = [text for text in texts if text.casefold() == answer.casefold()]
    alike = alike or difflib.get_close_matches(answer, texts, n=1)
    shown = [repr(_cut(text)) for text in alike[:1] or texts[:VALUES_SHOWN]]
    if len(shown) == 1:
        return shown[0]
    *before, last = shown if len(texts) <= VALUES_SHOWN else [*shown, "another of its values"]
    return f"{', '.join(before)} or {last}"


def _answers(
    golden: Golden, result: pyarrow.dataset.Dataset, row_number: str | None = None
) -> tuple[Golden, dict[GoldenKey, tuple[int, str]]]:
    """Return the golden rows as `_as_typed` returns them, and the result's answers to them.

    The answers are {key: (row number, answer)}. Golden rows that are not in the result are left
    out; if several rows of the result have the same key, the first one counts. `row_number` is the
    column with the row numbers; if it is None, the numbers are 0. Raises `ConfigError` if the
    result has rows but lacks a key column or the answer column.
    """
    if not result.count_rows():  # it has no columns either
        return golden, {}
    check_golden_columns(golden, result.schema.names)
    golden = _as_typed(golden, result.schema)
    answers: dict[GoldenKey, tuple[int, str]] = {}
    first = {key[0] for key in golden.answers}
    columns = dict.fromkeys([*golden.columns, golden.answer, *([row_number] if row_number else [])])
    for batch in result.to_batches(columns=list(columns)):
        for row in _candidates(batch, golden.columns[0], first).to_pylist():
            key = tuple(as_text(row[name]) for name in golden.columns)
            if key in golden.answers:
                number = int(row[row_number]) if row_number else 0
                answers.setdefault(key, (number, as_text(row[golden.answer])))
    return golden, answers


def _failed(golden: Golden, quarantine: pyarrow.dataset.Dataset | None) -> Iterator[GoldenKey]:
    """Yield the keys of golden rows that failed; skip rows whose input lacks a key column."""
    if quarantine is None:
        return
    for batch in quarantine.to_batches(columns=["input"]):
        for row in batch.column(0).to_pylist():
            if row is None or not set(golden.columns) <= set(row):
                continue
            key = tuple(as_text(row[name]) for name in golden.columns)
            if key in golden.answers:
                yield key


def _candidates(batch: pa.RecordBatch, column: str, values: set[str]) -> pa.RecordBatch:
    """Drop rows in which the text of `column` is not in `values`.

    Only columns of integers or texts are filtered, because for these it is fast. With a column of
    another type, all rows are returned.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = batch.schema.field(column).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
        return batch
    texts = pc.utf8_trim_whitespace(pc.fill_null(pc.cast(batch.column(column), pa.string()), ""))
    return batch.filter(pc.is_in(texts, pa.array(sorted(values), pa.string())))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."


def _bytes(uri: str, options: Mapping[str, object]) -> bytes:
    folder, _, name = uri.rpartition("/")
    folder = folder or ("/" if uri.startswith("/") else ".")
    try:
        return open_store(folder, dict(options) or None).read(name, MOST_GOLDEN_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"quality.golden: no file {uri}. Correct the path") from None


def _rows(uri: str, data: bytes) -> list[tuple[str, GoldenRow]]:
    """Return (place, row) of each row of a golden file; a place is e.g. `line 3`."""
    import pyarrow as pa

    try:
        if uri.endswith(".parquet"):
            table = parquet_table(data)
            _check_unrepeated(table.column_names)
            return [(f"row {number}", row) for number, row in enumerate(table.to_pylist(), 1)]
        text = data.decode("utf-8-sig")
        if uri.endswith(".csv"):
            return list(_csv_rows(text))
        return list(_json_rows(text))
    except (pa.ArrowException, OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"quality.golden: {uri} cannot be read as its ending says: {error}. Correct the file"
        ) from None


def _csv_rows(text: str) -> Iterator[tuple[str, GoldenRow]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    _check_unrepeated(name for name in reader.fieldnames or () if name)
    for row in reader:
        place = f"line {reader.line_num}"  # the last one of a row with several lines
        if None in row:
            raise ValueError(
                f"{place} has more cells than there are columns; put an answer with a comma into "
                "quotes"
            )
        yield place, row


def _json_rows(text: str) -> Iterator[tuple[str, GoldenRow]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            row = json.loads(line, object_pairs_hook=_object)
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            yield f"line {number}", row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_unrepeated(name for name, _ in pairs)
    return dict(pairs)


def _check_unrepeated(names: Iterable[str]) -> None:
    """Raise ValueError if a column name occurs twice.

    Readers would silently keep only the last of the columns with this name.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"it has several columns {name!r}")
        seen.add(name)
