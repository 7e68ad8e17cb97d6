"""{run_date} and {run_key}: filled in where a run begins, and the same when it is continued."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from helpers.small import make_job

from prefect_raybatch.api import dry_run, plan_run, resolve_run
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.flow import flows
from prefect_raybatch.flow.run_history import written_uri
from prefect_raybatch.flow.schedule import zone_of
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import job_placeholders, planned_run_date, render_placeholders
from prefect_raybatch.job.placeholders import date_of, date_of_key, dates_in
from prefect_raybatch.runs.run import Run

NIGHT = date(2026, 7, 1)


def nightly(tmp_path: Path, **source: Any) -> BatchJob:
    for day, rows in (("2026-07-01", 3), ("2026-07-02", 5)):
        (tmp_path / day).mkdir(exist_ok=True)
        text = "id,text\n" + "".join(f"{i},x\n" for i in range(rows))
        (tmp_path / day / "a.csv").write_text(text)
    return make_job(
        source={"uri": f"{tmp_path}/{{run_date}}/*.csv", **source},
        prompt={"template": "{text}"},
        output={"uri": f"{tmp_path}/out/{{run_date:%Y/%m}}"},
    )


def test_words_are_filled_in_everywhere_they_may_stand():
    job = make_job(
        source={
            "uri": "postgresql://host/{run_key}",
            "query": "SELECT '{a}' FROM t WHERE day = '{run_date}'",
            "filter": "key = '{run_key}'",
        },
        output={"uri": "s3://b/{run_date:%Y/%m/%d}/{other}"},
    )
    assert job_placeholders(job) == {"run_date", "run_key"}
    made = render_placeholders(job, "k-1", NIGHT)
    assert made.source.uri == "postgresql://host/k-1" and made.source.filter == "key = 'k-1'"
    assert made.source.query == "SELECT '{a}' FROM t WHERE day = '2026-07-01'"
    assert made.output.uri == "s3://b/2026/07/01/{other}"
    assert job_placeholders(made) == set() and render_placeholders(made, "other") is made
    several = make_job(source={"uri": ["in/{run_date}", "in/x"]})
    assert render_placeholders(several, "k", NIGHT).source.uris == ["in/2026-07-01", "in/x"]


def to_publish(*targets: dict[str, Any]) -> BatchJob:
    return make_job(output={"uri": "out", "publish": list(targets)})


def test_targets_take_the_date_where_the_run_begins_and_the_key_where_it_is_published():
    job = to_publish(
        {"format": "jsonl", "uri": "s3://lake/day={run_date}/{run_key}"},
        {"format": "sql", "uri": "sqlite:///a.db", "table": "t_{run_date:%y%m%d}_{run_key}"},
    )
    assert job_placeholders(job) == {"run_date"}
    made = render_placeholders(job, "night", NIGHT)
    files, table = made.output.publish
    assert (files.uri, table.table) == ("s3://lake/day=2026-07-01/{run_key}", "t_260701_{run_key}")
    assert files.place("k.r1") == "s3://lake/day=2026-07-01/k.r1"
    assert table.place("k.r1") == "sqlite:///a.db#t_260701_k.r1"
    assert table.filled("k.r1").table == "t_260701_k.r1"
    assert job_placeholders(made) == set() and render_placeholders(made, "other") is made
    retry = render_placeholders(job, "job-20260702T013000Z.r1").output.publish[0]
    assert retry.uri == "s3://lake/day=2026-07-02/{run_key}"
    with pytest.raises(ConfigError, match="contains no date; set --run-date"):
        render_placeholders(job, "night")
    with pytest.raises(ConfigError, match="run_dat"):
        to_publish({"format": "jsonl", "uri": "out/{run_dat}"})


def test_a_run_that_is_continued_on_another_day_publishes_to_its_own(tmp_path):
    job = nightly(tmp_path, uri=f"{tmp_path}/2026-07-01/*.csv")
    output = {"uri": f"{tmp_path}/out", "publish": [{"format": "jsonl", "uri": "p/{run_date}"}]}
    job = BatchJob.from_dict({**job.to_dict(), "output": output})
    first, key = resolve_run(job, None, datetime(2026, 7, 1, 23, 50, tzinfo=UTC))
    plan_run(first, key)
    again, same = resolve_run(job, None, None)
    assert same == key
    assert again.output.publish[0].uri == first.output.publish[0].uri == "p/2026-07-01"


@pytest.mark.parametrize("word", ["{run_day}", "{run_dat}", "{run_key:%Y}"])
def test_a_word_that_is_nearly_one_is_no_job(word):
    for fields in ({"source": {"uri": f"in/{word}"}}, {"output": {"uri": f"out/{word}"}}):
        with pytest.raises(ConfigError, match="run_"):
            make_job(**fields)


def test_the_date_is_that_of_the_key_unless_it_is_given(tmp_path):
    job = nightly(tmp_path)
    assert date_of_key("job-20260702T013000Z") == date(2026, 7, 2)
    assert date_of_key("job-20269902T013000Z") is None is date_of_key("night")
    found, key = resolve_run(job, None, datetime(2026, 7, 1, 23, 30, tzinfo=UTC))
    assert key == f"{job.name}-20260701T233000Z" and "2026-07-01" in str(found.source.uri)
    with pytest.raises(ConfigError, match="contains no date; set --run-date"):
        resolve_run(job, "night", None)
    with pytest.raises(ConfigError, match="2026-07-01"):
        date_of("yesterday")
    # A date alone makes the key, so the same command finds the same run.
    assert resolve_run(job, None, None, NIGHT)[1] == f"{job.name}-20260701T000000Z"
    assert resolve_run(job, "night", None, NIGHT)[1] == "night"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("lake/{run_date:%Y/%m}/{run_date}", "lake/2026/07/2026-07-01"),
        ("d >= '{run_date}' AND e < '{run_date}'", "d >= '2026-07-01' AND e < '2026-07-01'"),
        ("y={run_date:%Y}/m={run_date:%m}/d={run_date:%d}", "y=2026/m=07/d=01"),
        ("{run_date:%d.%m.}{run_date:%Y}/100%m", "01.07.2026/100%m"),
        ("in/{run_date:%-d %B %Y}", "in/1 July 2026"),
        ("in/{run_date:%Y%%%m%d}", "in/2026%0701"),
        ("in/{run_date:%F}", "in/2026-07-01"),
        ("in/{run_date:%D}/{run_date:%s}", f"in/07/01/26/{NIGHT:%s}"),
        ("in/{run_date:%G-W%V-%u}", "in/2026-W27-3"),
        ("in/{run_date:%e.%m.%C%y}", "in/ 1.07.2026"),
    ],
)
def test_a_date_is_found_where_it_was_filled_in(template, text):
    assert dates_in(template, text) == [NIGHT]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("lake/x", "lake/x"),
        ("lake/{run_date}", "other/2026-07-01"),
        ("lake/{run_date}", "lake/2026-07-32"),
        ("lake/{run_date}/{run_date}", "lake/2026-07-01/2026-07-02"),
    ],
)
def test_no_date_is_found_where_none_was_filled_in(template, text):
    assert dates_in(template, text) == []


def planned_date(key: str, source: str, *targets: str, planned: int = 0) -> date | None:
    """The date found for `targets`, if a run of NIGHT had the source and the first `planned`."""

    def job(*uris: str) -> BatchJob:
        publish = [{"name": f"t{n}", "format": "jsonl", "uri": uri} for n, uri in enumerate(uris)]
        return make_job(source={"uri": source}, output={"uri": "out", "publish": publish})

    with_targets = job(*targets)
    plan = render_placeholders(job(*targets[:planned]), key, NIGHT)
    return planned_run_date(with_targets, plan, key)


@pytest.mark.parametrize("form", ["%Y-%m", "%m%d", "%d", "%Y-%d", "%Y-%W", "%G-W%V"])
@pytest.mark.parametrize("key", ["monday", "nightly-20260626T223000Z"])
def test_a_part_of_a_date_does_not_tell_the_date_of_a_new_target(form, key):
    source = f"in/{{run_date:{form}}}"
    with pytest.raises(ConfigError, match="do not tell its whole date"):
        planned_date(key, source, "lake/{run_date}")
    with pytest.raises(ConfigError, match="do not tell its whole date"):
        planned_date(key, source, source.replace("in", "lake"), "lake/{run_date}", planned=1)
    found = planned_date(key, source, source.replace("in", "lake"), planned=1)
    assert found is not None and f"{found:{form}}" == f"{NIGHT:{form}}"


@pytest.mark.parametrize(
    "form", ["%Y-%m-%d", "%Y/%j", "%d %B %y", "%F", "%x", "%G%V%u", "%e %h %Y"]
)
@pytest.mark.parametrize("key", ["monday", "nightly-20260630T223000Z"])
def test_a_whole_date_in_a_location_is_that_of_a_new_target(form, key):
    assert planned_date(key, f"in/{{run_date:{form}}}", "lake/{run_date}") == NIGHT


def test_locations_with_parts_of_a_date_tell_it_together():
    targets = "lake/{run_date:%m-%d}", "lake/{run_date}"
    assert planned_date("monday", "in/{run_date:%Y}", *targets, planned=1) == NIGHT


def test_the_year_of_a_date_may_be_long_ago_or_have_two_digits():
    assert dates_in("in/{run_date}", "in/1850-02-28") == [date(1850, 2, 28)]
    assert dates_in("in/{run_date:%D}", "in/02/28/50") == [date(2050, 2, 28)]


def test_the_date_of_the_key_is_taken_where_a_part_of_the_date_agrees():
    key = f"nightly-{NIGHT:%Y%m%d}T010000Z"
    assert planned_date(key, "in/{run_date:%Y-%m}", "lake/{run_date}") == NIGHT
    assert planned_date("monday", "in/x", "lake/{run_date}") is None


def test_a_run_of_a_date_is_planned_and_continued(tmp_path):
    job = nightly(tmp_path)
    one, two = (resolve_run(job, None, None, date(2026, 7, day)) for day in (1, 2))
    assert (dry_run(one[0]).rows, dry_run(two[0]).rows) == (3, 5)
    first, again = plan_run(*one), plan_run(*resolve_run(job, one[1], None))
    assert first.rows == 3 and again.plan_hash == first.plan_hash
    assert first.uri == f"{tmp_path}/out/2026/07/{one[1]}"
    assert plan_run(*two).rows == 5


def test_today_without_a_schedule(tmp_path):
    job = nightly(tmp_path)
    found, key = resolve_run(job, None, None)
    assert date_of_key(key) is not None
    assert f"{date_of_key(key):%Y-%m-%d}" in str(found.source.uri)
    keyed = make_job(source={"uri": "in/{run_key}"})
    found, key = resolve_run(keyed, None, None)
    assert found.source.uri == f"in/{key}"


def test_a_flow_takes_its_scheduled_date(tmp_path, monkeypatch):
    seen: list[tuple[str, str]] = []

    class Planned(Exception):
        pass

    def plan_shards(job: BatchJob, key: str) -> None:
        # The task fills in what the run key tells; else the flow has.
        seen.append((str(render_placeholders(job, key).source.uri), key))
        raise Planned

    monkeypatch.setattr(flows, "plan_shards", plan_shards)
    night = datetime(2026, 7, 2, 1, tzinfo=UTC)
    monkeypatch.setattr(flows, "scheduled_start", lambda: night)
    job = nightly(tmp_path)
    for arguments in ({}, {"run_key": "mine"}, {"scheduled_for": night.replace(day=1)}):
        with pytest.raises(Planned):
            flows.batch_inference.fn(job, **arguments)
    days = [Path(uri).parent.name for uri, _ in seen]
    assert days == ["2026-07-02", "2026-07-02", "2026-07-01"]
    assert seen[1][1] == "mine"


def test_a_scheduled_date_is_that_of_the_schedules_own_time_zone(tmp_path, monkeypatch):
    """In UTC a schedule at 01:00 in Berlin skipped a date in March and repeated one in October."""
    dates: list[str] = []

    class Planned(Exception):
        pass

    def plan_shards(job: BatchJob, key: str) -> None:
        dates.append(Path(render_placeholders(job, key).source.uri).parent.name)
        assert written_uri(render_placeholders(job, key).output.uri) == written.output.uri
        raise Planned

    berlin = ZoneInfo("Europe/Berlin")
    monkeypatch.setattr(flows, "plan_shards", plan_shards)
    monkeypatch.setattr(flows, "scheduled_date", lambda start: start.astimezone(berlin).date())
    written = nightly(tmp_path)
    for first in (date(2026, 3, 28), date(2026, 10, 24)):
        days = [first + timedelta(n) for n in range(3)]
        for day in days:
            start = datetime(day.year, day.month, day.day, 1, tzinfo=berlin).astimezone(UTC)
            key = f"nightly-{start:%Y%m%dT%H%M%SZ}"
            for arguments in ({"scheduled_for": start}, {"run_key": key}):
                with pytest.raises(Planned):
                    flows.batch_inference.fn(written, **arguments)
        assert dates == [str(day) for day in days for _ in range(2)]
        dates.clear()


def test_a_flow_that_continues_a_repaired_run_keeps_the_places_of_its_key(monkeypatch):
    places: list[str] = []

    class Inferred(Exception):
        pass

    def infer_shards(job: BatchJob, run: Run) -> None:
        places.append(render_placeholders(job, run.run_key).output.uri)
        raise Inferred

    key = "k-20260701T020000Z"
    repaired = Run(f"out/{key}/{key}.m1", f"{key}.m1", "hash", 1, 1, False)
    monkeypatch.setattr(flows, "plan_shards", lambda job, key: repaired)
    monkeypatch.setattr(flows, "infer_shards", infer_shards)
    with pytest.raises(Inferred):
        flows.batch_inference.fn(make_job(output={"uri": "out/{run_key}"}), key)
    assert places == [f"out/{key}"]


def test_the_time_zone_of_a_flow_run():
    def schedule(id: int, zone: str | None) -> Any:
        return SimpleNamespace(id=id, schedule=SimpleNamespace(timezone=zone))

    def zone(creator: int | None, *schedules: Any) -> str:
        by = None if creator is None else SimpleNamespace(id=creator)
        run = SimpleNamespace(created_by=by)
        return str(zone_of(run, SimpleNamespace(schedules=list(schedules))))

    berlin, tokyo = schedule(1, "Europe/Berlin"), schedule(2, "Asia/Tokyo")
    assert zone(2, berlin, tokyo) == "Asia/Tokyo"
    assert zone(None, berlin) == zone(9, berlin) == "Europe/Berlin", "the run is a night's, by hand"
    assert zone(None, berlin, tokyo) == zone(None) == zone(3, schedule(3, None)) == "UTC"
