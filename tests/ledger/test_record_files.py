"""Records that are large and those that are too large: what is written can be read again, and what
could not be read is refused before it is written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import Passes, SmallRun, small_run, success_of

from prefect_raybatch.driver.driver import Driver
from prefect_raybatch.errors import ConfigError, PlanMismatch
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger import checkpoints, record_files
from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.ledger.layout import (
    ATTEMPTS,
    CHECKPOINTS,
    COMMITS,
    OUTPUT_SCHEMA,
    PLAN,
    REPORT,
    SUCCESS,
    TABLES,
    commit_path,
    heartbeat_path,
)
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.part_files import PartFiles
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.record_files import (
    RECORD_KINDS,
    limit_of,
    put_record,
    read_record,
)
from prefect_raybatch.ledger.record_texts import PieceKind
from prefect_raybatch.ledger.records import Commit, Part, Piece, Receipt, Unit
from prefect_raybatch.ledger.same_job import difference
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.result.finalize import finalize
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

EVERY_SECOND = 400_000  # rows of a shard of which every second one is left out


def left_out_alternately(run: SmallRun, rows: int) -> Receipt:
    """A receipt with its piece for a shard whose odd positions postprocess left out."""
    positions = np.arange(rows)
    good = positions[::2]
    table = pa.table({"__rb_pos": pa.array(good, pa.int32()), "response": ["a"] * len(good)})
    piece = run.finish().write_piece(0, "data", table, good)
    return Receipt(0, "a", Positions.of(good), Positions(), Positions.of(positions[1::2]), (piece,))


def test_a_shard_with_every_second_row_left_out_is_committed_resumed_and_proved(tmp_path):
    run = small_run(tmp_path, EVERY_SECOND, EVERY_SECOND)
    receipt = left_out_alternately(run, EVERY_SECOND)
    assert run.ledger.commit(run.plan, EVERY_SECOND, [receipt])
    again = Driver(run.plan, run.shards, run.ledger, Limits())
    assert again.resume().done == EVERY_SECOND and again.done.all()
    result = finalize(run.ledger, run.plan, run.shards, "_row", 1 << 30)
    run.ledger.succeed(success_of(run, result.parts))
    found = verify(run.store)
    assert (found.ok, found.data, found.skipped) == (True, EVERY_SECOND // 2, EVERY_SECOND // 2)


def test_a_plan_of_36_000_files_named_one_by_one_is_read_again(tmp_path):
    uris = [f"s3://bucket/{'folder/' * 12}events-{i:06d}-{i:032x}.parquet" for i in range(36_000)]
    run = small_run(tmp_path, source={"uri": uris, "rows_per_shard": 5})
    again = Ledger(open_store(str(tmp_path)))
    assert again.load_plan() == run.plan
    assert (tmp_path / PLAN).stat().st_size < 10_000 and again.uris(run.plan) == uris
    run.commit_all()
    assert all(again.committed(run.plan))


def test_very_many_uris_tell_jobs_apart_as_few_do(tmp_path):
    uris = [f"data/{i}.parquet" for i in range(1_001)]

    def planned(uris: list[str], **sampling: int) -> SmallRun:
        return small_run(tmp_path, source={"uri": uris, "rows_per_shard": 5}, sampling=sampling)

    first = planned(uris)
    assert planned(uris).plan == first.plan
    with pytest.raises(PlanMismatch, match=r"source\.uri\.sha256: ") as caught:
        planned([*uris[:-1], "data/other.parquet"])
    assert "source.uri.count" not in str(caught.value)
    whole = replace(first.plan, parts={**first.plan.parts, "source.uri": uris})
    assert difference(whole.parts, first.plan.parts) == []


def test_a_success_of_40_000_parts_is_read_again(tmp_path):
    run = small_run(tmp_path, rows=40_000, per_shard=40_000)
    part = Part("", 1, 10**8, "0" * 64, 0, 10**9, "1" * 64)
    parts = tuple(replace(part, path=f"data/part-{i:05d}.parquet") for i in range(40_000))
    success = Success(40_000, 40_000, 0, 0, parts, run.plan.hash, True, "_row", 1.0)
    run.ledger.succeed(success)
    found = run.ledger.finished()
    assert found is not None and found.parts_table is not None
    assert replace(found, parts_table=None) == success


def test_only_columns_whose_values_repeat_get_a_dictionary_in_part_files(tmp_path):
    parts = PartFiles(open_store(str(tmp_path)), "f")
    parts.write(pa.table({"id": range(5000), "label": ["a", "b"] * 2500}))
    assert parts.finish() is not None
    group = pq.ParquetFile(tmp_path / "f/part-00000.parquet").metadata.row_group(0)
    assert [group.column(n).has_dictionary_page for n in range(2)] == [False, True]


def test_files_are_in_the_order_of_their_numbers_which_may_have_six_digits(tmp_path):
    run = small_run(tmp_path)
    numbers = [0, 7, 99_999, 100_000, 100_001, 1_000_000]
    parts = [Part(f"data/part-{n:05d}.parquet", 1, 9, "0" * 64) for n in numbers]
    other = Part("quarantine/part-00000.parquet", 1, 9, "0" * 64)
    mixed = (other, *sorted(parts, key=lambda part: part.path))
    success = Success(7, 6, 1, 0, mixed, run.plan.hash, True, "_row", 1.0)
    assert success.of("data") == parts and success.of("quarantine") == [other]


# --- too large ----------------------------------------------------------------------------------


def smaller(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Readers and writers of this test take `limit` bytes of any record."""
    kinds = tuple(kind._replace(limit=limit) for kind in RECORD_KINDS)
    monkeypatch.setattr(record_files, "RECORD_KINDS", kinds)
    monkeypatch.setattr(record_files, "TABLE", record_files.TABLE._replace(limit=limit))


@pytest.mark.parametrize(
    "path",
    [
        PLAN,
        SUCCESS,
        REPORT,
        OUTPUT_SCHEMA,
        commit_path(0),
        f"{ATTEMPTS}/a.json",
        heartbeat_path("a"),
        "_raybatch/jobs/0001.json",
        f"{CHECKPOINTS}/a.gz",
        f"{TABLES}/shards-0.parquet",
    ],
)
def test_a_record_has_one_limit_for_who_writes_and_who_reads(tmp_path, path, monkeypatch):
    smaller(monkeypatch, 100)
    store = open_store(str(tmp_path))
    put_record(store, path, b"x" * 100)
    assert read_record(store, path) == b"x" * 100 and limit_of(path) == 100
    with pytest.raises(ConfigError) as caught:
        put_record(store, path, b"y" * 101)
    assert f"{path} was not written: it has 101 bytes" in str(
        caught.value
    ) and "at most 100" in str(caught.value)
    assert read_record(store, path) == b"x" * 100


def test_a_plan_that_nobody_could_read_is_refused_and_nothing_is_planned(tmp_path, monkeypatch):
    smaller(monkeypatch, 20_000)
    uris = [f"data/{i:0200d}.parquet" for i in range(200)]
    with pytest.raises(
        ConfigError, match=r"plan\.json was not written: .* Name their folder or a glob"
    ):
        small_run(tmp_path, source={"uri": uris, "rows_per_shard": 5})
    assert not (tmp_path / PLAN).exists()


def test_a_commit_that_nobody_could_read_is_refused_and_the_others_hold(tmp_path, monkeypatch):
    run = small_run(tmp_path, rows=4_000, per_shard=2_000)
    run.commit(0)
    smaller(monkeypatch, 1_000)
    with pytest.raises(ConfigError, match=r"Lower source\.rows_per_shard under a new run key"):
        run.commit(1, failed=np.flatnonzero(np.random.default_rng(0).random(2_000) < 0.5).tolist())
    assert run.ledger.committed(run.plan).tolist() == [True, False]
    with pytest.raises(ConfigError, match=r"Raise output\.file_mb"):
        run.ledger.succeed(replace(success_of(run), row_number="x" * 3_000))
    assert run.ledger.finished(run.plan) is None


def test_the_largest_shard_fits_into_a_commit_whatever_its_rows_become(tmp_path):
    """1,000,000 rows, each a range of its own among its neighbours, and the positions of two pieces
    of each kind."""
    run = small_run(tmp_path, rows=10, per_shard=10)
    commit = run.commit(0)
    assert commit is not None
    rows = type(run.job.source).model_fields["rows_per_shard"].metadata
    most = max(bound.le for bound in rows if hasattr(bound, "le"))
    chosen = np.random.default_rng(1).random(most) < 0.5
    worst = _worst(commit, np.flatnonzero(chosen), np.flatnonzero(~chosen))
    assert len(worst.to_bytes()) < 700_000


def _worst(commit: Commit, good: np.ndarray, failed: np.ndarray) -> Commit:
    """The commit with two pieces of each kind."""
    kinds: list[tuple[PieceKind, np.ndarray]] = [("data", good), ("quarantine", failed)]
    pieces = tuple(
        Piece("p.parquet", kind, len(part), 1, "0" * 64, Positions.of(part))
        for kind, rows in kinds
        for part in np.array_split(rows, 2)
    )
    return replace(commit, good=Positions.of(good), failed=Positions.of(failed), pieces=pieces)


def test_ten_thousand_different_failures_do_not_make_a_commit_large(tmp_path):
    run = small_run(tmp_path, rows=20_000, per_shard=20_000)
    receipt = run.receipt(Unit(0, 0, 20))
    kinds = {FailureKey("engine", "ValueError", f"{i:0100d}"): 1 for i in range(10_000)}
    often = FailureKey("engine", "ValueError", "often")
    kinds |= {often: 9_000, FailureKey("postprocess", "KeyError", "seldom"): 980}
    whole = replace(
        receipt, good=Positions(), failed=Positions.spans((0, 20_000)), failures=kinds, pieces=()
    )
    commit = run.ledger.commit(run.plan, 20_000, [whole])
    assert commit is not None and len(commit.failures) <= 1_002
    assert commit.failures[often] == 9_000
    assert sum(commit.failures.values()) == 19_980
    assert {key.error for key in commit.failures} == {"ValueError", "KeyError"}


def test_commits_are_folded_by_size_too(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "FOLD_BYTES", 4_000)
    run = small_run(tmp_path, rows=80, per_shard=5)
    driver = Driver(run.plan, run.shards, run.ledger, Limits())
    driver.resume()
    driver.run(Passes(run), Passes(run).quarantine)
    sizes = [p.stat().st_size for p in (tmp_path / COMMITS).iterdir()]
    files = list((tmp_path / CHECKPOINTS).iterdir())
    assert sum(sizes) // (4_000 + max(sizes)) <= len(files) <= sum(sizes) // 4_000
