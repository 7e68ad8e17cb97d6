"""`_SUCCESS`: the record that a run's result is complete, with a list of its files.

Every reader goes through this module, which rejects a record of another plan: once a run has
`_SUCCESS`, its pieces are deleted, and no other file can replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.accepted import Accepted
from prefect_raybatch.ledger.layout import (
    DATA_FOLDER,
    KINDS,
    RESULT_FOLDERS,
    SUCCESS,
)
from prefect_raybatch.ledger.plan_tables import from_parquet, to_parquet
from prefect_raybatch.ledger.record_files import (
    put_record_if_absent,
    put_table,
    read_record,
    read_table,
)
from prefect_raybatch.ledger.records import Part, Plan, TableName, digest, dump
from prefect_raybatch.ledger.strict import STRICT, Count, read_json
from prefect_raybatch.storage import FileInfo, Store
from prefect_raybatch.storage.proof import sha256_of


def _of_result(part: Part) -> Part:
    folder, _, name = part.path.partition("/")
    if folder not in RESULT_FOLDERS.values() or not name or "/" in name or name.startswith("."):
        raise PydanticCustomError(
            "part_path", "{path} is not a file of the result", {"path": repr(part.path)}
        )
    return part


Parts = tuple[Annotated[Part, AfterValidator(_of_result)], ...]
INLINE_PARTS = 1000  # most files that the record itself lists


@dataclass(frozen=True)
class Success:
    """The record of a finished run: rows by outcome, result files in order, and when it finished.

    `rows` counts all rows, `skipped` the rows left out. `plan` is the plan's hash, `finished` in
    seconds since 1970. `layout` names the table of the layout that the files follow. Without
    compaction the pieces are the result, and `manifest` names the table that lists them. Above
    INLINE_PARTS files, the stored record has no `parts`, but names the table that lists them as
    `parts_table`. `accepted` are the differences from the plan's job that a person accepted at some
    attempt.
    """

    __pydantic_config__: ClassVar = {**STRICT, "extra": "ignore"}

    rows: Count
    data: Count
    quarantine: Count
    skipped: Count
    parts: Parts
    plan: str
    compact: bool = True
    row_number: str = "_row"
    finished: float = 0.0
    layout: TableName | None = None
    manifest: TableName | None = None
    parts_table: TableName | None = None
    accepted: tuple[Accepted, ...] = ()

    def to_bytes(self) -> bytes:
        return dump(asdict(self))

    @classmethod
    def from_bytes(
        cls, data: bytes, plan: Plan, where: str, table: Callable[[str], bytes] | None = None
    ) -> Success:
        """Decode `data`, the `_SUCCESS` of run directory `where`, and check it against `plan`.

        If the record names a table of its parts (`parts_table`), `table` is called with the name
        and must return the bytes of that table. If `table` is None, `parts` of such a record stays
        empty, and the record is rejected because its rows do not add up.

        Raises `CorruptRun`, with what to do, for a malformed record, one of another plan, or one
        whose rows do not add up.
        """
        path = f"{where}/{SUCCESS}"
        try:
            success = read_json(_SUCCESS, data, path)
        except CorruptRun as error:
            raise CorruptRun(f"{error}. {_not_of(None, plan)}") from None
        if success.plan != plan.hash:
            raise CorruptRun(f"{path} was written for another plan. {_not_of(success.plan, plan)}")
        if success.parts_table is not None and table is not None:
            parts = _parts_of(table(success.parts_table), success.parts_table)
            success = replace(success, parts=parts)
        kept = {kind: sum(p.rows for p in success.of(kind)) for kind in KINDS}
        counted = success.data + success.quarantine + success.skipped
        wanted = {"data": success.data, "quarantine": success.quarantine}
        if not success.compact:
            wanted = dict.fromkeys(KINDS, 0)
        if {success.rows, counted} != {plan.rows} or kept != wanted:
            raise CorruptRun(
                f"{path} does not add up: {success.rows:,} rows, of them {success.data:,} in data, "
                f"{success.quarantine:,} in quarantine and {success.skipped:,} left out; its files "
                f"hold {kept['data']:,} and {kept['quarantine']:,}; the plan has {plan.rows:,} "
                "rows. "
                f"{_not_of(success.plan, plan)}"
            )
        return success

    def of(self, kind: str) -> list[Part]:
        """Return the result files of `kind` (data or quarantine), sorted by number."""
        of_kind = (p for p in self.parts if (_folder_of(p) == DATA_FOLDER) == (kind == "data"))
        return sorted(of_kind, key=lambda part: part.order)


def _folder_of(part: Part) -> str:
    return part.path.partition("/")[0]


_SUCCESS = TypeAdapter(Success)
_PARTS = TypeAdapter(Parts)


def _not_of(theirs: str | None, plan: Plan) -> str:
    named = f"plan {theirs[:12]}" if theirs else "no plan"
    return (
        f"It names {named}, but _raybatch/plan.json is plan {plan.hash[:12]}. Nothing was deleted. "
        "If plan.json was replaced, restore it. Otherwise move _SUCCESS away and run the same "
        "command again: it writes the result from the commits"
    )


def read_success(store: Store, plan: Plan) -> Success | None:
    """Return the `_SUCCESS` record, or None while there is none.

    Raises the errors of `Success.from_bytes`.
    """
    try:
        data = read_record(store, SUCCESS)
        return Success.from_bytes(data, plan, store.uri, partial(read_table, store, by=SUCCESS))
    except FileNotFoundError:
        return None


def put_success(store: Store, success: Success) -> None:
    """Write `_SUCCESS` unless it exists.

    Above INLINE_PARTS files, the table that lists them is written first.
    """
    if len(success.parts) > INLINE_PARTS:
        data = to_parquet(_parts_rows(success.parts))
        name = f"parts-{digest(data)[:16]}.parquet"
        put_table(store, name, data)
        success = replace(success, parts=(), parts_table=name)
    put_record_if_absent(store, SUCCESS, success.to_bytes())


def _parts_rows(parts: tuple[Part, ...]) -> Any:
    import pyarrow as pa

    texts, numbers = ("path", "sha256", "sums", "etag"), ("rows", "bytes", "first", "last")
    types = [(name, pa.string()) for name in texts] + [(name, pa.int64()) for name in numbers]
    return pa.Table.from_pylist([part.__dict__ for part in parts], pa.schema(types))


def _parts_of(data: bytes, name: str) -> tuple[Part, ...]:
    table = from_parquet(data, name, [field.name for field in fields(Part)])
    return read_json(_PARTS, dump(table.to_pylist()), name)


def check_parts(store: Store, parts: Iterable[Part]) -> None:
    """Raise `CorruptRun` naming a part that is missing, of another size, or with other contents.

    Uses one listing. A part is read if its ETag differs from the recorded one. A part without an
    ETag (on a disk) is compared by size: it was read back when it was written.
    """
    parts = tuple(parts)
    there = _listed(store, sorted({_folder_of(part) for part in parts}))
    for part in parts:
        info = there.get(part.path)
        if info is None:
            fault = "is missing"
        elif info.size != part.bytes:
            fault = f"has {info.size:,} bytes instead of {part.bytes:,}"
        elif part.etag is not None and info.etag != part.etag and not _same(store, part):
            fault = "has different contents"
        else:
            continue
        raise CorruptRun(
            f"{store.uri}/{part.path}, a file of the result ({part.rows:,} rows), {fault}. "
            "Nothing was deleted. Restore the file. Or, if _raybatch/pieces still exists, move "
            "_SUCCESS away and run the same command again: it writes the result anew"
        )


def _same(store: Store, part: Part) -> bool:
    """Return whether a part whose ETag differs has the recorded contents.

    A copied bucket gives other ETags to the same contents.
    """
    with store.open(part.path) as stream:
        return sha256_of(stream) == part.sha256


def _listed(store: Store, folders: Iterable[str]) -> dict[str, FileInfo]:
    """Return the files in these folders of the result, by path."""
    return {info.path: info for folder in folders for info in store.list(folder)}


def strays(paths: Iterable[str], named: Iterable[str]) -> list[str]:
    """Return the `paths` that are not in `named`, but that readers of a folder would include.

    Readers skip names that begin with a dot or an underscore.
    """
    known = set(named)
    return sorted(
        path
        for path in paths
        if path not in known and not any(part[0] in "._" for part in path.split("/")[1:])
    )


def check_no_strays(store: Store, parts: Iterable[Part]) -> None:
    """Raise `CorruptRun` naming a file in the result's folders that is not one of its `parts`.

    Files that readers of a folder skip are allowed (see `strays`).
    """
    unexpected = strays(_listed(store, RESULT_FOLDERS.values()), (part.path for part in parts))
    if unexpected:
        more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
        raise CorruptRun(
            f"{store.uri}/{unexpected[0]}{more} is not a file of this result, but readers of "
            "the folder would include it. Nothing was deleted, and _SUCCESS was not written. Move "
            "the file elsewhere, then run the same command again"
        )
