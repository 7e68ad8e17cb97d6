"""The columns of the input: checks their names, and merges their types over all files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.checks import RESERVED
from prefect_raybatch.source.arrow_types import NUMBER_TEXT, common_type, plain_type
from prefect_raybatch.source.json_numbers import exact_as_floats
from prefect_raybatch.source.text_types import common_text_type, text_type
from prefect_raybatch.words import did_you_mean


def check_columns(wanted: Sequence[str] | None, known: Sequence[str], where: str) -> list[str]:
    """Return the columns to read from a file: `wanted`, or all columns of the file (`known`).

    All columns are read if `wanted` is None or empty. Raises ConfigError for a `wanted` column that
    is unknown or repeated, SourceError if the file repeats a column name or a chosen column has the
    reserved prefix. `where` names the file.
    """
    for name in dict.fromkeys(known):
        if known.count(name) > 1:
            raise SourceError(f"{where}: duplicate column {name!r}. Rename one of them")
    for number, name in enumerate(wanted or ()):
        if name in (wanted or ())[:number]:
            raise ConfigError(f"source.columns: duplicate column {name!r}. Remove one")
        if name not in known:
            raise ConfigError(
                f"source.columns: {where} has no column {name!r}{did_you_mean(name, known)} "
                f"(columns: {', '.join(map(str, known))})"
            )
    chosen = list(wanted or known)
    for name in chosen:
        if name.startswith(RESERVED):
            raise SourceError(
                f"{where}: column {name!r} begins with {RESERVED}, which is reserved. Rename it, "
                "or leave it out with source.columns"
            )
    return chosen


def types_in(
    table: pa.Table,
    before: Mapping[str, pa.DataType],
    text: bool,
    typed: Collection[str],
    merged: Mapping[str, pa.DataType],
) -> dict[str, pa.DataType]:
    """Return {column: type} of a block of rows of one file.

    With `text`, the block is CSV text. Types are inferred from its values and from `before`, the
    types of the file's earlier blocks. Columns in `typed` keep the type that they have in `table`.

    Without `text`, types are those of the table, with one exception. `merged` has the column types
    over all files so far. If a column is int64 in the table and float64 in `merged`, and floats
    cannot represent one of its numbers, its type is NUMBER_TEXT (numbers kept as text).
    """
    if not text:
        return {
            field.name: NUMBER_TEXT
            if field.type == pa.int64()
            and merged.get(field.name) == pa.float64()
            and not exact_as_floats(table[field.name])
            else plain_type(field.type)
            for field in table.schema
        }
    return {
        name: column.type if name in typed else text_type(column, before.get(name))
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _common(a: pa.DataType, b: pa.DataType, text: bool, union: bool) -> pa.DataType | None:
    """Return the type for values of both types; None if they are incompatible.

    Uses `common_text_type` if `text` (CSV), which always gives a type, else `common_type`.
    """
    return common_text_type(a, b) if text else common_type(a, b, union)


class TypesSeen:
    """Column types of some of the input's files, merged block by block.

    It starts with the types known before: `columns` has those of the whole input, and `of_files`
    those of each file. `changes` has (file, column types of a block) for each file's first block
    and for each block that widened the types of its file. `clash` becomes True once types are
    incompatible. A `Shape` raises the error later, because it also knows the other files. `text`,
    `union` and `typed` are explained in `Shape`.
    """

    def __init__(
        self,
        text: bool,
        union: bool,
        typed: Collection[str],
        columns: dict[str, pa.DataType],
        of_files: Mapping[str, dict[str, pa.DataType]],
    ) -> None:
        self.clash = False
        self.changes: list[tuple[str, dict[str, pa.DataType]]] = []
        self._text, self._union, self._typed = text, union, typed
        self._columns, self._files = columns, dict(of_files)
        self._noted: set[str] = set()

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(list(self._columns.items()))

    def see(self, where: str, table: pa.Table) -> None:
        """Merge the column types of `table`, a block of the file `where`."""
        before = self._files.get(where, {})
        found = types_in(table, before, self._text, self._typed, self._columns)
        mine = dict(before)
        for name, kind in found.items():
            known = mine.get(name, pa.null())
            wider = kind if self._text else common_type(known, kind, self._union)
            self.clash = self.clash or wider is None
            mine[name] = kind if wider is None else wider
        if mine == before and where in self._noted and not self.clash:
            return
        self._noted.add(where)
        self.changes.append((where, found))
        self._files[where] = mine
        for name, kind in mine.items():
            both = _common(self._columns.get(name, pa.null()), kind, self._text, self._union)
            self.clash = self.clash or both is None
            self._columns[name] = kind if both is None else both


class Shape:
    """Column names and types, merged over files; columns are in the order of the first file.

    `order`: put the columns in this order, and leave out others. `strict`: all files must have the
    same columns. `text`: the files are CSV text, and types are inferred here, except for `typed`
    columns. `union` is explained in `common_type`.
    """

    clash = False  # incompatible types are errors here

    def __init__(
        self,
        strict: bool = True,
        text: bool = False,
        union: bool = False,
        order: Sequence[str] = (),
        typed: Collection[str] = (),
    ) -> None:
        self._typed = frozenset(typed)
        self._strict, self._union, self._order = strict, union, order
        self.text = text
        self._files: dict[str, dict[str, pa.DataType]] = {}
        self._kept: dict[tuple[tuple[str, pa.DataType], ...], dict[str, pa.DataType]] = {}
        self._columns: dict[str, pa.DataType] = {}
        self._first: str | None = None

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """Return `schema` as {column: type}, in the same order."""
        return {field.name: field.type for field in self.schema}

    @property
    def schema(self) -> pa.Schema:
        names = [name for name in self._order if name in self._columns] or self._columns
        return pa.schema([(name, self._columns[name]) for name in names])

    def see(self, where: str, table: pa.Table) -> None:
        """Merge the column types of `table`, a block of the file `where`.

        Raises the errors of `see_types`.
        """
        before = self._files.get(where, {})
        found = types_in(table, before, self.text, self._typed, self._columns)
        self.see_types(where, found)

    def types_of(self, where: str) -> dict[str, pa.DataType] | None:
        """Return {column: type} of the file `where` so far; None before its first block."""
        return self._files.get(where)

    def see_types(self, where: str, found: dict[str, pa.DataType]) -> None:
        """Merge the types `found` in a block of the file `where`.

        Raises SourceError if a column has incompatible types in two files or in one file and, if
        `strict`, if a column is missing from a file. The message names column, files and types.
        """
        before = self._files.get(where)
        if before is None and self._strict:
            self._check_names(where, found)
        mine = dict(before or {})
        for name, kind in found.items():
            known = mine.get(name, pa.null())
            # For CSV, `kind` includes the file's earlier blocks; other types must be compatible.
            wider = kind if self.text else common_type(known, kind, self._union)
            if wider is None:
                raise SourceError(
                    f"{where}: column {name!r} changes from {known} to {kind}. Write all values "
                    "with one type"
                )
            mine[name] = wider
        # Files mostly have the same types: kept once, or 100,000 files would need half a GB.
        self._files[where] = self._kept.setdefault(tuple(mine.items()), mine)
        for name, kind in mine.items():
            if before is None or kind != before.get(name):
                self._merge(name, kind)

    def _merge(self, name: str, kind: pa.DataType) -> None:
        both = _common(self._columns.get(name, pa.null()), kind, self.text, self._union)
        if both is None:
            # the type known so far may be this very file's, from before it was widened
            both = pa.null()
            for other, types in self._files.items():
                mine = types.get(name, pa.null())
                wider = common_type(both, mine, self._union)
                if wider is None:
                    first = self._clashing(name, mine, both)
                    raise SourceError(_clash(name, first, self._files[first][name], other, mine))
                both = wider
        self._columns[name] = both

    def _clashing(self, name: str, kind: pa.DataType, merged: pa.DataType) -> str:
        """Return a file whose type of column `name` is incompatible with `kind`.

        A file in which that column has the type `merged` is preferred.
        """
        having = [file for file, types in self._files.items() if name in types]
        having.sort(key=lambda file: self._files[file][name] != merged)
        for file in having:
            if common_type(self._files[file][name], kind, self._union) is None:
                return file
        return having[0]

    def _check_names(self, where: str, found: dict[str, pa.DataType]) -> None:
        if self._first is None:
            self._first = where
            return
        known = self._files[self._first]
        for name in [*(set(known) - set(found)), *(set(found) - set(known))]:
            lacking, having = (where, self._first) if name in known else (self._first, where)
            raise SourceError(
                f"{lacking} has no column {name!r}, but {having} has. All files must have the same "
                "columns: read fewer with source.columns, or set source.uri to files with equal "
                "columns"
            )


def _clash(name: str, first: str, kind: pa.DataType, other: str, its: pa.DataType) -> str:
    return (
        f"column {name!r} is {kind} in {first}, but {its} in {other}. Write all files with one "
        "type, leave the column out with source.columns, or set source.uri to files with equal "
        "types"
    )
