"""Bugs planted in the protocol, each of which the schedules must find.

A bug is a change of the source of some functions. The changed text must stand in the function
exactly once: a mutant that no longer fits the code says so.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from types import CodeType, FunctionType
from typing import Any

PACKAGE = "prefect_raybatch"


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new` in the source of `function`, MODULE:NAME within the package."""

    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A planted bug: `within` schedules of any seed are to find it."""

    name: str
    title: str
    edits: tuple[Edit, ...]
    within: int = 100
    quick: bool = False  # found so early that each `make test` looks for it


MUTANTS = (
    Mutant(
        "piece_late",
        "a receipt exists before its piece is durable",
        (
            Edit(
                "stages.finish:Finish.write_piece",
                "put_proved(self.store, piece_path(name), data)",
                "__import__('simulation.scheduler', fromlist=['Pool']).Pool(1).submit("
                "put_proved, self.store, piece_path(name), data)",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "piece_unproved",
        "a piece is trusted without proof that the store keeps it",
        (
            Edit(
                "stages.finish:Finish.write_piece",
                "put_proved(self.store, piece_path(name), data)",
                "self.store.put(piece_path(name), data)",
            ),
        ),
        within=200,
        quick=True,
    ),
    Mutant(
        "piece_name",
        "two attempts write a piece under the same name",
        (
            Edit(
                "stages.finish:Finish.write_piece",
                "{uuid.uuid4().hex}",
                "{len(kind):032x}",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "commit_put",
        "a commit is written without if-absent",
        (
            Edit(
                "ledger.ledger:Ledger.commit",
                "won = put_record_if_absent(",
                "won = True or put_record_if_absent(",
            ),
            Edit(
                "ledger.ledger:Ledger.commit",
                "return commit if won else None",
                "put_record(self.store, path, commit.body)\n    return commit",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "s3_if_absent",
        "the PUT to S3 lacks If-None-Match",
        (Edit("storage.s3:S3Store._create", ', "IfNoneMatch": "*"', ""),),
        quick=True,
    ),
    Mutant(
        "disk_if_absent",
        "on a disk, a rename replaces the hard link",
        (
            Edit(
                "storage.local:LocalStore.put_if_absent",
                "self._land(path, data, len(data), _link)",
                "self._land(path, data, len(data), os.replace)",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "plan_loser",
        "the loser for plan.json continues with its own plan",
        (
            Edit(
                "ledger.ledger:Ledger.create_plan",
                "winner = self.load_plan()",
                "return plan",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "plan_put",
        "plan.json is written without if-absent",
        (
            Edit(
                "ledger.ledger:Ledger.create_plan",
                "if put_record_if_absent(self.store, PLAN, plan.to_bytes()):",
                "put_record(self.store, PLAN, plan.to_bytes())\n    if True:",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "overlap",
        "overlapping receipts both count",
        (
            Edit(
                "ledger.ledger:Coverage.add",
                "union = disjoint((self._held.get(shard.id, NO_POSITIONS), held))\n"
                "    if union is None:\n"
                "        return None",
                "union = disjoint((self._held.get(shard.id, NO_POSITIONS), held)) or (\n"
                "        Positions.spans((0, shard.rows)))",
            ),
            Edit(
                "ledger.ledger:Ledger.commit",
                "if not all(parts) or held != Positions.spans((0, rows)):",
                "if False:",
            ),
        ),
        within=200,
    ),
    Mutant(
        "coverage",
        "a shard is committed before its receipts cover it",
        (
            Edit("ledger.ledger:Coverage.add", "if len(union) < shard.rows:", "if False:"),
            Edit(
                "ledger.ledger:Ledger.commit",
                "if not all(parts) or held != Positions.spans((0, rows)):",
                "if False:",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "finalize_early",
        "finalize does not wait for all shards",
        (
            Edit("result.survey:survey", "if not listing.done.all():", "if False:"),
            Edit("result.survey:survey", "if found.tally.rows != plan.rows:", "if False:"),
        ),
        within=200,
    ),
    Mutant(
        "reap_by_age",
        "reap removes pieces by age alone",
        (
            Edit(
                "result.reap:orphans",
                "if success is not None or (shard < plan.shards and done[shard]):",
                "if True:",
            ),
        ),
    ),
    Mutant(
        "reap_named",
        "reap removes pieces that a commit names",
        (
            Edit(
                "result.reap:orphans",
                'if match is None or info.path.rpartition("/")[2] in named:',
                "if match is None:",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "stale_list",
        "pieces are deleted by a stale listing of commits",
        (
            Edit(
                "result.reap:orphans",
                "done, named = np.ones(plan.shards, bool), pieces_named(ledger.store, success)",
                "done, there = np.ones(plan.shards, bool), ledger.listing(plan)\n"
                "        named = {p.path for c in ledger.commits(plan, there) for p in c.pieces}",
            ),
        ),
        within=300,
    ),
    Mutant(
        "pieces_first",
        "pieces are deleted before _SUCCESS exists",
        (
            Edit(
                "runs.finalize_run:finalize_spec",
                "ledger.succeed(success)",
                "ledger.store.delete(i.path for i in list(store.list('_raybatch/pieces')))\n"
                "    ledger.succeed(success)",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "success_put",
        "_SUCCESS is written without if-absent",
        (
            Edit(
                "ledger.success:put_success",
                "put_record_if_absent(store, SUCCESS, success.to_bytes())",
                "store.put(SUCCESS, success.to_bytes())",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "part_put",
        "a missing part is written by a plain PUT",
        (
            Edit(
                "result.parts:_look",
                "store.put_file_if_absent(path, local_path)",
                "__import__('shutil').copy(local_path, local_path + '.put')\n"
                "        store.put_file(path, local_path + '.put')",
            ),
        ),
        within=200,
    ),
    Mutant(
        "part_unread",
        "an existing part is adopted without reading its rows",
        (
            Edit(
                "result.parts:_look",
                "adopted = same(path, local_path)",
                "adopted = __import__('hashlib').sha256(store.read(path)).hexdigest()",
            ),
        ),
        within=400,
    ),
    Mutant(
        "part_replaced",
        "a part with the same rows in other bytes is replaced, without a fence",
        (
            Edit(
                "result.parts:_look",
                "adopted = same(path, local_path)",
                "adopted = None",
            ),
            Edit("result.parts:_look", "check_unfinished(store)\n    log.warning", "log.warning"),
        ),
    ),
    Mutant(
        "layout_own",
        "a finalizer ignores the existing layout",
        (
            Edit(
                "result.survey:layout_of",
                "    if (there := read_layout(ledger, plan)) is not None:\n"
                "        return _checked(there, survey, row_number)\n"
                "    made, spans = chosen_layout(ledger, plan, survey, row_number, file_bytes)\n",
                "    return chosen_layout(ledger, plan, survey, row_number, file_bytes)\n",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "retry_taken",
        "a retry takes rows of another retry",
        (
            Edit(
                "runs.retry:FailedRows.tables",
                "mask &= ~among(self.all_taken, numbers)",
                "pass",
            ),
            Edit(
                "api.retry:retry_request",
                "if going is None and is_retried:",
                "if False:",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "retry_numbers",
        "a retry's rows lose the numbers of the first run",
        (
            Edit(
                "result.parts:PartTask.numbers_of",
                "return positions if self.numbers is None else",
                "return positions if True else",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "checkpoint",
        "the loser of a commit counts its own; a counted one is trusted unchecked",
        (
            Edit(
                "ledger.checkpoints:folded",
                "and confirmed(shard, body)",
                "",
            ),
            Edit(
                "ledger.ledger:Ledger.commit",
                "return commit if won else None",
                "return commit",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "table_put",
        "an existing table is written again",
        (
            Edit(
                "ledger.record_files:put_table",
                "put_same_proved(store, path, data)",
                "put_proved(store, path, data)",
            ),
        ),
        within=1500,
    ),
    Mutant(
        "tasks_unwaited",
        "finalize does not wait for the last writers on the cluster",
        (
            Edit(
                "cluster.side_by_side:run_in_parallel",
                "while under_way:\n            yield _next(under_way)",
                "pass",
            ),
            Edit(
                "result.finalize:_Work.done",
                "if unwritten:\n        raise",
                "if False:\n        raise",
            ),
            Edit(
                "result.finalize:_Work.done",
                "for span in self.spans]",
                "for span in self.spans if self.path(span) in parts]",
            ),
        ),
        quick=True,
    ),
    Mutant(
        "repair_unread",
        "a repair keeps pieces without comparing them with their commit",
        (
            Edit(
                "result.healthy:_of_pieces",
                "data, table = checked_piece(ledger.store, commit.shard, piece)",
                "data = ledger.store.read(piece_path(piece.path))\n"
                "        table = pq.read_table(pa.BufferReader(data))",
            ),
        ),
        within=300,
    ),
    Mutant(
        "repair_holes",
        "a repair keeps a shard with rows in a lost file",
        (
            Edit(
                "result.healthy:_intact_shards",
                "if not _are_at(numbers - shard.start, positions):",
                "if False:",
            ),
        ),
        within=300,
    ),
    Mutant(
        "repair_tidies",
        "a repair deletes the pieces of the damaged run",
        (
            Edit(
                "runs.repair:_fork",
                "supersede(old, fork.run_key)",
                "supersede(old, fork.run_key)\n"
                "    old.store.delete(i.path for i in list(old.store.list('_raybatch/pieces')))",
            ),
        ),
        within=200,
    ),
    Mutant(
        "unsynced_file",
        "on a disk a file appears before its bytes are synced",
        (Edit("storage.local:LocalStore._land", "os.fsync(handle.fileno())", "pass"),),
        quick=True,
    ),
    Mutant(
        "unsynced_part",
        "on a disk a file of the result appears before its bytes are synced",
        (Edit("storage.local:LocalStore._land_file", "_sync(source)", "pass"),),
        within=400,
    ),
    Mutant(
        "unsynced_name",
        "on a disk a name counts before its folder is synced",
        (Edit("storage.local:LocalStore._land", "_sync(folder)", "pass"),),
        within=200,
    ),
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The package with the bug in it. Raises ValueError where it does not fit the code any more."""
    sources: dict[str, str] = {}
    functions = {}
    for edit in mutant.edits:
        function = functions.setdefault(edit.function, _function(edit.function))
        source = sources.get(edit.function) or textwrap.dedent(inspect.getsource(function))
        if source.count(edit.old) != 1:
            raise ValueError(
                f"mutant {mutant.name}: {edit.old!r} is {source.count(edit.old)} times in "
                f"{edit.function}; the code has changed, and so must tests/simulation/mutants.py"
            )
        sources[edit.function] = source.replace(edit.old, edit.new)
    before = {name: function.__code__ for name, function in functions.items()}
    try:
        for name, function in functions.items():
            function.__code__ = _compiled(function, sources[name])
        yield
    finally:
        for name, function in functions.items():
            function.__code__ = before[name]


def _function(name: str) -> FunctionType:
    found: Any = resolve_name(f"{PACKAGE}.{name}")
    assert isinstance(found, FunctionType), name
    return found


def _compiled(function: FunctionType, source: str) -> CodeType:
    """The code of the changed source, put in place: whoever has imported the function runs it."""
    flags = __future__.annotations.compiler_flag
    whole = compile(source, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    codes = (const for const in whole.co_consts if isinstance(const, CodeType))
    made = next(code for code in codes if code.co_name == function.__name__)
    assert made.co_freevars == function.__code__.co_freevars
    return made
