"""A run that lost files goes on in a fork: what is whole is taken over, the rest is done again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers.command_line import called
from helpers.nights import Killed, Nights, words
from helpers.small import Passes, SmallRun, input_rows, make_job, small_run, success_of
from s3server import S3Server

from prefect_raybatch.api import plan_run, publish_run
from prefect_raybatch.driver.driver import Driver
from prefect_raybatch.errors import ConfigError, CorruptRun, IncompleteRun, PlanMismatch
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.accepted import Accepted, accepted_note, all_accepted
from prefect_raybatch.ledger.checkpoints import CheckpointWriter
from prefect_raybatch.ledger.forks import follow_forks, fork_key
from prefect_raybatch.ledger.layout import (
    PRECISION,
    REPORT,
    REPORT_HTML,
    REPORT_PAGE,
    SUPERSEDED_BY,
    commit_path,
    piece_path,
    row_sums_path,
)
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.precision import PrecisionNote, read_precision, record_precision
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.quality.accuracy import Accuracy, put_accuracy
from prefect_raybatch.report.records import put_report, read_report
from prefect_raybatch.result.finalize import finalize
from prefect_raybatch.result.reap import orphans
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.open_run import open_run
from prefect_raybatch.runs.repair import Repaired, repair_run
from prefect_raybatch.runs.status import status
from prefect_raybatch.storage import Store, open_store

FAILED = {(0, 4), (2, 1)}


def flip(store: Store, path: str) -> None:
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.put(path, bytes(data))


def lose(store: Store, path: str) -> None:
    store.delete([path])


def close(run: SmallRun, compact: bool = True) -> None:
    """Finishes a run of which all shards are committed, and removes its pieces."""
    size = max(p.bytes for s in range(4) for p in run.ledger.read_commit(run.plan, s).pieces)
    made = finalize(run.ledger, run.plan, run.shards, "_row", 2 * size - 1, compact)
    success = success_of(run, made.parts, compact=compact)
    run.ledger.succeed(replace(success, manifest=made.manifest))
    run.store.delete([info.path for info in orphans(run.ledger, run.plan)])


def old_run(root: str | Path, finished: bool, compact: bool = True) -> SmallRun:
    output = {"uri": "out", "postprocess": "helpers.functions:skip_odd"}
    run = small_run(root, output=output)  # type: ignore[arg-type]
    run.commit_all(FAILED)
    if finished:
        close(run, compact)
    return run


def files(store: Store) -> dict[str, bytes]:
    return {info.path: store.read(info.path) for info in store.list() if info.path != SUPERSEDED_BY}


def rows_of(store: Store, folder: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for info in store.list(folder):
        with store.open(info.path) as stream:
            found |= {row["_row"]: row for row in pq.read_table(stream).to_pylist()}
    return found


def go_on(run: SmallRun, root: str) -> SmallRun:
    """Resumes the fork at `root`, writes and proves its result."""
    store = open_store(root)
    ledger = Ledger(store)
    plan = ledger.load_plan()
    assert plan is not None
    fork = SmallRun(Path(root), plan, ledger.shards(plan), ledger, store, run.job)
    driver = Driver(plan, fork.shards, ledger, Limits(max_failed_fraction=0.5))
    driver.resume()
    passes = Passes(fork, failed=FAILED)
    driver.run(passes, passes.quarantine)
    close(fork)
    assert verify(store).ok
    return fork


def piece(run: SmallRun, kind: str) -> str:
    return next(
        piece_path(p.path) for p in run.ledger.read_commit(run.plan, 2).pieces if p.kind == kind
    )


Damage = Callable[[SmallRun], list[int]]  # what was done, and which shards are lost by it


def piece_lost(run: SmallRun) -> list[int]:
    lose(run.store, piece(run, "data"))
    return [2]


def piece_rotten(run: SmallRun) -> list[int]:
    flip(run.store, piece(run, "quarantine"))
    return [2]


def commit_rotten(run: SmallRun) -> list[int]:
    run.store.put(commit_path(1), run.store.read(commit_path(1))[:-9])
    return [1]


def commit_lost(run: SmallRun) -> list[int]:
    lose(run.store, commit_path(1))
    return [1]


def part_rotten(run: SmallRun) -> list[int]:
    name = "data/part-00001.parquet"
    with run.store.open(name) as stream:
        numbers = pq.read_table(stream, columns=["_row"])["_row"].to_pylist()
    flip(run.store, name)
    return sorted({number // 5 for number in numbers})


def quarantine_lost(run: SmallRun) -> list[int]:
    lose(run.store, "_quarantine/part-00000.parquet")
    return [0, 2]


UNFINISHED = [piece_lost, piece_rotten, commit_rotten]
FINISHED = [commit_lost, commit_rotten, part_rotten, quarantine_lost]
CASES = [
    *(("unfinished", damage) for damage in UNFINISHED),
    *(("finished", damage) for damage in FINISHED),
    *(("pieces", damage) for damage in (piece_lost, commit_lost)),
]


def repaired(root: str, state: str, damage: Damage) -> tuple[SmallRun, Repaired]:
    """Damages a run, repairs it, and looks that the old directory is as it was."""
    run = old_run(root, state != "unfinished", state == "finished")
    lost = damage(run)
    before = files(run.store)
    found = repair_run(root)
    assert found.run_key == "key.m1" and list(found.lost) == lost
    assert found.taken == 4 - len(lost) and found.faults
    assert files(run.store) == before
    return run, found


@pytest.mark.parametrize(("state", "damage"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_what_is_lost_costs_its_shards_and_not_the_run(tmp_path, state, damage):
    whole = old_run(tmp_path / "other" / "key", True)
    root = f"{tmp_path}/out/key"
    run, _ = repaired(root, state, damage)
    fork = go_on(run, f"{root}.m1")
    assert fork.plan.forked_from == {"run_key": "key", "plan": run.plan.hash}
    assert fork.plan.fingerprint == run.plan.fingerprint and fork.plan.run_key == "key.m1"
    for folder in ("data", "_quarantine"):
        assert rows_of(fork.store, folder) == rows_of(whole.store, folder)
    ledger, plan = follow_forks(run.ledger, run.plan)
    assert (ledger.store.uri, plan.hash) == (fork.store.uri, fork.plan.hash)


@pytest.mark.parametrize("state", ["unfinished", "finished"])
def test_on_an_s3_server(s3: S3Server, monkeypatch, state: str):
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    root = f"s3://repair/{state}/key"
    run, _ = repaired(root, state, piece_rotten if state == "unfinished" else part_rotten)
    fork = go_on(run, f"{root}.m1")
    assert sorted(rows_of(fork.store, "_quarantine")) == [4, 11]


def test_a_record_that_rots_where_it_lies_is_lost_whatever_copies_there_are(
    s3: S3Server, monkeypatch
):
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    root = "s3://repair/copies/key"
    run = old_run(root, finished=False)
    folder = CheckpointWriter(run.store, run.plan.hash)
    for shard in range(4):
        folder.add(run.ledger.read_commit(run.plan, shard))
    folder.flush(1)
    read = type(run.store).read

    def rotten(store: Store, path: str, max_bytes: int | None = None) -> bytes:
        data: bytes = read(store, path, max_bytes)  # type: ignore[arg-type]
        return data[:50] if (store.uri, path) == (root, commit_path(1)) else data

    monkeypatch.setattr(type(run.store), "read", rotten)
    found = repair_run(root)
    assert (found.lost, found.taken) == ((1,), 3)


def test_a_repair_that_was_killed_goes_on(tmp_path, monkeypatch):
    root = f"{tmp_path}/key"
    run = old_run(root, False)
    piece_lost(run)
    commit = Ledger.commit

    def dies(ledger, plan, rows, receipts):
        if receipts[0].shard == 1:
            raise KeyboardInterrupt
        return commit(ledger, plan, rows, receipts)

    monkeypatch.setattr(Ledger, "commit", dies)
    with pytest.raises(KeyboardInterrupt):
        repair_run(root)
    assert follow_forks(run.ledger, run.plan)[1] is run.plan  # nobody is sent to half a fork
    monkeypatch.undo()
    first = Ledger(open_store(f"{root}.m1")).load_plan()
    assert repair_run(root).taken == 3
    assert Ledger(open_store(f"{root}.m1")).load_plan() == first
    go_on(run, f"{root}.m1")


RECORDS = [PRECISION, REPORT, row_sums_path("data/part-00000.parquet")]


def with_decision(run: SmallRun) -> SmallRun:
    """Note in which precision the rows of a run were asked."""
    note = PrecisionNote({"quantization": "fp8"}, 0.9, (), "a")
    record_precision(run.store, note)
    if run.ledger.finished(run.plan) is not None:
        put_report(run.store, replace(read_report(run.store), precision=note))
    return run


def change(store: Store, path: str) -> None:
    """Change a value so that the record is still readable, or a bit of what is no JSON."""
    data = store.read(path)
    if b"fp8" in data:
        store.put(path, data.replace(b"fp8", b"fp4"))
    else:
        flip(store, path)


@pytest.mark.parametrize("path", RECORDS)
@pytest.mark.parametrize("damage", [lose, change])
def test_records_beside_a_whole_result_are_proved_and_made_again(tmp_path, path, damage):
    run = with_decision(old_run(tmp_path / "key", finished=True))
    measured = Accuracy(run.plan.hash, right=19, rows=20, unanswered=0, low=0.75, high=0.99)
    put_accuracy(run.store, measured)
    assert verify(run.store).ok
    before = run.store.read(path)
    damage(run.store, path)
    (fault,) = verify(run.store).faults
    assert path in fault
    made = repair_run(run.store.uri)
    assert (made.run_key, made.lost) == (None, ()) and path in made.restored[0]
    assert verify(run.store).ok and repair_run(run.store.uri).restored == ()
    if path == REPORT:
        assert read_report(run.store).precision == read_precision(run.store)
        assert all(b"19 of 20" in run.store.read(page) for page in (REPORT_PAGE, REPORT_HTML))
    else:
        assert run.store.read(path) == before


def test_a_fork_of_a_finished_run_takes_the_decision_of_its_report(tmp_path):
    run = with_decision(old_run(tmp_path / "key", finished=True))
    lose(run.store, "data/part-00000.parquet")
    change(run.store, PRECISION)
    made = repair_run(run.store.uri)
    fork = open_store(str(Path(run.store.uri).parent / str(made.run_key)))
    assert read_precision(fork) == read_report(run.store).precision


@pytest.mark.parametrize("finished", [True, False])
def test_a_fork_still_says_which_differences_were_accepted(tmp_path, finished):
    run = small_run(tmp_path / "key")
    difference = Accepted("prompt.template", "A", "B", "me@here", 1.0)
    note = {"started": "2026-01-01T00:00:00+00:00", **accepted_note([difference])}
    run.ledger.note_attempt("a", note)
    run.commit_all()
    if finished:
        close(run)
    commit_rotten(run)
    assert repair_run(run.store.uri).run_key == "key.m1"
    fork = open_store(f"{run.store.uri}.m1")
    flip(fork, next(info.path for info in fork.list("_raybatch/pieces")))
    assert repair_run(fork.uri).run_key == "key.m2"
    last = f"{run.store.uri}.m2"
    assert all_accepted(Ledger(open_store(last))) == (difference,)
    assert status(last).state == "unfinished"


def test_an_unfinished_run_without_its_decision_cannot_go_on(tmp_path):
    run = with_decision(old_run(tmp_path / "key", finished=False))
    change(run.store, PRECISION)
    assert any(PRECISION in fault for fault in verify(run.store).faults)
    with pytest.raises(
        CorruptRun, match=r"precision\.json does not match its checksum.* new run key"
    ):
        repair_run(run.store.uri)


def test_a_whole_run_is_not_repaired(tmp_path):
    for state in (True, False):
        root = f"{tmp_path}/{state}/key"
        old_run(root, state)
        assert repair_run(root).run_key is None
        assert not Path(f"{root}.m1").exists()


def test_a_run_that_ends_while_it_is_looked_at_is_not_taken_for_a_damaged_one(
    tmp_path, monkeypatch
):
    run = old_run(tmp_path / "key", False)
    committed = Ledger.committed

    def ends(ledger: Ledger, plan: Plan) -> Any:
        monkeypatch.undo()
        found = committed(ledger, plan)
        close(run)  # removes the pieces
        return found

    monkeypatch.setattr(Ledger, "committed", ends)
    done = repair_run(run.store.uri)
    assert (done.run_key, done.lost, done.faults) == (None, (), ())
    assert verify(run.store).ok and not Path(f"{run.store.uri}.m1").exists()


def test_what_lies_in_the_place_of_the_fork_is_another_run(tmp_path):
    run = old_run(tmp_path / "key", False)
    small_run(tmp_path / "key.m1", rows=7)
    piece_lost(run)
    with pytest.raises(PlanMismatch, match=r"key\.m1 exists already and is not a repair"):
        repair_run(str(tmp_path / "key"))
    run.store.put(SUPERSEDED_BY, b'{"by":"key.m1"}')  # advice alone is not followed
    assert follow_forks(run.ledger, run.plan)[1] is run.plan
    for advice in (b"{", b'{"by":7}', b'{"by":"../x"}', b'{"by":"gone"}'):
        run.store.put(SUPERSEDED_BY, advice)
        assert follow_forks(run.ledger, run.plan)[1] is run.plan


@pytest.mark.parametrize(("length", "fits"), [(125, True), (126, False), (128, False)])
def test_a_run_key_that_is_too_long_for_a_fork_is_refused(tmp_path, length, fits):
    key = "k" * length
    run = small_run(tmp_path / key, key=key)
    run.commit_all()
    lose(run.store, next(info.path for info in run.store.list("_raybatch/pieces")))
    before = files(run.store)
    if fits:
        assert repair_run(run.store.uri).run_key == f"{key}.m1"
        return
    with pytest.raises(ConfigError, match="Run the job again under a new run key"):
        repair_run(run.store.uri)
    assert files(run.store) == before and [path.name for path in tmp_path.iterdir()] == [key]


def test_a_retry_is_refused(tmp_path):
    from dataclasses import replace

    run = old_run(tmp_path / "key", False)
    change = {"parent": "other", "numbers_table": "numbers-0.parquet"}
    run.store.put("_raybatch/plan.json", replace(run.plan, **change).to_bytes())
    with pytest.raises(ConfigError, match="retry-failed on other"):
        repair_run(str(tmp_path / "key"))


def words_asked(nights: Nights) -> list[str]:
    found = sorted(map(words, nights.asked))
    nights.asked.clear()
    return found


def drive_fork(nights: Nights, job: BatchJob, key: str) -> list[tuple[str, str]]:
    nights.drive(job, plan_run(job, key))
    store = open_store(str(nights.folder / "out" / key))
    assert verify(store).ok
    return [(row["text"], row["response"]) for row in nights.result(key)]


def in_order(nights: Nights) -> BatchJob:
    """A night that takes answers over, and asks the others in the order of their prompts."""
    texts = [f"shop {i % 3} item {i:02}" for i in range(20)]
    nights.write(*texts[:4])
    nights.night("n0")
    nights.write(*texts)
    words_asked(nights)
    return nights.job(reuse=str(nights.folder / "out" / "n0"), engine={"order": "run"})


def test_a_finished_run_in_the_order_of_its_prompts_looks_up_what_was_lost(tmp_path):
    nights = Nights(tmp_path)
    job = in_order(nights)
    whole = drive_fork(nights, job, "n1")
    assert len(words_asked(nights)) == 16
    store = open_store(str(tmp_path / "out" / "n1"))
    before = files(store)
    part = "data/part-00000.parquet"
    flip(store, part)
    done = repair_run(store.uri)
    assert done.run_key == "n1.m1" and done.lost == tuple(range(5)) and done.taken == 0
    lose(store, part)
    assert drive_fork(nights, job, "n1.m1") == whole and not words_asked(nights)
    left = files(store)
    assert {n for n in before if left.get(n) != before[n]} == {part}
    flip(open_store(f"{store.uri}.m1"), part)
    asks = open_store(f"{store.uri}.m1/_raybatch/asks")
    lose(asks, part)
    with pytest.raises(ConfigError, match="all 16 requests would be asked again"):
        repair_run(f"{store.uri}.m1")
    assert not (tmp_path / "out" / "n1.m2").exists()


def test_a_cut_off_run_in_the_order_of_its_prompts_asks_again_what_was_lost(tmp_path):
    nights = Nights(tmp_path)
    job = in_order(nights)
    run = plan_run(job, "n1")
    nights.stop_after = 2
    with pytest.raises(Killed):
        nights.infer(job, run)
    nights.stop_after = None
    asked = words_asked(nights)  # of three shards, of which two were committed
    asks = open_store(f"{run.uri}/_raybatch/asks")
    pieces = [info.path for info in asks.list("_raybatch/pieces")]
    flip(asks, min(pieces))
    done = repair_run(run.uri)
    assert done.run_key == "n1.m1" and not done.lost and len(done.faults) == 1
    assert repair_run(run.uri).run_key == "n1.m1"  # again, as after a kill
    found = drive_fork(nights, job, "n1.m1")
    assert [answer for _, answer in found] == [f"answer to {text}" for text, _ in found]
    again = words_asked(nights)
    assert len(found) == 20 and len(again) == 12 and len(set(again) & set(asked)) == 8


def test_a_flow_that_runs_the_old_key_goes_on_with_the_fork(tmp_path):
    pq.write_table(input_rows(0, 20), tmp_path / "in.parquet")
    source = {"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 5}
    job = make_job(source=source, output={"uri": str(tmp_path / "out")})
    made = plan_run(job, "key")
    ledger = Ledger(open_store(made.uri))
    plan = ledger.load_plan()
    assert plan is not None
    run = SmallRun(Path(made.uri), plan, ledger.shards(plan), ledger, ledger.store, job)
    run.commit_all()
    flip(run.store, next(info.path for info in run.store.list("_raybatch/pieces")))
    assert plan_run(job, "key") == made
    assert repair_run(made.uri).run_key == "key.m1"
    found = plan_run(job, "key")
    assert (found.run_key, found.uri) == ("key.m1", f"{made.uri}.m1")
    assert plan_run(job, "key.m1") == found
    # The fork of the fork, too.
    fork = Ledger(open_store(found.uri))
    flip(fork.store, next(info.path for info in fork.store.list("_raybatch/pieces")))
    repaired = repair_run(found.uri)
    assert (repaired.run_key, repaired.continue_as) == ("key.m2", "key")
    assert plan_run(job, "key").run_key == "key.m2"
    shutil.rmtree(made.uri)
    assert repair_run(found.uri).continue_as == "key.m2", "under `key`, a new run would begin"


def test_an_unfinished_repaired_run_is_finished_under_the_key_of_the_first_run(tmp_path):
    run = old_run(tmp_path / "key", True)
    quarantine_lost(run)
    fork = f"{tmp_path}/{repair_run(str(tmp_path / 'key')).run_key}"

    def check(key: str) -> None:
        with pytest.raises(IncompleteRun, match=rf"raybatch run JOB --run-key {key}$"):
            publish_run(None, fork)
        with pytest.raises(IncompleteRun, match=rf"raybatch run JOB --run-key {key}\)"):
            open_run(fork).dataset()

    check("key")
    shutil.rmtree(tmp_path / "key")
    check(r"key\.m1")  # under `key`, a new run would begin


def test_the_command_says_what_is_lost_and_how_to_go_on(tmp_path, capsys):
    root = f"{tmp_path}/key"
    run = old_run(root, True)
    code, out, _ = called(capsys, "repair", root)
    assert code == 0 and "nothing is lost; nothing was written" in out
    quarantine_lost(run)
    run.store.put("_raybatch/published/lake.json", b"{}")
    code, out, _ = called(capsys, "repair", root)
    said = " ".join(out.split())
    assert code == 0 and "fault" in said and "_quarantine/part-00000.parquet" in said
    assert "key.m1 holds 2 of 4 shards; 2 shards" in said
    assert "raybatch run JOB --run-key key " in said and "lake has rows of" in said
    code, out, _ = called(capsys, "status", root)
    assert code == 0 and f"{root}.m1 (repaired)" in " ".join(out.split())
    assert json.loads(called(capsys, "status", f"{root}.m1", "--json")[1])["superseded_by"] is None
    code, out, _ = called(capsys, "repair", root, "--json")
    found = json.loads(out)
    assert (found["run_key"], found["taken"], found["lost"]) == ("key.m1", 2, [0, 2])
    code, _, err = called(capsys, "repair", tmp_path / "other")
    assert code == 2 and "not a run directory" in err


def test_the_fork_of_a_fork_has_the_next_number():
    keys = ["a", "a.m1", "a.m9", "a.m", "a.r1"]
    assert [fork_key(key) for key in keys] == ["a.m1", "a.m2", "a.m10", "a.m.m1", "a.r1.m1"]
