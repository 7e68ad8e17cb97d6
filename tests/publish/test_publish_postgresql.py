"""Publishing to a real PostgreSQL: once, whatever is killed, and by keys that are right."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from helpers.postgresql import PASSWORD, postgresql
from helpers.retries import FAILED, first_run, retried
from helpers.small import make_job, read_json
from helpers.targets import published_rows
from pyarrow import types as kinds

from prefect_raybatch.api import publish_run
from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError, PublishFailed
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish.planned import check_targets_of
from prefect_raybatch.publish.publish import check_publish, open_sink

ANSWERED = [n for n in range(20) if n not in FAILED]
STEPS = ["opened", "looked", "in transaction", "inserted", "committed", "recording"]


class Killed(BaseException):
    """As a signal would, it passes by whatever catches exceptions."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgresql() as url:
        yield url


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(first_run(tmp_path_factory.mktemp("finished")).store.uri)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PG_PASSWORD", PASSWORD)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "out/key")
    return tmp_path / "out/key"


def target(server: str, table: str, **more: Any) -> dict[str, Any]:
    uri = server.replace("://", "://reader:${TEST_PG_PASSWORD}@", 1)
    return {"format": "sql", "uri": uri, "table": table, **more}


def job_of(run: Path, *targets: dict[str, Any]) -> BatchJob:
    value = read_json(run / "_raybatch/plan.json")["job"]
    value["output"] = {**value["output"], "publish": list(targets)}
    return BatchJob.from_dict(value)


def connect(server: str) -> psycopg.Connection:
    return psycopg.connect(server, user="reader", password=PASSWORD, autocommit=True)


def forget(server: str) -> None:
    """What was published before: all copies of a run share the hash of its plan."""
    with connect(server) as own:
        own.execute("DROP TABLE IF EXISTS _raybatch_published")


def rows_of(server: str, table: str) -> dict[int, str]:
    """Answers by id; each id stands there once."""
    with connect(server) as own:
        found = own.execute(f"SELECT id, response FROM {table}").fetchall()
    assert len(found) == len(dict(found)), "a key stands there twice"
    return dict(found)


def cut_off(server: str) -> None:
    """What becomes of a publisher's connections when its machine dies."""
    with connect(server) as own:
        own.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )


def test_a_publisher_that_is_cut_off_at_any_step_leaves_each_row_once(server, run, tmp_path):
    for at, step in enumerate(STEPS):
        root = tmp_path / step.replace(" ", "_")
        shutil.copytree(run, root)
        table, seen = f"cut_{at}", []
        job = job_of(root, target(server, table, mode="merge", key=["id"]))

        def stop(found: str, step: str = step, seen: list[str] = seen) -> None:
            if step in seen:  # a transaction that it could not roll back, which it tries again
                raise Killed(step)
            seen.append(found)
            if found == step:
                cut_off(server)
                raise Killed(step)

        forget(server)
        with pytest.raises(Killed):
            publish_run(job, str(root), stop)
        assert seen == STEPS[: at + 1]
        publish_run(job, str(root))
        assert sorted(rows_of(server, table)) == ANSWERED, step


@pytest.mark.parametrize("step", ["looked", "inserted"])
def test_a_connection_that_breaks_is_made_anew(step, server, run):
    table, cut = f"broken_{STEPS.index(step)}", []
    forget(server)

    def once(found: str) -> None:
        if found == step and not cut:
            cut.append(found)
            cut_off(server)

    publish_run(job_of(run, target(server, table)), str(run), once)
    assert cut and sorted(rows_of(server, table)) == ANSWERED


def together(*works: Callable[[], object]) -> list[BaseException]:
    """All at once, each in a thread of its own; what they raised."""
    failed: list[BaseException] = []
    ready = threading.Barrier(len(works))

    def work(one: Callable[[], object]) -> None:
        ready.wait(60)
        try:
            one()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return failed


def test_two_publishers_of_one_run_and_two_runs_by_one_key_at_once(server, run, tmp_path):
    """Four at once into a table that none has made: two of each run, with the same keys."""
    merged = target(server, "busy", mode="merge", key=["id"])
    other = first_run(tmp_path / "other", {}, text="old")
    pairs = []
    for at, uri in enumerate([str(run), other.store.uri] * 2):
        own = tmp_path / f"{at}/key"
        shutil.copytree(uri, own)
        pairs.append((job_of(own, merged), str(own)))
    forget(server)
    assert together(*(lambda p=pair: publish_run(*p) for pair in pairs)) == []
    found = rows_of(server, "busy")
    assert sorted(found) == list(range(20))
    kinds = {found[n].split()[0] for n in ANSWERED}
    assert kinds in ({"answer"}, {"old"}), "rows of one run stand between another's"
    with connect(server) as base:
        (runs,) = base.execute(
            "SELECT count(*) FROM _raybatch_published WHERE rows IS NOT NULL"
        ).fetchone()
    assert runs == 2


def waiting(server: str) -> int:
    """How many connections wait for a lock of another."""
    with connect(server) as own:
        (count,) = own.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        ).fetchone()
    return count


def test_a_merge_waits_for_the_merge_into_the_same_table_alone(server, run, tmp_path):
    """Of two runs that both find a key absent, the second looks for it once the first is done."""
    forget(server)
    other = Path(first_run(tmp_path / "other", {}, text="old").store.uri)
    jobs = {
        table: [
            (job_of(one, target(server, table, mode="merge", key=["id"], name=table)), str(one))
            for one in (run, other)
        ]
        for table in ("turns", "elsewhere")
    }
    for publisher in jobs["elsewhere"]:  # makes the rows that are locked
        publish_run(*publisher)
    first_in, go_on, second_in = threading.Event(), threading.Event(), threading.Event()

    def hold(step: str) -> None:
        if step == "inserted":
            first_in.set()
            assert go_on.wait(120)

    def note(step: str) -> None:
        if step == "inserted":
            second_in.set()

    first = threading.Thread(target=publish_run, args=(*jobs["turns"][0], hold))
    second = threading.Thread(target=publish_run, args=(*jobs["turns"][1], note))
    first.start()
    assert first_in.wait(120)
    with connect(server) as own:
        own.execute("DELETE FROM elsewhere")
    publish_run(*jobs["elsewhere"][0])  # into another table: it does not wait
    second.start()
    try:
        deadline = time.monotonic() + 120
        while not waiting(server) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert waiting(server) == 1 and not second_in.is_set()
    finally:
        go_on.set()
        for one in (first, second):
            one.join(120)
    assert second_in.is_set()
    assert sorted(rows_of(server, "turns")) == list(range(20))
    with connect(server) as own:
        keys = own.execute(
            "SELECT count(DISTINCT run_key), count(*) FROM _raybatch_published "
            "WHERE target = 'turns'"
        ).fetchone()
    assert keys == (1, 3)


def test_a_user_without_rights_is_refused_at_plan_and_nothing_is_left(server):
    schema = pa.schema([("id", pa.int64()), ("odd", pa.list_(pa.string())), ("at", pa.date32())])
    with connect(server) as own:
        own.execute("CREATE ROLE planner LOGIN PASSWORD 'g'")
        own.execute("CREATE SCHEMA locked")
        own.execute("CREATE TABLE readable (id int, odd jsonb, at date)")
        own.execute("GRANT SELECT ON readable TO planner")
        own.execute("DROP TABLE IF EXISTS _raybatch_published")
        before = own.execute("SELECT count(*) FROM pg_class").fetchone()
    uri = server.replace("://", "://planner:${PLANNER}@", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANNER", "g")
        for table in ("locked.t", "readable"):
            planned = PublishTarget(format="sql", uri=uri, table=table)
            with pytest.raises(ConfigError, match="permission denied"):
                check_publish([planned], "key", {}, schema)
    for table in ("absent", "readable"):
        planned = PublishTarget.model_validate(target(server, table))
        check_publish([planned], "key", {}, schema)
        merge = target(server, table, mode="merge", key=["id"])
        check_publish([PublishTarget.model_validate(merge)], "key", {}, schema)
    alike = pa.schema([("Name", pa.string()), ("name", pa.string())])
    check_publish([PublishTarget.model_validate(target(server, "cases"))], "key", {}, alike)
    nowhere = PublishTarget.model_validate(target(server, "no_such_schema.t"))
    with pytest.raises(ConfigError, match='schema "no_such_schema" does not exist'):
        check_publish([nowhere], "key", {}, schema)
    with connect(server) as own:
        assert own.execute("SELECT count(*) FROM pg_class").fetchone() == before


def test_a_retry_of_failed_rows_is_published_beside_its_parent(server, tmp_path):
    targets = [target(server, "family", mode="merge", key=["id"])]
    parent = first_run(tmp_path / "out", output={"publish": targets})
    publish_run(None, parent.store.uri, targets_from_plan=True)
    child = retried(parent.store.uri, overrides={"output.publish": targets})
    assert publish_run(None, child, targets_from_plan=True).published[0].rows == len(FAILED)
    assert sorted(rows_of(server, "family")) == list(range(20))


def test_keys_that_are_wrong_end_it_at_once_and_are_not_shown(server, run, monkeypatch):
    job, columns = job_of(run, target(server, "denied")), pa.schema([("id", pa.int64())])

    def refused(job: BatchJob, *words: str, kind: type[Exception] = ConfigError) -> None:
        for work in (
            lambda: publish_run(job, str(run)),
            lambda: check_targets_of(compile_job(job), columns),
        ):
            with pytest.raises(kind) as caught:
                work()
            for word in words:
                assert word in str(caught.value), str(caught.value)
            assert "wr0ng" not in str(caught.value)

    monkeypatch.setenv("TEST_PG_PASSWORD", "wr0ng")
    refused(job, "output.publish: sql: access denied", "password authentication failed")
    monkeypatch.delenv("TEST_PG_PASSWORD")
    refused(job, "environment variable TEST_PG_PASSWORD is not set")
    monkeypatch.setenv("TEST_PG_PASSWORD", PASSWORD)
    nowhere = target(server.rpartition("/")[0] + "/none", "t")
    refused(job_of(run, nowhere), "no such database", '"none" does not exist')
    away = target("postgresql://127.0.0.1:1/x", "t")
    refused(job_of(run, away), "127.0.0.1", kind=PublishFailed)
    with pytest.raises(PublishFailed, match=r"data/ is complete\. .* run raybatch publish"):
        publish_run(job_of(run, away), str(run))
    with pytest.raises(PublishFailed, match="Fix the cause and run the same command again"):
        check_targets_of(compile_job(job_of(run, away)), columns)  # there is no result yet


def test_a_user_who_may_not_write_and_a_row_that_does_not_fit(server, run):
    with connect(server) as own:
        own.execute("CREATE ROLE guest LOGIN PASSWORD 'g'")
        own.execute("CREATE TABLE theirs (LIKE pg_class)")
        own.execute("CREATE SCHEMA closed")
        own.execute("CREATE TABLE narrow (id int, _row int, tags text, response varchar(3))")
        own.execute('ALTER TABLE narrow ADD COLUMN "Company" text')
    forget(server)
    uri = server.replace("://", "://guest:${GUEST}@", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GUEST", "g")
        guest = job_of(run, {"format": "sql", "uri": uri, "table": "closed.t"})
        with pytest.raises(ConfigError, match=r"access denied.*permission denied"):
            publish_run(guest, str(run))
    with pytest.raises(ConfigError, match=r"rejects the rows.*too long"):
        publish_run(job_of(run, target(server, "narrow")), str(run))
    assert rows_of(server, "narrow") == {}  # given up whole


@pytest.mark.parametrize(
    ("odd", "column"),
    [(["a", "b\0"], "text"), ([["x"], ["y", "\0"]], "words")],
)
def test_a_character_that_the_database_refuses_is_named_by_row_and_column(server, odd, column):
    with connect(server) as own:
        own.execute("DROP TABLE IF EXISTS nul")
        own.execute("CREATE TABLE nul (number float, text text, words jsonb)")
    forget(server)
    sink = open_sink(PublishTarget.model_validate(target(server, "nul")), "key", {})
    nan = [float("nan"), 1.0]
    whole = {"number": nan, "text": ["\\u0000", "b"], "words": [["x"], ["\\u0000"]]}
    said = rf"row 1 of the result .*column '{column}', contains a NUL .*run key, where reuse"
    with pytest.raises(ConfigError, match=said):
        sink.publish(published_rows(pa.table({**whole, column: odd}), "k" * 64), lambda step: None)
    with connect(server) as own:
        assert own.execute("SELECT * FROM nul").fetchall() == []
    sink.publish(published_rows(pa.table(whole), "k" * 64), lambda step: None)


def test_a_table_of_the_databases_own_types_takes_what_they_mean(server, run):
    """JSON, arrays and UUIDs come as texts from a table source, and go back as what they are."""
    made = '(id int, _row int, "Company" text, {}, response {})'
    with connect(server) as own:
        own.execute("CREATE TABLE typed " + made.format("tags jsonb", "text"))
        own.execute("CREATE TABLE lists " + made.format("tags text[]", "varchar(40)"))
        own.execute("CREATE TABLE wrong " + made.format("tags json", "integer"))
        own.execute("CREATE TABLE keyed (id uuid, at date, n smallint)")
    for table in ("typed", "lists"):
        forget(server)
        publish_run(job_of(run, target(server, table, mode="merge", key=["id"])), str(run))
        shutil.rmtree(run / "_raybatch/published")
        with connect(server) as own:
            found = own.execute(f"SELECT id, tags FROM {table} ORDER BY id").fetchall()
        assert found == [(n, [f"t{n}"]) for n in ANSWERED], table
    wrong = job_of(run, target(server, "wrong"))
    columns = pa.schema([("id", pa.int64()), ("Company", pa.string())])
    columns = columns.append(pa.field("tags", pa.list_(pa.string())))
    said = "'response' is int64 in the existing table, but string in the result"
    for work in (
        lambda: check_targets_of(compile_job(wrong), columns),
        lambda: publish_run(wrong, str(run)),
    ):
        with pytest.raises(ConfigError, match=said):
            work()
    assert rows_of(server, "wrong") == {}
    sink = open_sink(PublishTarget.model_validate(target(server, "keyed")), "key", {})
    id, day = uuid.uuid4(), date(2026, 7, 1)
    rows = pa.table({"id": [str(id)], "at": [day], "n": [3]})
    sink.publish(published_rows(rows, "k" * 64), lambda step: None)
    with connect(server) as own:
        assert own.execute("SELECT * FROM keyed").fetchall() == [(id, day, 3)]
    for column, kind in (("at", pa.timestamp("us")), ("n", pa.float64()), ("n", pa.string())):
        schema = rows.schema.set(rows.schema.names.index(column), pa.field(column, kind))
        with pytest.raises(ConfigError, match=f"column '{column}' is .* in the existing table"):
            sink.check(schema)


@pytest.mark.parametrize(
    ("kind", "kept", "rounded"),
    [
        (pa.float64(), [0.1, 0.1 + 0.2, -1e15, 123456.78], 0.126),
        (pa.float32(), [0.1, 1234.56], 0.126),
        (pa.float64(), [], 1e-9),
        (pa.decimal128(20, 6), [Decimal("1.25"), Decimal("0.100000")], Decimal("1.255")),
        (pa.list_(pa.float64()), [[0.1, None]], [0.1, 0.126]),
    ],
    ids=str,
)
def test_a_fraction_that_a_numeric_column_would_round_is_refused(server, kind, kept, rounded):
    with connect(server) as own:
        own.execute("DROP TABLE IF EXISTS prices")
        own.execute(f"CREATE TABLE prices (n numeric(20,2){'[]' * kinds.is_list(kind)})")
    forget(server)
    sink = open_sink(PublishTarget.model_validate(target(server, "prices")), "key", {})
    rows = pa.table({"n": pa.array([*kept, None, rounded], kind)})
    with pytest.raises(
        ConfigError, match=rf"row {len(rows) - 1} .*'n'.*(NUMERIC|ARRAY).*would change"
    ):
        sink.publish(published_rows(rows, "k" * 64), lambda step: None)
    sink.publish(published_rows(rows.slice(0, len(rows) - 1), "k" * 64), lambda step: None)
    with connect(server) as own:
        assert len(own.execute("SELECT * FROM prices").fetchall()) == len(rows) - 1


@pytest.mark.parametrize("kind", ["smallint", "bigint", "real", "numeric(9,2)", "boolean", "jsonb"])
def test_booleans_become_numbers_where_the_column_has_numbers(server, kind):
    with connect(server) as own:
        own.execute("DROP TABLE IF EXISTS flags")
        own.execute(f"CREATE TABLE flags (flag {kind})")
    forget(server)
    sink = open_sink(PublishTarget.model_validate(target(server, "flags")), "key", {})
    rows = pa.table({"flag": [True, False, None]})
    assert sink.check(rows.schema).startswith("exists, and its columns fit")
    sink.publish(published_rows(rows, "k" * 64), lambda step: None)
    with connect(server) as own:
        assert own.execute("SELECT flag FROM flags").fetchall() == [(True,), (False,), (None,)]


def test_times_do_not_depend_on_the_time_zone_of_the_server(server):
    noon, names = datetime(2026, 7, 1, 12), ["plain", "zoned"]
    with connect(server) as own:
        own.execute("CREATE TABLE times (plain timestamp, zoned timestamptz)")
        own.execute("ALTER ROLE reader SET timezone = 'America/New_York'")
    forget(server)
    try:
        for key, plan in zip(names, "pq", strict=True):
            merge = target(server, "times", mode="merge", key=[key])
            sink = open_sink(PublishTarget.model_validate(merge), "key", {})
            rows = pa.table({name: pa.array([noon], pa.timestamp("us", "UTC")) for name in names})
            sink.check(rows.schema)
            sink.publish(published_rows(rows, plan * 64), lambda step: None)
        with connect(server) as own:
            found = own.execute("SELECT plain, zoned FROM times").fetchall()
    finally:
        with connect(server) as own:
            own.execute("ALTER ROLE reader RESET timezone")
    assert found == [(noon, noon.replace(tzinfo=UTC))]


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.date32()], ids=str)
def test_times_without_a_zone_do_not_go_into_a_column_with_one(server, kind):
    with connect(server) as own:
        own.execute("DROP TABLE IF EXISTS moments")
        own.execute("CREATE TABLE moments (plain timestamp, zoned timestamptz)")
    sink = open_sink(PublishTarget.model_validate(target(server, "moments")), "key", {})
    sink.check(pa.schema([("plain", kind)]))
    with pytest.raises(ConfigError, match=r"'zoned' is timestamp\[us, tz=UTC\] in the existing"):
        sink.check(pa.schema([("zoned", kind)]))


def test_a_job_with_a_password_in_its_url_is_none():
    for uri in ("postgresql://u:p@h/x", "postgresql://h/x?user=u&password=p"):
        with pytest.raises(ConfigError, match=r"contains a password.*\$\{NAME\}"):
            make_job(output={"publish": [{"format": "sql", "uri": uri, "table": "t"}]})
