"""Plan and commit records: who wins, what is refused, and that only whole shards commit."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from helpers.small import (
    MODEL,
    Passes,
    input_rows,
    make_job,
    read_json,
    small_run,
    success_of,
)
from helpers.specs import new_plan_of
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.api import infer_run
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.driver.driver import Driver
from prefect_raybatch.errors import CorruptRun, PlanMismatch, UnsafeStore
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.ledger.layout import commit_path
from prefect_raybatch.ledger.ledger import FAILURES, Coverage, Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.positions import Positions, disjoint
from prefect_raybatch.ledger.records import InputFile, Receipt, Unit
from prefect_raybatch.remote.records import JobRecords
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.run import run_of
from prefect_raybatch.runs.status import status
from prefect_raybatch.storage import LocalStore, open_store

WRITERS = 16


def plan_of(**groups):
    files = [InputFile("in.parquet", 10, None, 1, 20)]
    job = make_job(**groups)
    return new_plan_of(
        Resolved.of(job, MODEL), "key", files, input_rows(0, 1).schema, 50.0, snapshot=False
    )


def at_once(work, items):
    """Runs `work(item)` in one thread an item, all let go together."""
    start = Barrier(len(items))

    def one(item):
        start.wait()
        return work(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(one, items))


# --- plan ---------------------------------------------------------------------------------------


def test_of_many_planners_all_hold_the_winners_plan(tmp_path):
    made = []
    for number in range(WRITERS):  # same answers, other shards: each plan has its own tables
        source = {"uri": "data/in.parquet", "rows_per_shard": number + 1}
        made.append(plan_of(source=source))
    assert len({plan.hash for plan, _ in made}) == WRITERS
    held = at_once(lambda one: Ledger(open_store(str(tmp_path))).create_plan(*one), made)
    ledger = Ledger(open_store(str(tmp_path)))
    winner = ledger.load_plan()
    assert {plan.hash for plan in held} == {winner.hash}
    assert len(ledger.shards(winner)) == winner.shards
    assert ledger.files(winner)[0].uri == "in.parquet"


def test_a_planner_of_another_job_is_refused_and_changes_nothing(tmp_path):
    ledger = Ledger(open_store(str(tmp_path)))
    first = ledger.create_plan(*plan_of())
    before = (tmp_path / "_raybatch/plan.json").read_bytes()
    with pytest.raises(PlanMismatch, match=r"sampling\.max_tokens: 16 -> 5"):
        ledger.create_plan(*plan_of(sampling={"max_tokens": 5}))
    assert (tmp_path / "_raybatch/plan.json").read_bytes() == before
    assert ledger.load_plan() == first


def test_a_table_that_is_there_is_not_written_again_by_whoever_plans_later(tmp_path, monkeypatch):
    plan, tables = plan_of()
    first = Ledger(LocalStore(str(tmp_path)))
    first.create_plan(plan, tables)

    def badly(store, path, data):
        raise AssertionError(f"{path} might be kept badly, and the plan names it")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put", badly)
        assert Ledger(LocalStore(str(tmp_path))).create_plan(plan, tables) == plan
    path = tmp_path / "_raybatch" / plan.shards_table
    data = path.read_bytes()
    path.write_bytes(data[:-1])  # kept badly by an earlier attempt: written anew
    first.create_plan(plan, tables)
    assert path.read_bytes() == data


def test_no_plan_is_none_and_damage_is_corrupt(tmp_path):
    ledger = Ledger(open_store(str(tmp_path)))
    assert ledger.load_plan() is None
    (tmp_path / "_raybatch").mkdir()
    for data in (b"", b"{}", b"\xff", b" " * (9 << 20)):
        (tmp_path / "_raybatch/plan.json").write_bytes(data)
        with pytest.raises(CorruptRun):
            ledger.load_plan()


def test_a_table_that_was_changed_or_is_gone_is_corrupt(tmp_path):
    run = small_run(tmp_path)
    other = small_run(tmp_path.parent / "other", per_shard=2)
    shards = tmp_path / "_raybatch" / run.plan.shards_table
    shards.write_bytes((other.root / "_raybatch" / other.plan.shards_table).read_bytes())
    with pytest.raises(CorruptRun, match="does not match the hash"):
        run.ledger.shards(run.plan)
    shards.unlink()
    with pytest.raises(CorruptRun, match="which does not exist"):
        run.ledger.shards(run.plan)
    wrong = replace(run.plan, shards_table=other.plan.shards_table)
    (tmp_path / "_raybatch" / other.plan.shards_table).write_bytes(
        (other.root / "_raybatch" / other.plan.shards_table).read_bytes()
    )
    with pytest.raises(CorruptRun, match=r"does not match the plan: .* shards"):
        run.ledger.shards(wrong)


# --- commits ------------------------------------------------------------------------------------


def test_a_commit_is_what_the_receipts_say(tmp_path):
    run = small_run(tmp_path, rows=10, per_shard=10)
    front, back = run.receipt(Unit(0, 0, 4)), run.receipt(Unit(0, 4, 6))
    back = replace(back, good=Positions.spans((4, 9)), skipped=Positions.spans((9, 10)))
    commit = run.ledger.commit(run.plan, 10, [back, front])  # in the order they came
    assert commit.good.ranges == ((0, 9),) and commit.skipped.ranges == ((9, 10),)
    assert not commit.failed
    assert {p.path for p in commit.pieces} == {p.path for r in (front, back) for p in r.pieces}
    assert commit.stats.rows == 10 and commit.plan_hash == run.plan.hash
    assert run.ledger.read_commit(run.plan, 0) == commit
    assert run.ledger.committed(run.plan).tolist() == [True]


@pytest.mark.parametrize(
    "held",
    [
        [((0, 9),)],
        [((1, 10),)],
        [((0, 11),)],
        [((0, 5),), ((4, 10),)],
        [((0, 5),), ((6, 10),)],
        [((0, 10),), ((0, 10),)],
        [((0, 10),), ()],
        [()],
    ],
)
def test_a_shard_that_is_not_covered_exactly_once_never_commits(tmp_path, held):
    run = small_run(tmp_path, rows=10, per_shard=10)
    receipts = [Receipt(0, "a", good=Positions.spans(*good)) for good in held]
    with pytest.raises(CorruptRun, match="do not cover its 10 rows exactly once"):
        run.ledger.commit(run.plan, 10, receipts)
    assert not run.ledger.committed(run.plan).any()


def test_of_many_committers_one_wins_and_its_record_stays(tmp_path):
    run = small_run(tmp_path, rows=20, per_shard=20)
    receipts = [run.receipt(run.whole(0), attempt=f"attempt-{n}") for n in range(WRITERS)]
    made = at_once(lambda r: Ledger(open_store(str(tmp_path))).commit(run.plan, 20, [r]), receipts)
    won = [commit for commit in made if commit is not None]
    assert len(won) == 1
    assert run.ledger.read_commit(run.plan, 0) == won[0]
    assert run.ledger.commit(run.plan, 20, receipts[:1]) is None  # also later
    assert run.ledger.read_commit(run.plan, 0) == won[0]


def test_commits_of_another_plan_or_place_are_corrupt(tmp_path):
    run = small_run(tmp_path)
    run.commit(0)
    path = tmp_path / commit_path(0)
    good = read_json(path)
    for change, said in [
        ({"plan_hash": "0" * 64}, "written for another plan"),
        ({"shard": 1}, "holds the commit of shard 1"),
        ({"format": 9}, "format 9"),
        ({"extra": 1}, "unknown fields extra"),
    ]:
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(CorruptRun, match=said):
            run.ledger.read_commit(run.plan, 0)
        with pytest.raises(CorruptRun, match=said):
            list(run.ledger.commits(run.plan, run.ledger.listing(run.plan)))
    with pytest.raises(CorruptRun, match="is missing, although its shard was committed"):
        run.ledger.read_commit(run.plan, 1)


@pytest.mark.parametrize("name", ["00000004.json", "99999999.json", "1234567890.json"])
def test_a_commit_of_a_shard_that_is_not_planned_is_corrupt(tmp_path, name):
    run = small_run(tmp_path)  # shards 0 to 3
    run.commit(0)
    (tmp_path / "_raybatch/commits" / name).write_text("{}")
    with pytest.raises(CorruptRun, match="beyond the last shard"):
        run.ledger.committed(run.plan)


STRANGE = [
    "00000001 2.json",
    "00000001 (copy) 1.json",
    "00000000 (copy).json",
    "copy of 1.json",
    "1.json",
    "000000001.json",
    "00000001.json~",
    "00000001.json.bak",
    "._00000001.json",
    "old/00000001.json",
    "x.json",
]


@pytest.mark.parametrize("name", STRANGE)
def test_a_name_that_is_not_quite_a_commits_is_no_commit_and_is_told(tmp_path, name, caplog):
    run = small_run(tmp_path)
    run.commit(0)
    strange = tmp_path / "_raybatch/commits" / name
    strange.parent.mkdir(exist_ok=True)
    strange.write_bytes((tmp_path / commit_path(0)).read_bytes())
    assert run.ledger.committed(run.plan).tolist() == [True, False, False, False]
    path = f"_raybatch/commits/{name}"
    assert run.ledger.listing(run.plan).strays == [path]
    assert status(str(tmp_path)).strays == (path,)
    found = verify(run.store)
    assert found.strays == [path] and not [fault for fault in found.faults if name in fault]
    driver = Driver(run.plan, run.shards, run.ledger, Limits())
    assert driver.resume().done == 5 and path in caplog.text
    driver.run(Passes(run), Passes(run).quarantine)
    assert run.ledger.committed(run.plan).all() and strange.exists()


def test_copies_of_other_records_count_for_nothing(tmp_path):
    run = small_run(tmp_path)
    run.commit(0)
    run.ledger.note_attempt("a1", {"started": "2026"})
    records = JobRecords(run.store, "key", run.plan.hash)
    assert records.add(1, {}, "http://a", None)
    folder = tmp_path / "_raybatch"
    for name in (
        "attempts/a1 2.json",
        "attempts/a1.json~",
        "attempts/._a1.json",
        "attempts/x/b.json",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\0not JSON")
    for name in ("0002 (copy).json", "0002.json~", "00003.json", "old/0004.json", "0001 5.json"):
        (folder / "jobs" / name).parent.mkdir(exist_ok=True)
        (folder / "jobs" / name).write_text("{}")
    assert run.ledger.attempts() == ["a1"]
    assert [a["attempt"] for a in status(str(tmp_path)).attempts] == ["a1"]
    assert records.newest_number() == 1
    assert records.newest().number == 1


def test_an_attempts_note_that_is_damaged_hides_nothing_else(tmp_path):
    run = small_run(tmp_path)
    run.ledger.note_attempt("a1", {"started": "2026"})
    (tmp_path / "_raybatch/attempts/b2.json").write_bytes(b"{")
    assert [a["attempt"] for a in status(str(tmp_path)).attempts] == ["a1"]


def test_commits_come_by_shard(tmp_path):
    run = small_run(tmp_path, rows=90, per_shard=1)
    assert not run.ledger.is_committed(3)
    run.commit_all()
    listing = run.ledger.listing(run.plan)
    assert [c.shard for c in run.ledger.commits(run.plan, listing)] == list(range(90))
    assert run.ledger.is_committed(3) and not run.ledger.is_committed(90)
    assert listing.done.all()


def test_success_is_written_once(tmp_path):
    run = small_run(tmp_path)
    run.commit_all()
    first = success_of(run, compact=False)
    assert run.ledger.finished() is None
    run.ledger.succeed(first)
    run.ledger.succeed(replace(first, finished=2.0))
    assert run.ledger.finished() == run.ledger.finished(run.plan) == first


# --- coverage -----------------------------------------------------------------------------------

ROWS = 12
SHARDS = Shards(np.array([0, ROWS, ROWS + 3]))


def piece_of(positions, kind="good", shard=0) -> Receipt:
    return Receipt(shard, "a", **{kind: Positions.of(np.array(sorted(positions)))})


def test_a_receipt_that_overlaps_is_rejected_whole():
    coverage = Coverage(SHARDS)
    assert coverage.add(piece_of(range(6))) is None
    # It would complete the shard by count of rows, and positions 5 twice and 11 never.
    assert coverage.add(piece_of(range(5, 11))) is None
    assert coverage.gaps(0) == ((6, 12),)
    assert coverage.add(piece_of(range(5, 12))) is None
    assert coverage.gaps(0) == ((6, 12),)
    whole = coverage.add(piece_of(range(6, 12), "failed"))
    assert [r.held.ranges for r in whole] == [((0, 6),), ((6, 12),)]


@pytest.mark.parametrize(
    "receipt",
    [
        Receipt(0, "a"),
        Receipt(0, "a", good=Positions.spans((0, 13))),
        Receipt(0, "a", good=Positions.spans((0, 6)), failed=Positions.spans((5, 12))),
    ],
)
def test_a_receipt_of_no_or_impossible_positions_counts_nothing(receipt):
    coverage = Coverage(SHARDS)
    assert coverage.add(receipt) is None
    assert coverage.gaps(0) == ((0, ROWS),)


def test_shards_do_not_mix_and_can_be_dropped():
    coverage = Coverage(SHARDS)
    coverage.add(piece_of(range(6)))
    assert coverage.add(piece_of(range(3), shard=1)) is not None
    coverage.drop(0)
    assert coverage.gaps(0) == ((0, ROWS),)
    assert coverage.add(piece_of(range(6, 12))) is None  # what was dropped is not counted
    with pytest.raises(CorruptRun):
        coverage.add(piece_of(range(3), shard=2))


runs_of_positions = st.sets(st.integers(0, ROWS), min_size=1, max_size=ROWS)
kinds = st.sampled_from(["good", "failed", "skipped"])


@given(st.lists(st.tuples(runs_of_positions, kinds), max_size=12), st.randoms())
def test_no_order_of_duplicates_and_overlaps_commits_a_shard_wrongly(arrivals, order):
    """Arbitrary receipts, and a split of the shard among them: whatever comes back as whole is a
    partition of the shard, and every receipt in it came as it is."""
    cuts = sorted(order.sample(range(1, ROWS), 3))
    split = [set(range(a, b)) for a, b in zip([0, *cuts], [*cuts, ROWS], strict=True)]
    receipts = [piece_of(positions, kind) for positions, kind in arrivals]
    receipts += [piece_of(part) for part in split] * 2
    order.shuffle(receipts)
    coverage, committed = Coverage(SHARDS), None
    for receipt in receipts:
        whole = coverage.add(receipt)
        if whole is not None:
            committed = whole
            break
    if committed is None:
        # Then nothing can be lost either: what is held is disjoint, the rest is a gap.
        assert coverage.gaps(0)
        return
    assert all(any(r is given for given in receipts) for r in committed)
    held = [p for r in committed for p in r.held.numbers]
    assert sorted(held) == list(range(ROWS))
    assert disjoint(r.held for r in committed) == Positions.spans((0, ROWS))


@given(st.sets(st.integers(1, ROWS - 1)), st.randoms())
def test_any_split_in_any_order_commits_once(cuts, order):
    edges = [0, *sorted(cuts), ROWS]
    parts = [piece_of(range(a, b)) for a, b in pairwise(edges)]
    order.shuffle(parts)
    coverage = Coverage(SHARDS)
    results = [coverage.add(part) for part in parts]
    assert all(result is None for result in results[:-1])
    assert {r.held for r in results[-1]} == {r.held for r in parts}
    assert sum(len(r.held) for r in results[-1]) == ROWS


def test_a_ledger_needs_no_more_than_a_folder(tmp_path: Path):
    """Records are plain files at the documented paths, for whoever looks with other tools."""
    run = small_run(tmp_path, rows=2, per_shard=1)
    run.commit_all()
    run.ledger.note_attempt("a1", {"host": "h"})
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.json"))
    assert names == [
        "_raybatch/attempts/a1.json",
        "_raybatch/commits/00000000.json",
        "_raybatch/commits/00000001.json",
        "_raybatch/plan.json",
    ]


# --- the store ----------------------------------------------------------------------------------


def test_an_attempt_on_a_store_that_no_longer_writes_if_absent_starts_nothing(
    tmp_path, monkeypatch
):
    """As after a move to another store, or behind another gateway."""

    def careless(self: LocalStore, path: str, data: bytes) -> bool:
        self.put(path, data)
        return True

    def never(*_: object) -> None:
        raise RuntimeError("a cluster was started")

    monkeypatch.setattr(cluster, "connected", never)
    run = small_run(tmp_path)
    known = run_of(run.store, run.plan, run.ledger)
    with pytest.raises(RuntimeError, match="a cluster was started"):
        infer_run(run.job, known)
    before = {path for path in tmp_path.rglob("*") if "attempts" not in str(path)}
    with monkeypatch.context() as patch, pytest.raises(UnsafeStore, match="does not honour"):
        patch.setattr(LocalStore, "put_if_absent", careless)
        infer_run(run.job, known)
    assert {path for path in tmp_path.rglob("*") if "attempts" not in str(path)} == before
    run.commit_all()
    monkeypatch.setattr(LocalStore, "probe", never)
    assert infer_run(run.job, known).done == 20  # nothing to commit, so nothing to probe


def test_a_commit_keeps_the_most_frequent_messages_and_sums_the_others_by_kind(tmp_path):
    run = small_run(tmp_path)
    often = {FailureKey("engine", "Often", str(n)): 3 for n in range(FAILURES)}
    kinds = [("parse", "A"), ("parse", "A"), ("parse", "B"), ("engine", "A")]
    seldom = {FailureKey(*kind, str(n)): n % 2 + 1 for n, kind in enumerate(kinds)}
    receipt = replace(run.receipt(run.whole(0)), failures={**seldom, **often})
    commit = run.ledger.commit(run.plan, run.shards[0].rows, [receipt])
    assert commit is not None
    others = {("parse", "A"): 3, ("parse", "B"): 1, ("engine", "A"): 2}
    summed = {FailureKey(*kind, "(other messages)"): rows for kind, rows in others.items()}
    assert commit.failures == {**often, **summed}
