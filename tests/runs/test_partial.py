"""Partial results: what is committed of a run that is not complete, beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from helpers.command_line import called
from helpers.retries import FAILED, end, first_run, numbers, retried, work
from helpers.small import SmallRun, small_run
from s3server import S3Server

from prefect_raybatch import finalize_partial, open_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.errors import ConfigError, CorruptRun, IncompleteRun, NoSuchRun
from prefect_raybatch.ledger.partials import MAX_RANGES_LISTED, MissingRows, PartialResult
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.row_numbers import RowNumbers
from prefect_raybatch.result import survey
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.listing import latest_complete, list_runs
from prefect_raybatch.runs.prune import prune_runs
from prefect_raybatch.runs.status import status
from prefect_raybatch.storage import Store, open_store


def halfway(root: Path | str, failed: dict[int, str] = FAILED) -> SmallRun:
    """20 rows in 4 shards, of which 0 and 2 are committed."""
    made = first_run(root, failed, finish=False)
    made.store.delete(f"_raybatch/commits/{shard:08d}.json" for shard in (1, 3))
    return made


def files(run: SmallRun) -> dict[str, bytes]:
    return {info.path: run.store.read(info.path) for info in run.store.list()}


THERE = [n for n in (*range(5), *range(10, 15)) if n not in FAILED]


def test_what_is_committed_is_written_beside_the_run_and_says_what_is_missing(tmp_path):
    made = halfway(tmp_path)
    before = files(made)
    report = finalize_partial(made.store.uri)
    assert report.state == "partial" and (report.good, report.failed) == (len(THERE), 2)
    assert "5 to 9, 15 to 19" in report.notes[0] and "PARTIAL" in report.notes[0]
    after = files(made)
    assert {path: after[path] for path in before} == before
    folder = report.run.removeprefix(f"{made.store.uri}/")
    assert {path for path in after if path not in before} == {
        f"{folder}/{name}"
        for name in (
            *("data/part-00000.parquet", "_quarantine/part-00000.parquet"),
            *("_row_sums/data-part-00000.parquet", "_row_sums/_quarantine-part-00000.parquet"),
            *("_PARTIAL.json", "_report.json", "_report.md"),
        )
    }
    told = json.loads(after[f"{folder}/_PARTIAL.json"])
    assert told["missing"] == {"rows": 10, "shards": 2, "ranges": [[5, 9], [15, 19]], "more": 0}
    assert told["rows"] == 20 and told["by"].count("@") == 1
    assert pq.read_table(f"{report.run}/data")["_row"].to_pylist() == THERE
    assert "# nightly: partial" in (Path(report.run) / "_report.md").read_text()


def test_the_readers_of_a_result_read_it(tmp_path):
    made = halfway(tmp_path)
    report = finalize_partial(made.store.uri)
    for found in (
        open_run(made.store.uri, partial=True),
        open_run(made.store.uri, partial=report.run.rpartition("/")[2]),
        open_run(report.run),
        report,
    ):
        assert found.dataset().to_table()["_row"].to_pylist() == THERE
        assert found.quarantine().to_table()["_row"].to_pylist() == [4, 11]
        assert found.state == "partial"
    assert open_run(report.run).report == report
    assert len(report.to_pandas()) == len(THERE) and report.quarantine_folder == "_quarantine"
    with pytest.raises(NoSuchRun, match=r"no partial result _0 \(it has: _[0-9a-f]{32}"):
        open_run(made.store.uri, partial="_0")
    (Path(report.run) / "data/part-00000.parquet").unlink()
    with pytest.raises(CorruptRun, match="is missing"):
        open_run(report.run).dataset()


def test_nobody_takes_the_run_for_complete(tmp_path):
    made = halfway(tmp_path)
    report = finalize_partial(made.store.uri)
    found = status(made.store.uri)
    assert found.state == "unfinished" and found.pending == 2
    assert [one.line for one in found.partials] == [
        "10 of 20 rows; missing: 10 rows (5 to 9, 15 to 19)"
    ]
    assert [line.state for line in list_runs(str(tmp_path))] == ["unfinished"]
    with pytest.raises(NoSuchRun):
        latest_complete(str(tmp_path))
    assert not prune_runs(str(tmp_path), 1).removed
    with pytest.raises(IncompleteRun, match="2 of 4 shards are committed"):
        open_run(made.store.uri).dataset()
    with pytest.raises(ConfigError, match="not finished"):
        plan_retry(made.store.uri)
    assert not verify(made.store).finished
    for place in (report.run, f"{report.run}/"):
        with pytest.raises(NoSuchRun, match=r"a partial result of the run in .*/key\. .*open_run"):
            status(place)


def test_the_run_goes_on_and_is_complete_beside_it(tmp_path):
    made = halfway(tmp_path)
    first = finalize_partial(made.store.uri)
    for shard in (1, 3):
        made.commit(shard)
        if shard == 1:
            second = finalize_partial(made.store.uri)
    assert second.good == len(THERE) + 5 and "(15 to 19)" in second.notes[0]
    end(made.job, made.store.uri)
    assert verify(made.store).ok and status(made.store.uri).state == "completed"
    # whoever opens the whole folder of the run has each row once
    whole = ds.dataset(made.store.uri).to_table()["_row"].to_pylist()
    assert sorted(whole) == numbers(made.store.uri)
    assert open_run(made.store.uri, partial=True).report == second
    assert open_run(first.run).dataset().count_rows() == len(THERE)
    with pytest.raises(ConfigError, match=r"is complete\. Its result is in data/"):
        finalize_partial(made.store.uri)
    retried(made.store.uri)
    assert sorted(prune_runs(str(tmp_path), 1, dry_run=True).kept) == ["key", "key.r1"]
    first_run(tmp_path, key="newer")
    assert prune_runs(str(tmp_path), 1).removed.keys() == {"key", "key.r1"}
    assert not Path(made.store.uri).exists()


def test_what_was_cut_off_is_reaped_and_what_is_whole_stays(tmp_path, monkeypatch):
    made = halfway(tmp_path)
    whole = finalize_partial(made.store.uri)

    def full(result: PartialResult, store: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(PartialResult, "put", full)
        with pytest.raises(OSError, match="no space"):
            finalize_partial(made.store.uri)
    assert [one.name for one in status(made.store.uri).partials] == [whole.run[-33:]]
    assert reap(made.store, 3600.0).files == {}
    assert reap(made.store, -60.0).files == {"partials": 6}
    assert [path.name for path in (tmp_path / "key/partial").iterdir()] == [whole.run[-33:]]
    assert open_run(whole.run).dataset().count_rows() == len(THERE)


def test_a_partial_result_of_which_a_file_was_reaped_meanwhile_has_no_record(tmp_path, monkeypatch):
    made, real = halfway(tmp_path), PartialResult.put

    def reaped(result: PartialResult, store: Store) -> None:
        real(result, store)
        store.delete([result.parts[0].path])

    monkeypatch.setattr(PartialResult, "put", reaped)
    with pytest.raises(IncompleteRun, match="removed by raybatch reap while it was written"):
        finalize_partial(made.store.uri)
    assert status(made.store.uri).partials == ()


def test_a_partial_result_that_ends_while_reap_looks_stays(tmp_path, monkeypatch):
    """Its record may be written between the two listings."""
    made = halfway(tmp_path)
    name = finalize_partial(made.store.uri).run.rpartition("/")[2]
    record = f"partial/{name}/_PARTIAL.json"
    body = made.store.read(record)
    made.store.delete([record])
    listed = type(made.store).list
    listings = []

    def listing(store, prefix="", recursive=True):
        infos = list(listed(store, prefix, recursive))
        if prefix.startswith("partial") and not listings:
            listings.append(prefix)
            store.put(record, body)
        return iter(infos)

    monkeypatch.setattr(type(made.store), "list", listing)
    assert "partials" not in reap(made.store, -60.0).files
    assert listings and made.store.holds(record)
    assert open_run(made.store.uri, partial=name).dataset().count_rows() == len(THERE)


def test_a_run_that_is_completed_meanwhile_is_said_to_be(tmp_path):
    made = halfway(tmp_path)
    real = survey.survey_committed

    def late(*args, **more):
        found = real(*args, **more)
        patch.undo()
        for shard in (1, 3):
            made.commit(shard)
        end(made.job, made.store.uri)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "survey_committed", late)
        with pytest.raises(ConfigError, match="is complete"):
            finalize_partial(made.store.uri)
    assert verify(made.store).ok and not status(made.store.uri).partials


def test_a_run_with_nothing_committed_has_no_partial_result(tmp_path):
    made = small_run(tmp_path / "key")
    with pytest.raises(IncompleteRun, match="none of 4 shards is committed"):
        finalize_partial(made.store.uri)
    with pytest.raises(NoSuchRun, match="no partial result"):
        open_run(made.store.uri, partial=True)


def test_an_unreadable_partial_result_is_left_out(tmp_path):
    made = halfway(tmp_path)
    made.store.put(f"partial/_{'0' * 32}/_PARTIAL.json", b"{}")
    assert status(made.store.uri).partials == ()
    there = finalize_partial(made.store.uri)
    assert [f"partial/{one.name}" in there.run for one in status(made.store.uri).partials] == [True]


def test_missing_rows_are_named_as_the_run_numbers_them(tmp_path):
    made = first_run(tmp_path)
    child = plan_retry(made.store.uri, overrides={"source.rows_per_shard": 1})
    assert isinstance(child, Retry)
    work(child, child.job, most=2)
    finalize_partial(child.run.uri)
    (told,) = status(child.run.uri).partials
    assert told.missing.ranges == ((11, 11), (18, 18)) and told.missing.rows == 2
    assert "failed rows of run key" in open_run(child.run.uri, partial=True).report.notes[1]


def test_ranges_of_missing_rows_are_bounded():
    shards = Shards(np.arange(0, 5001))
    done = np.arange(5000) % 2 == 0
    found = MissingRows.of(done, shards, RowNumbers(5000))
    assert len(found.ranges) == MAX_RANGES_LISTED and found.more == 2500 - MAX_RANGES_LISTED
    assert found.rows == found.shards == 2500 and found.ranges[0] == (1, 1)
    assert found.text(2) == "2,500 rows (1 to 1, 3 to 3, and 2,498 more ranges)"


def test_the_command_line_says_partial_and_ends_with_a_status_of_its_own(tmp_path, capsys):
    made = halfway(tmp_path)
    code, said, _ = called(capsys, "finalize", made.store.uri)
    assert code == 75
    code, said, _ = called(capsys, "finalize", "--partial", made.store.uri)
    assert code == 3 and "PARTIAL" in said and "missing" not in said.splitlines()[0]
    assert "5 to 9, 15 to 19" in said
    place = open_run(made.store.uri, partial=True).uri
    code, said, _ = called(capsys, "report", place)
    assert code == 0 and "nightly: partial" in said
    code, said, _ = called(capsys, "status", made.store.uri)
    assert code == 0 and "partial result" in said and "unfinished" in said
    for shard in (1, 3):
        made.commit(shard)
    code, _, told = called(capsys, "finalize", "--partial", made.store.uri)
    assert code == 2 and "raybatch finalize, without --partial" in told
    code, said, _ = called(capsys, "finalize", made.store.uri)
    assert code == 0 and f"result  {made.store.uri}/data/" in said and verify(made.store).ok
    code, _, told = called(capsys, "finalize", "--partial", made.store.uri)
    assert code == 2 and "is complete" in told


def test_the_example_of_the_manual_works(tmp_path, monkeypatch, capfd):
    page = Path(__file__).parents[2] / "docs/how-to/use-part-of-a-run.md"
    (tmp_path / "out").mkdir()
    (tmp_path / "out/monday").symlink_to(halfway(tmp_path / "made").store.uri)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("".join(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)), names)
    assert "partial PARTIAL, not the result of run key" in capfd.readouterr().out
    assert names["frame"]["_row"].tolist() == names["same"]["_row"].tolist() == THERE


def test_on_s3(s3: S3Server, tmp_path):
    made = halfway(tmp_path)
    remote = open_store("s3://partial/out/key", s3.options)
    for path, data in files(made).items():
        remote.put(path, data)
    report = finalize_partial(remote.uri, s3.options)
    assert report.dataset(s3.options).to_table()["_row"].to_pylist() == THERE
    opened = open_run(remote.uri, s3.options, partial=True)
    assert opened.state == "partial" and opened.to_pandas()["_row"].tolist() == THERE
