"""The judge: its sample, its run inside the run directory, what pages show, and resuming."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from helpers.command_line import called
from helpers.engines import FakeEngine
from helpers.openai_server import Answer, OpenAIServer, completion, failing, openai_server
from helpers.ports import free_ports
from helpers.retries import retried
from helpers.small import make_job

from prefect_raybatch import api
from prefect_raybatch.api import (
    Sender,
    dry_run,
    finalize_run,
    infer_run,
    next_step,
    plan_run,
    publish_run,
)
from prefect_raybatch.compile.job import public_job
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.doctor.check_result import CheckContext
from prefect_raybatch.doctor.places import check_source
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import Listener
from prefect_raybatch.errors import (
    ConfigError,
    CostExceeded,
    EndpointRefused,
    QualityTooLow,
    RunDrained,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.edits import (
    edited,
    judging_job,
    render_placeholders,
    shown_job,
    with_access,
)
from prefect_raybatch.job.trust import check_reach
from prefect_raybatch.ledger import drains
from prefect_raybatch.ledger.last_attempt import JUDGING, PUBLISHING, read_last_attempt
from prefect_raybatch.ledger.layout import PUBLISHED
from prefect_raybatch.policy.policy import JobPolicy
from prefect_raybatch.quality import alarm
from prefect_raybatch.quality.accuracy import interval
from prefect_raybatch.quality.judgement import Corrected
from prefect_raybatch.report.html import html
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import cost_rows, markdown
from prefect_raybatch.report.run_history import headlines, history_markdown, history_rows
from prefect_raybatch.report.verdict import FALLEN_REMARK
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.drain import drain_run
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.judge import judgement_to_make, with_verdicts
from prefect_raybatch.runs.plan_run import precheck_resolved
from prefect_raybatch.runs.publish_run import finished_member
from prefect_raybatch.runs.run_history import history_of
from prefect_raybatch.runs.status import report_of, status
from prefect_raybatch.stages.endpoint import client
from prefect_raybatch.stages.endpoint.body import CAREFUL_CHARACTERS, MESSAGE_TOKENS
from prefect_raybatch.storage import open_store

ROWS = 60
GOOD = ROWS - 1  # FakeEngine refuses one row
PROMPT = "Is <{answer}> right for <{Company}>?"
ASKED = re.compile(r"Is <answer (\d+)> right for <Company (\d+)>\?")


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as made:
        yield made


@pytest.fixture(autouse=True)
def prompt_retries(monkeypatch: pytest.MonkeyPatch, without_ray: None) -> None:
    monkeypatch.setattr(client, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(client, "MOST_BACKOFF", 0.01)


def verdict_of(server: OpenAIServer, is_right: Callable[[int], bool]) -> None:
    """Have the server judge rows by their number."""

    def answer(_: int, body: dict[str, Any]) -> Answer:
        label = "right" if is_right(row_of(body)) else "wrong"
        return 200, {}, completion(json.dumps({"label": label}))

    server.fault = answer


def row_of(body: dict[str, Any]) -> int:
    found = ASKED.search(body["messages"][-1]["content"])
    assert found is not None and found[1] == found[2], body
    return int(found[1])


def rows_asked(server: OpenAIServer) -> list[int]:
    return sorted(map(row_of, server.bodies))


def job_of(
    folder: Path, server: OpenAIServer, judge: dict[str, Any] | None = None, **groups: Any
) -> BatchJob:
    path = folder / "in.parquet"
    if not path.exists():
        table = pa.table({"id": range(ROWS), "Company": [f"Company {i}" for i in range(ROWS)]})
        pq.write_table(table, path)
    endpoint = {"url": server.url, "model": "large", "price_in": 1000.0, "price_out": 0.0}
    asked = {"endpoint": endpoint, "prompt": PROMPT, "sample": 20, **(judge or {})}
    quality = {"judge": asked, **groups.pop("quality", {})}
    output = {"uri": str(folder / "out"), "column": "answer", **groups.pop("output", {})}
    return make_job(
        source={"uri": str(path)},
        engine={"model": "demo"},
        output=output,
        quality=quality,
        **groups,
    )


def completed(job: BatchJob, key: str) -> RunReport:
    run = plan_run(job, key)
    return finalize_run(job, run, infer_run(job, run, engine=FakeEngine))


def in_small_shards(patch: pytest.MonkeyPatch) -> None:
    """Have the judge's run commit every four rows."""

    def small(*arguments: Any) -> BatchJob:
        return edited(judging_job(*arguments), {"source.rows_per_shard": 4}, "the judge")

    patch.setattr(api, "judging_job", small)


def test_a_sample_is_judged_and_shown_with_its_exact_interval(tmp_path, server):
    verdict_of(server, lambda row: row % 5 != 0)
    report = completed(job_of(tmp_path, server), "night")
    asked = rows_asked(server)
    assert len(set(asked)) == len(asked) == 20 and FakeEngine.FAILS not in asked
    right = sum(row % 5 != 0 for row in asked)
    judgement = report.judgement
    assert judgement is not None and 0 < right < 20
    assert (judgement.right, judgement.rows, judgement.not_judged) == (right, 20, 0)
    assert (judgement.low, judgement.high) == pytest.approx(interval(right, 20), abs=1e-6)
    assert len(judgement.rejected) == 20 - right
    assert all(ASKED.sub("", one.shown) for one in judgement.rejected)
    for page in (markdown(report), html(report)):
        assert f"large called {right} of 20 answers right" in page
        assert "Answers that the judge called wrong" in page
    (history,) = history_of(str(tmp_path / "out"), job="nightly")
    assert [row["judged"] for row in history_rows(history)] == [judgement.short()]
    assert report.cost["judge"] == pytest.approx(20 * 11 * 1000 / 1e6) == report.cost["total"]
    rows = [name for name, _ in cost_rows({**report.cost, "per_answered_row": 1.0})]
    assert rows[-1] == "Cost per answered row, without the judge"
    assert cost_rows({"per_answered_row": 1.0})[-1][0] == "Cost per answered row"
    checked = verify(open_store(report.run))
    assert checked.finished and not checked.faults


def test_a_repeat_judges_nothing_again_and_another_night_has_other_rows(tmp_path, server):
    verdict_of(server, lambda row: True)
    job = job_of(tmp_path, server)
    first = completed(job, "monday")
    monday = rows_asked(server)
    assert finalize_run(job, plan_run(job, "monday")).judgement == first.judgement
    assert rows_asked(server) == monday
    server.bodies.clear()
    completed(job, "tuesday")
    assert rows_asked(server) != monday


def assert_unjudged(job: BatchJob, reason: str) -> None:
    """Assert that every view of the run "night" names `reason` ("": that it was judged)."""
    run = f"{job.output.uri}/night"
    step, (page,) = next_step(job, "night"), history_of(job.output.uri)
    assert step is not None and status(run).undone.startswith(reason)
    texts = (*report_of(run).notes, "\n".join(step.lines), history_markdown(page, plots=False))
    said = [text for text in texts if (reason or "judged: ") in text]
    assert len(said) == (3 if reason else 0), texts
    assert all("run the same command or script again" in text for text in said)
    assert ("Nothing to do." in headlines(page)[0]) is not bool(reason)


def next_step_of_night(job: BatchJob) -> tuple[str, ...]:
    step = next_step(job, "night")
    assert step is not None
    return step.lines


class Observer(Listener):
    """Notes which judge's run it is told of, and (done, rows) of each progress."""

    def __init__(self) -> None:
        self.places, self.done = list[str](), list[tuple[int, int]]()

    def on_judge(self, uri: str) -> None:
        self.places.append(uri)

    def __call__(self, progress: Progress) -> None:
        self.done.append((progress.whole_done, progress.whole))


def test_a_judgement_whose_process_was_killed_is_told_with_what_continues_it(tmp_path, server):
    verdict_of(server, lambda row: True)
    job = job_of(tmp_path, server)
    completed(job, "night")
    store = open_store(f"{job.output.uri}/night")
    last = read_last_attempt(store)
    assert last is not None and last.under_way == last.undone == ""
    assert_unjudged(job, "")
    gone = subprocess.Popen(["true"])
    gone.wait()
    begun = replace(last, ended=None, pid=gone.pid)
    begun.put(store)
    assert_unjudged(job, "not judged: killed")
    replace(begun, by="somebody@elsewhere").put(store)  # whose process cannot be looked at
    (page,), who = history_of(job.output.uri), f"by process {gone.pid} of somebody@elsewhere"
    texts = (status(store.uri).under_way, report_of(store.uri).notes[-1], headlines(page)[0])
    assert all(who in text for text in texts) and status(store.uri).undone == ""
    store.delete(["_raybatch/judgement.json"])
    said = " ".join(next_step_of_night(job))
    assert (
        f"{who}. Wait for its end, unless that process is gone" in said and "asks the judge" in said
    )


def test_a_step_hides_neither_what_another_left_undone_nor_one_that_another_process_does(
    tmp_path, server
):
    verdict_of(server, lambda row: True)
    published = {"publish": [{"format": "jsonl", "uri": str(tmp_path / "published")}]}
    job = job_of(tmp_path, server, output=published)
    report = completed(job, "night")
    store = open_store(report.run)
    last = read_last_attempt(store)
    assert last is not None
    failed = replace(last, phase=JUDGING, outcome="failed", error="EndpointRefused", message="no")
    busy = replace(last, phase=JUDGING, ended=None, by="somebody@elsewhere")
    for record in (failed, busy):
        record.put(store)
        shutil.rmtree(tmp_path / "published", ignore_errors=True)
        store.delete([info.path for info in store.list(PUBLISHED)])
        assert publish_run(job, report.run).published
        assert read_last_attempt(store) == record
    failed = replace(failed, phase=PUBLISHING)
    failed.put(store)
    finalize_run(job, plan_run(job, "night"))  # nothing is left to measure
    assert read_last_attempt(store) == failed
    with pytest.raises(ConfigError, match="nowhere to publish"):
        publish_run(edited(job, {"output.publish": []}, "the job"), report.run)
    assert read_last_attempt(store) == failed
    before = store.read("_raybatch/last_attempt.json", 10_000)
    publish_run(job, report.run)  # all is published
    assert store.read("_raybatch/last_attempt.json", 10_000) == before


def test_a_judgement_that_is_cut_off_resumes_and_asks_no_committed_shard_again(
    tmp_path, server, monkeypatch
):
    in_small_shards(monkeypatch)

    def with_key(key: str) -> BatchJob:
        endpoint = {"url": server.url, "model": "large", "price_in": 1000.0, "price_out": 0.0}
        more = {"key": key, "timeout": float(len(key))}
        return job_of(tmp_path, server, {"sample": GOOD, "endpoint": {**endpoint, **more}})

    job = with_key("sk-revoked-0123456789")
    run = plan_run(job, "night")
    progress = infer_run(job, run, engine=FakeEngine)

    said = list[str]()

    def revoked(number: int, body: dict[str, Any]) -> Answer:
        if number == GOOD // 4:
            said.extend((status(run.uri).under_way, *report_of(run.uri).notes))
            said.extend(next_step_of_night(job))
        if number >= GOOD // 2:
            return failing(401, "no such key")
        return 200, {}, completion('{"label": "right"}')

    server.fault = revoked
    with pytest.raises(EndpointRefused, match=r"quality\.judge.*401") as failed:
        finalize_run(job, run, progress)
    working = [text for text in said if f"by process {os.getpid()} of " in text]
    assert len(working) == 3 and all("being judged since " in text for text in working)
    assert "Wait for its end" in working[2]
    assert failed.value.__notes__ == [
        f"The result of {run.uri} is complete. Fix the cause, then run the same command or script "
        "again"
    ]
    assert_unjudged(job, "not judged: EndpointRefused: quality.judge")
    (place,) = (tmp_path / "out/night/_raybatch/judge").iterdir()
    commits = len(list((place / "runs/night-judge/_raybatch/commits").iterdir()))
    assert (
        0 < commits < GOOD // 4 and not (tmp_path / "out/night/_raybatch/judgement.json").exists()
    )
    before = [row_of(body) for body in server.bodies[: 4 * commits]]
    server.bodies.clear()
    verdict_of(server, lambda row: row not in before)
    job = with_key("sk-new-0123456789")
    observer = Observer()
    report = finalize_run(job, plan_run(job, "night"), sender=Sender(job, observe=observer))
    assert observer.places == [f"{place}/runs/night-judge"]
    assert observer.done[-1] == (GOOD, GOOD)
    assert report.judgement is not None and report.judgement.right == GOOD
    assert not set(before) & set(rows_asked(server))
    assert len(server.bodies) <= GOOD - 4 * commits
    assert report.cost["judge"] >= GOOD * 11 * 1000 / 1e6 * 0.99
    assert_unjudged(job, "")


def test_a_judge_is_drained_before_its_first_heartbeat_and_its_rows_are_judgements(
    tmp_path, server, monkeypatch, capsys
):
    in_small_shards(monkeypatch)
    run, said = tmp_path / "out/night", list[str]()

    def drained_early(number: int, body: dict[str, Any]) -> Answer:
        if number == 8:
            for beat in run.glob("_raybatch/judge/*/runs/night-judge/_raybatch/heartbeats/*"):
                beat.unlink()
            said.append(called(capsys, "drain", str(run))[1])
        return 200, {}, completion('{"label": "right"}')

    server.fault = drained_early
    monkeypatch.setattr(drains, "DRAIN_LOOK", 0.0)
    job = job_of(tmp_path, server)
    with pytest.raises(RunDrained):
        completed(job, "night")
    assert "No active driver in the last minute" in said[0]
    assert "of 20 judgements are committed" in said[0]
    verdict_of(server, lambda row: True)
    report = finalize_run(job, plan_run(job, "night"))
    assert report.judgement is not None and report.judgement.rows == 20
    with pytest.raises(ConfigError, match="is complete, so there is nothing to drain"):
        drain_run(str(run))


def test_a_drain_before_the_judge_has_a_plan_says_so(tmp_path, server):
    verdict_of(server, lambda row: True)
    report = completed(job_of(tmp_path, server, quality={}), "night")
    open_store(report.run).delete(["_raybatch/judgement.json"])
    (own,) = Path(report.run).glob("_raybatch/judge/*/runs/night-judge")
    shutil.rmtree(own)
    with pytest.raises(ConfigError, match="its judge has not planned its work yet"):
        drain_run(report.run)


def test_a_block_of_the_judge_that_is_not_loaded_is_refused_before_anything_starts(
    tmp_path, server
):
    job = job_of(tmp_path, server, {"endpoint": {"block": "hosted-model/judge"}})
    for check in (dry_run, partial(plan_run, run_key="night")):
        with pytest.raises(ConfigError) as caught:
            check(job)
        assert str(caught.value).startswith(
            "quality.judge.endpoint.block: hosted-model/judge is loaded by a flow or by raybatch"
        )
    assert not list((tmp_path / "out").rglob("plan.json")) and not server.bodies


def test_rows_that_the_judge_fails_on_are_not_judged_and_counted(tmp_path, server):
    def some(_: int, body: dict[str, Any]) -> Answer:
        if row_of(body) % 2:
            return failing(400, "no")
        return 200, {}, completion('{"label": "right"}')

    server.fault = some
    report = completed(job_of(tmp_path, server), "night")
    assert report.judgement is not None
    odd = sum(row % 2 for row in set(rows_asked(server)))
    assert (report.judgement.rows, report.judgement.not_judged) == (20 - odd, odd)
    assert f"; {odd} not judged" in markdown(report)


def test_a_run_of_which_nothing_was_judged_is_not_published_and_says_why(tmp_path, server):
    server.fault = lambda number, body: failing(400, "no choice here")
    output = {"publish": [{"format": "parquet", "uri": str(tmp_path / "to.parquet")}]}
    job = job_of(tmp_path, server, quality={"at_least": 0.5}, output=output)
    report = completed(job, "night")
    assert report.judgement is not None and report.judgement.rows == 0
    with pytest.raises(QualityTooLow, match=r"quarantine/ of its run, below _raybatch/judge/"):
        publish_run(job, report.run)


def test_the_cost_of_a_judgement_that_is_replaced_stays_in_that_of_the_run(tmp_path, server):
    verdict_of(server, lambda row: True)
    first = completed(job_of(tmp_path, server), "night").cost["judge"]
    output = {"publish": [{"format": "parquet", "uri": str(tmp_path / "to.parquet")}]}
    other = job_of(tmp_path, server, {"prompt": "Another: " + PROMPT}, output=output)
    both = publish_run(other, str(tmp_path / "out/night")).cost["judge"]
    assert first > 0 and both == pytest.approx(2 * first, rel=0.5)


def test_what_a_judgement_that_was_broken_off_cost_is_in_the_cost_of_the_run(
    tmp_path, server, monkeypatch
):
    in_small_shards(monkeypatch)

    def revoked(number: int, body: dict[str, Any]) -> Answer:
        if number >= 12:
            return failing(401, "no such key")
        return 200, {}, completion('{"label": "right"}')

    priced = {"cluster": {"price_per_gpu_hour": 1.0}}
    server.fault = revoked
    with pytest.raises(EndpointRefused):
        completed(job_of(tmp_path, server, {"sample": 40}, **priced), "night")
    verdict_of(server, lambda row: True)
    asked = len(server.bodies)
    limit = {"limits": {"max_cost": 0.1}, **priced}
    other = job_of(tmp_path, server, {"prompt": "Another: " + PROMPT}, **limit)
    with pytest.raises(CostExceeded, match=r"nothing of limits\.max_cost 0\.1 is left"):
        finalize_run(other, plan_run(other, "night"))
    assert len(server.bodies) == asked
    limit["limits"]["max_cost"] = 10
    third = job_of(tmp_path, server, {"prompt": "Another: " + PROMPT}, **limit)
    report = finalize_run(third, plan_run(third, "night"))
    assert report.judgement is not None and report.judgement.rows == 20
    row = 11 * 1000 / 1e6
    assert 30 * row < report.cost["judge"] == pytest.approx(report.cost["total"])
    assert load_report(open_store(report.run)).cost == report.cost


def test_a_run_without_answers_has_nothing_to_judge(tmp_path, server):
    class Refuses(FakeEngine):
        def refused(self, number: int) -> bool:
            return True

    job = job_of(tmp_path, server, limits={"max_failed_fraction": 1.0})
    run = plan_run(job, "night")
    report = finalize_run(job, run, infer_run(job, run, engine=Refuses))
    assert report.judgement is not None and report.judgement.rows == 0 and not server.bodies
    assert "judged no answer" in markdown(report)


def test_what_the_judge_calls_wrong_withholds_publishing(tmp_path, server):
    verdict_of(server, lambda row: row % 4 != 0)
    published = {"publish": [{"format": "jsonl", "uri": str(tmp_path / "published")}]}
    job = job_of(tmp_path, server, quality={"at_least": 0.9}, output=published)
    report = completed(job, "night")
    for known in (job, None):  # also where only the plan knows the job
        with pytest.raises(QualityTooLow, match=r"answers right.*at_least 0\.9"):
            publish_run(known, report.run, targets_from_plan=True)
    verdict_of(server, lambda row: True)
    other = job_of(tmp_path, server, {"sample": 50}, quality={"at_least": 0.9}, output=published)
    assert publish_run(other, report.run).published  # judged again, by a larger sample


def test_a_retry_of_a_run_that_the_judge_calls_wrong_is_not_published(tmp_path, server):
    class Refuses(FakeEngine):
        def refused(self, number: int) -> bool:
            return number == 3

    verdict_of(server, lambda row: False)
    published = {"publish": [{"format": "jsonl", "uri": str(tmp_path / "published")}]}
    some = {"limits": {"max_failed_fraction": 1.0}, "output": published}
    job = job_of(tmp_path, server, quality={"at_least": 0.5}, **some)
    run = plan_run(job, "night")
    finalize_run(job, run, infer_run(job, run, engine=Refuses))
    asked = len(server.bodies)
    again = retried(run.uri, job=job)
    with pytest.raises(QualityTooLow, match=rf"the accuracy of {run.uri}, whose rows it retries"):
        publish_run(job, again)
    assert len(server.bodies) == asked and not (tmp_path / "published").exists()


def test_a_run_judged_again_stays_known_to_the_series_that_it_left(tmp_path, server):
    verdict_of(server, lambda row: row % 4 != 0)
    job = job_of(tmp_path, server)
    report, keys = completed(job, "night"), list[str]()
    for judge in ({"prompt": f"Well: {PROMPT}"}, {"prompt": f"Well: {PROMPT}", "sample": 50}):
        assert report.judgement is not None and report.judgement.series is not None
        keys.append(report.judgement.series.key)
        with pytest.raises(ConfigError, match="nowhere to publish"):
            publish_run(job_of(tmp_path, server, judge), report.run)  # judges again
        report = load_report(open_store(report.run))
        assert report.judgement is not None and report.judgement.series is not None
        assert report.judgement.series.taken_from == (keys[0],)
    assert keys[0] != keys[1] == report.judgement.series.key


def test_the_cost_limit_covers_the_judge(tmp_path, server, monkeypatch):
    in_small_shards(monkeypatch)
    priced = {"cluster": {"price_per_gpu_hour": 1.0}}
    job = job_of(tmp_path, server, limits={"max_cost": 0.1}, **priced)
    run = plan_run(job, "night")
    progress = infer_run(job, run, engine=FakeEngine)

    def revoked(number: int, body: dict[str, Any]) -> Answer:
        if number >= 12:
            return failing(401, "no such key")
        return 200, {}, completion('{"label": "right"}')

    server.fault = revoked
    with pytest.raises(EndpointRefused):
        finalize_run(job, run, progress)
    asked = len(server.bodies)
    verdict_of(server, lambda row: True)
    with pytest.raises(CostExceeded, match=r"limits\.max_cost"):
        finalize_run(job, run)
    assert len(server.bodies) == asked, "the limit was reached before"
    raised = job_of(tmp_path, server, limits={"max_cost": 10}, **priced)
    report = finalize_run(raised, plan_run(raised, "night"))
    assert report.judgement is not None and report.judgement.rows == 20


def test_a_run_that_cost_all_that_it_may_is_not_judged(tmp_path, server):
    priced = {"limits": {"max_cost": 5}, "cluster": {"price_per_gpu_hour": 1.0}}
    job = job_of(tmp_path, server, **priced)
    plain = edited(job, {"quality": {}}, "the job")
    report = replace(completed(plain, "night"), cost={"total": 5.0})
    member = finished_member(open_store(report.run))
    given = (job.quality, job.output, job.limits.max_cost, job.output.uri)
    with pytest.raises(CostExceeded, match=r"complete, but was not judged.*Raise limits\.max_cost"):
        to_judge = judgement_to_make(member, job.quality, job.output)
        assert to_judge is not None
        with_verdicts(report, member, *given, lambda *_: report, to_judge)
    assert not server.bodies


@pytest.mark.parametrize(
    ("judge_fields", "groups", "fault"),
    [
        ({"sample": 0}, {}, r"quality\.judge\.sample"),
        ({"prompt": None}, {}, "prompt is required"),
        ({"model": "demo"}, {}, "set either model or endpoint"),
        ({"engine": {"max_model_len": "auto"}}, {}, "max_model_len"),
        (
            {"engine": {"tensor_parallel_size": 2}},
            {},
            r"quality\.judge\.engine\.tensor_parallel_size",
        ),
        ({"endpoint": {"url": "https://x/v1"}}, {}, r"model"),
        (
            {"endpoint": {"url": "https://x/v1", "model": "m"}},
            {"limits": {"max_cost": 5}, "cluster": {"price_per_gpu_hour": 1}},
            r"limits\.max_cost needs the prices .* quality\.judge\.endpoint\.price_in",
        ),
        ({}, {"output": {"compact": False}}, r"output\.compact"),
    ],
)
def test_fields_that_do_not_go_together(tmp_path, server, judge_fields, groups, fault):
    with pytest.raises(ConfigError, match=fault):
        job_of(tmp_path, server, judge_fields, **groups)


@pytest.mark.parametrize(
    "cluster", [{"job_server": "http://ray:8265"}, {"kubernetes": {"image": "raybatch:1"}}]
)
def test_a_judge_in_vllm_uses_a_cluster_that_receives_jobs_and_a_hosted_one_does_not(
    tmp_path, server, cluster
):
    cluster = {**cluster, "price_per_gpu_hour": 2.0}
    judge = {"endpoint": {}, "model": "demo"}
    job = judging_job(job_of(tmp_path, server, judge, cluster=cluster), "rows.parquet", "runs")
    assert job.cluster.access.remote and job.to_dict()["cluster"] == cluster
    job = judging_job(job_of(tmp_path, server, cluster=cluster), "rows.parquet", "runs")
    assert not job.cluster.access.remote and job.cluster.price_per_gpu_hour == 2.0


def test_a_hosted_judge_keeps_the_currency_and_prices_of_a_cluster_from_a_block(tmp_path, server):
    priced = {"price_per_gpu_hour": 2.0, "currency": "EUR"}
    job = job_of(tmp_path, server, cluster={"block": "ray-cluster/a", **priced})
    job = with_access(job, ClusterAccess(job_server="http://ray:8265", block="ray-cluster/a"))
    judging = judging_job(job, "rows.parquet", "runs")
    assert not judging.cluster.access.remote
    assert judging.to_dict()["cluster"] == {"address": "local", **priced}


def test_a_judge_that_does_not_exist_is_found_before_any_row_is_answered(tmp_path, server):
    judge = {"endpoint": {}, "model": str(tmp_path / "none")}
    job = job_of(tmp_path, server, judge)
    for check in (dry_run, partial(plan_run, run_key="night")):
        with pytest.raises(ConfigError, match=r"^quality\.judge\.model: .*none"):
            check(job)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"^quality\.judge\.model: .*none"):
        precheck_resolved(resolve(job), open_store(str(tmp_path / "out/night")))
    assert not list((tmp_path / "out").rglob("plan.json"))
    kubernetes = {"kubernetes": {"image": "raybatch:1", "gpus_per_worker": 1}}
    judge = {"endpoint": {}, "model": "demo", "engine": {"tensor_parallel_size": 4}}
    with pytest.raises(ConfigError, match=r"4 GPUs .*on one node"):
        plan_run(job_of(tmp_path, server, judge, cluster=kubernetes), "night")


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ({"max_num_seqs": 50, "max_num_batched_tokens": 10}, r"max_num_batched_tokens \(10\) must"),
        (
            {"structured_outputs_config": {"backend": "lm-format-enforcer"}},
            r"structured_outputs_config: .*cannot load the backend",
        ),
        ({"dtype": "flot16"}, r"dtype: must be .*flot16"),
    ],
)
def test_a_judge_whose_engine_cannot_start_is_found_before_any_row_is_answered(
    tmp_path, server, engine, fault
):
    job = job_of(tmp_path, server, {"endpoint": {}, "model": "demo", "engine": engine})
    for check in (
        dry_run,
        partial(plan_run, run_key="night"),
        lambda job: precheck_resolved(resolve(job), open_store(str(tmp_path / "out/night"))),
        lambda job: list(check_source(CheckContext(job))),
    ):
        with pytest.raises(ConfigError, match=rf"^quality\.judge\.engine\.{fault}"):
            check(job)
    assert not list((tmp_path / "out").rglob("plan.json"))


def test_a_hosted_judge_that_its_server_lacks_is_found_before_any_row_is_answered(tmp_path):
    with openai_server(models=("other",)) as server, pytest.raises(EndpointRefused) as caught:
        plan_run(job_of(tmp_path, server), "night")
    text = "quality.judge.endpoint.model: the server has no model 'large'; use one of other"
    assert str(caught.value) == text
    assert not list((tmp_path / "out").rglob("plan.json"))


def test_a_server_of_the_judge_that_is_away_may_be_back_when_the_rows_are_answered(
    tmp_path, server, caplog
):
    endpoint = {"url": f"http://127.0.0.1:{free_ports()[0]}/v1", "model": "large"}
    away = job_of(tmp_path, server, {"endpoint": endpoint})
    plan_run(away, "night")
    assert "quality.judge.endpoint.url: http://127.0.0.1:" in caplog.text
    assert "The run needs this server later" in caplog.text


def test_a_repeated_run_asks_no_server_of_the_judge(tmp_path, caplog):
    with openai_server() as server:
        verdict_of(server, lambda row: True)
        job = job_of(tmp_path, server)
        first = completed(job, "night")
    assert finalize_run(job, plan_run(job, "night")).judgement == first.judgement
    assert "cannot be reached" not in caplog.text


def test_the_judging_run_is_named_after_the_run(tmp_path, server):
    verdict_of(server, lambda row: True)
    key = "n" * 128
    report = completed(job_of(tmp_path, server), key)
    (run,) = Path(report.run).glob("_raybatch/judge/*/runs/*")
    assert run.name == f"{key[:122]}-judge"


def test_a_key_of_the_judge_is_in_no_record(tmp_path, server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-judge-0123456789")
    endpoint = {"url": server.url, "model": "large", "key": "${JUDGE_KEY}"}
    verdict_of(server, lambda row: True)
    job = job_of(tmp_path, server, {"endpoint": endpoint})
    completed(job, "night")
    assert server.authorizations == {"Bearer sk-judge-0123456789"}
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"sk-judge-0123456789" not in path.read_bytes(), path
    local = {"endpoint": {}, "model": "demo", "engine": {"env": {"HF_TOKEN": "hf-secret-0123"}}}
    made = job_of(tmp_path, server, local)
    assert "hf-secret-0123" not in json.dumps([public_job(made), shown_job(made), repr(made)])
    assert BatchJob.from_dict(public_job(made)).quality.judge.model == "demo"


# --- with golden rows ---------------------------------------------------------------------------


def golden_file(folder: Path, rows: range, wrong: Callable[[int], bool]) -> dict[str, Any]:
    """Write golden rows; those that are `wrong` have another answer than FakeEngine gives."""
    lines = [
        json.dumps({"id": row, "answer": "other" if wrong(row) else f"answer {row}"})
        for row in rows
        if row != FakeEngine.FAILS
    ]
    path = folder / "golden.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return {"golden": str(path), "key": ["id"]}


def test_golden_rows_beside_the_sample_correct_the_judge_by_its_confusion(tmp_path, server):
    # Of 29 golden rows 6 are answered wrong. The judge calls 2 of these right, and 1 right one not.
    quality = golden_file(tmp_path, range(30), lambda row: row % 5 == 0)
    verdict_of(server, lambda row: row in (0, 5) or (row % 5 != 0 and row != 7))
    report = completed(job_of(tmp_path, server, {"sample": 10}, quality=quality), "night")
    assert report.accuracy is not None and report.accuracy.right == 23
    judgement = report.judgement
    assert judgement is not None and judgement.corrected is not None
    corrected = judgement.corrected
    assert (corrected.right, corrected.right_called_right) == (23, 22)
    assert (corrected.wrong, corrected.wrong_called_right) == (6, 2)
    hits, misses = 22 / 23, 2 / 6
    by_hand = (judgement.right / 10 - misses) / (hits - misses)
    assert corrected.share == pytest.approx(min(1.0, max(0.0, by_hand)), abs=1e-6)
    assert corrected.low <= corrected.share <= corrected.high
    asked = rows_asked(server)
    assert len(set(asked)) == len(asked) < 29 + 10, "rows in both are asked once"
    text = "corrected by golden rows (Rogan-Gladen), of which it called 22 of 23 right ones right"
    assert (
        text in markdown(report).replace("\\", "") and "4 of 6 wrong ones wrong" in judgement.text()
    )


def test_golden_rows_within_the_sample_correct_the_judge_by_their_labels(tmp_path, server):
    quality = golden_file(tmp_path, range(45), lambda row: row % 5 == 0)
    verdict_of(server, lambda row: True)  # a judge that sees no error
    report = completed(job_of(tmp_path, server, {"sample": ROWS}, quality=quality), "night")
    judgement = report.judgement
    assert judgement is not None and judgement.right == judgement.rows == GOOD
    assert judgement.corrected is not None and judgement.corrected.method == "PPI++"
    assert judgement.share == pytest.approx(35 / 44, abs=0.01)
    assert judgement.corrected.low < 35 / 44 < judgement.corrected.high < judgement.low
    assert judgement.text().endswith(
        "called 35 of 35 right ones right and 0 of 9 wrong ones wrong; this does not show that it "
        "tells right from wrong, so the accuracy rests on the golden rows"
    )


@pytest.mark.parametrize(
    ("counts", "shown"),
    [((50, 48, 10, 1), True), ((50, 40, 10, 6), False), ((50, 48, 0, 0), False)],
)
def test_the_line_says_whether_the_golden_rows_show_that_the_judge_tells_right_from_wrong(
    counts, shown
):
    text = Corrected("PPI++", 0.83, 0.7, 0.9, *counts).text()
    assert ("does not show" in text) is not shown


@pytest.mark.parametrize("rights", [(1, 2), (1,)])  # seems to tell them apart, or not
def test_the_accuracy_is_unknown_if_the_judge_cannot_tell_right_from_wrong(
    tmp_path, server, rights
):
    quality = golden_file(tmp_path, range(30), lambda row: row % 5 == 0)
    verdict_of(server, lambda row: row % 10 == 0 or row % 5 in rights)
    report = completed(job_of(tmp_path, server, {"sample": 10}, quality=quality), "night")
    judgement = report.judgement
    assert judgement is not None and judgement.corrected is not None and judgement.share is None
    assert (judgement.corrected.low, judgement.corrected.high) == (0, 1)
    right = 6 * len(rights) - (FakeEngine.FAILS % 5 in rights)
    called = f"of which it called {right} of 23 right ones right and 3 of 6 wrong ones wrong"
    assert judgement.text() == (
        f"unknown: large called {judgement.right} of 10 answers right; it does not tell right from "
        f"wrong on the golden rows, {called}"
    )
    assert load_report(open_store(report.run)) == report
    for page in (markdown(report), html(report)):
        assert "0.0%" not in page and "unknown: large called" in page
    (history,) = history_of(str(tmp_path / "out"), job="nightly")
    assert [row["judged"] for row in history_rows(history)] == ["unknown"]


def test_without_a_wrong_golden_row_the_line_says_that_nothing_is_corrected(tmp_path, server):
    quality = golden_file(tmp_path, range(10), lambda row: False)
    verdict_of(server, lambda row: row % 3 != 0)
    report = completed(job_of(tmp_path, server, quality=quality), "night")
    assert report.judgement is not None and report.judgement.corrected is None
    assert "no golden row that was answered wrong was judged" in report.judgement.text()


# --- before an engine starts --------------------------------------------------------------------


def test_a_prompt_that_names_a_column_the_result_lacks_is_refused_before_a_plan(tmp_path, server):
    job = job_of(tmp_path, server, {"prompt": "Is {reply} right?"})
    for plan in (lambda: plan_run(job, "never"), lambda: dry_run(job)):
        with pytest.raises(ConfigError, match=r"quality\.judge\.prompt: .*'reply' .*answer"):
            plan()
    dropped = job_of(tmp_path, server, output={"columns": ["id"]})
    with pytest.raises(ConfigError, match=r"'Company' .*Add it to output\.columns"):
        plan_run(dropped, "never")
    assert not list((tmp_path / "out").rglob("plan.json"))


def test_a_prompt_that_shows_the_judge_no_answer_is_refused_before_a_plan(tmp_path, server):
    unseen = (
        r"quality\.judge\.prompt: the judge cannot see the answer.*Add \{answer\} to the prompt"
    )
    for prompt in ("Is {Company} right?", "Is row {_row} right? {finish_reason}"):
        output = {"extras": ["finish_reason"]}
        job = job_of(tmp_path, server, {"prompt": prompt}, output=output)
        for plan in (plan_run, dry_run):
            with pytest.raises(ConfigError, match=unseen):
                plan(job, "never")
    assert not list((tmp_path / "out").rglob("plan.json"))


def test_a_prompt_may_name_any_column_of_a_typed_answer(tmp_path, server):
    types = {name: {"type": "string"} for name in ("label", "reason")}
    form = {"type": "object", "properties": types, "required": list(types)}
    (tmp_path / "form.json").write_text(json.dumps({**form, "additionalProperties": False}))
    output = {"column": "response", "schema_model": str(tmp_path / "form.json")}
    with pytest.raises(ConfigError, match=r"Add one of \{label\}, \{reason\} to the prompt"):
        dry_run(job_of(tmp_path, server, {"prompt": "Is {Company} right?"}, output=output))
    assert dry_run(job_of(tmp_path, server, {"prompt": "Is {reason} right?"}, output=output)).judged


def test_a_key_of_golden_rows_that_the_result_lacks_is_refused_before_a_plan(tmp_path, server):
    quality = golden_file(tmp_path, range(5), lambda row: False)
    groups = {"quality": quality, "output": {"columns": ["Company"]}}
    with pytest.raises(ConfigError, match=r"no column 'id'"):
        job_of(tmp_path, server, **groups)
    quality["key"] = []  # then the file's own columns are the key
    with pytest.raises(ConfigError, match=r"no column 'id'.*output\.columns"):
        plan_run(job_of(tmp_path, server, **groups), "never")


def test_plan_says_how_many_rows_are_judged_and_warns_of_a_model_that_judges_itself(
    tmp_path, server, caplog
):
    plan = dry_run(job_of(tmp_path, server))
    assert plan.judged.startswith("20 of 60 rows, by large; about ") and not plan.golden
    assert not any("judge" in warning for warning in plan.sizing.warnings)
    own = job_of(tmp_path, server, {"endpoint": {}, "model": "demo"})
    assert any("judges its own answers" in warning for warning in dry_run(own).sizing.warnings)
    plan_run(own, "night")
    assert "judges its own answers" in caplog.text


def judge_cost_in(text: str) -> float:
    """What a judge costs, in the words of a plan."""
    found = re.search(r"; about ([\d.]+) if each judged answer is as long as it may be$", text)
    assert found is not None, text
    return float(found[1])


def test_plan_says_what_a_hosted_judge_costs_and_shorter_answers_cost_less(tmp_path, server):
    """The server counts 8 tokens of prompt and 3 of an answer, which is fewer than any request."""
    verdict_of(server, lambda row: True)
    priced = {"price_in": 1000.0, "price_out": 2000.0}
    endpoint = {"url": server.url, "model": "large", **priced}
    job = job_of(tmp_path, server, {"endpoint": endpoint})
    text = f"{PROMPT.format(id='10', Company='Company 10', answer='')}"
    longest = job.sampling.max_tokens
    plan = dry_run(job)
    assert plan.judged.startswith("20 of 60 rows, by large; about ")
    most = judge_cost_in(plan.judged)
    # A request has the prompt with an answer of full length; a verdict is {"label": "right"}.
    prompt, verdict = len(text) / CAREFUL_CHARACTERS + longest + MESSAGE_TOKENS, 6
    expected = 20 * (prompt * 1000.0 + verdict * 2000.0) / 1e6
    assert most == pytest.approx(expected, rel=0.05)
    report = completed(job, "night")
    assert report.judgement is not None and report.judgement.rows == 20
    assert 0 < report.cost["judge"] <= most
    twice = job_of(tmp_path, server, {"endpoint": endpoint, "sample": 40})
    assert judge_cost_in(dry_run(twice).judged) == pytest.approx(2 * most, rel=0.01)
    all_rows = job_of(tmp_path, server, {"endpoint": endpoint, "sample": 99})
    assert judge_cost_in(dry_run(all_rows).judged) == pytest.approx(3 * most, rel=0.01)
    label = edited(job, {"sampling.choice": ["yes", "no"]}, "the job")
    assert judge_cost_in(dry_run(label).judged) < most  # its answers are short


@pytest.mark.parametrize(
    ("endpoint", "changes", "why"),
    [
        ({}, {}, "quality.judge.endpoint has no price_in and price_out"),
        (
            {"price_in": 1.0},
            {"sampling.max_tokens": None},
            "an answer may fill the context (sampling.max_tokens: null)",
        ),
    ],
)
def test_plan_says_that_the_cost_of_a_judge_is_unknown_and_why(
    tmp_path, server, endpoint, changes, why
):
    judge = {"endpoint": {"url": server.url, "model": "large", **endpoint}}
    job = edited(job_of(tmp_path, server, judge), changes, "the job")
    assert dry_run(job).judged == f"20 of 60 rows, by large; its cost is unknown: {why}"


def test_plan_shows_no_cost_for_a_judge_of_the_cluster(tmp_path, server):
    own = job_of(tmp_path, server, {"endpoint": {}, "model": "demo"})
    assert dry_run(own).judged == "20 of 60 rows, by demo"


def test_plan_counts_golden_rows_and_input_that_is_copied_first(tmp_path, server):
    table = pa.table({"id": range(ROWS), "Company": [f"Company {i}" for i in range(ROWS)]})
    pa.csv.write_csv(table, tmp_path / "in.csv")
    quality = golden_file(tmp_path, range(5), lambda row: True)
    job = edited(
        job_of(tmp_path, server, quality=quality),
        {"source.uri": str(tmp_path / "in.csv")},
        "the job",
    )
    plain = edited(job, {"quality.golden": None, "quality.key": []}, "the job")
    golden, without = (judge_cost_in(dry_run(one).judged) for one in (job, plain))
    rows = len(range(5)) - (FakeEngine.FAILS in range(5))
    assert golden == pytest.approx(without * (20 + rows) / 20, rel=0.01)


def test_plan_counts_the_judge_against_the_cost_limit(tmp_path, server):
    """Rows cost little at the hosted model; rows and judge together more than the limit."""
    cheap = {"url": server.url, "model": "small", "price_in": 0.01, "price_out": 0.01}

    def planned(most: float) -> Any:
        hosted = {"engine": {"endpoint": cheap}, "limits": {"max_cost": most}}
        value = job_of(tmp_path, server).to_dict() | hosted
        plan = dry_run(BatchJob.from_dict(value))
        assert plan.cost is not None and plan.cost.cost is not None
        return plan.cost

    rows = planned(1000.0)
    assert rows.warning is None
    assert "may stop the run before it is complete" in str(planned(rows.cost / 2).warning)
    warning = str(planned(2 * rows.cost).warning)
    assert "may stop the judge before it is done. Judge: about " in warning
    assert rows.line() in warning


def test_a_limit_without_effect_on_engines_without_gpus_holds_for_their_judge(tmp_path, server):
    groups = {"limits": {"max_cost": 1000.0}, "cluster": {"price_per_gpu_hour": 1.0}}
    plan = dry_run(job_of(tmp_path, server, **groups))
    assert plan.cost is not None and plan.cost.warning is None
    groups["limits"] = {"max_cost": judge_cost_in(plan.judged) / 2}
    plan = dry_run(job_of(tmp_path, server, **groups))
    assert plan.cost is not None and "may stop the judge" in str(plan.cost.warning)


def test_the_policy_in_force_limits_the_judge_as_the_model(tmp_path, server):
    job = job_of(tmp_path, server)
    policy = JobPolicy("a test", write=(str(tmp_path),))
    with pytest.raises(ConfigError, match=r"quality\.judge\.endpoint\.url"):
        check_reach(job, policy)


# --- over several nights ------------------------------------------------------------------------


@pytest.mark.parametrize("dated", [False, True])
def test_each_night_continues_the_series_of_the_night_before(tmp_path, server, dated, monkeypatch):
    monkeypatch.setattr(alarm, "BASELINE_RUNS", 2)
    target = {"format": "parquet", "uri": str(tmp_path / "published/{run_key}.parquet")}
    output = {"uri": str(tmp_path / ("out/{run_date}" if dated else "out")), "publish": [target]}
    quality = golden_file(tmp_path, range(60), lambda row: row % 10 == 0)
    verdict_of(server, lambda row: row % 10 != 0)
    reports = []
    for day in (1, 2, 3, 4):
        if day == 4:  # the answers get worse
            verdict_of(server, lambda row: row % 5 == 0)
            golden_file(tmp_path, range(60), lambda row: row % 10 == 0)
        job = job_of(tmp_path, server, {"sample": GOOD}, quality=quality, output=output)
        key = f"nightly-2026110{day}T000000Z"
        filled = render_placeholders(job, key)
        run = plan_run(filled, key)
        progress = infer_run(filled, run, engine=FakeEngine)
        report = finalize_run(filled, run, progress, job.output.uri)
        # Publishing measures again, and the run keeps its place.
        reports.append(publish_run(filled, report.run, written=job.output.uri))
    nights = [report.judgement.series for report in reports]
    assert [(one.baseline, one.later) for one in nights] == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert [one.rings for one in nights] == [False, False, False, True]
    assert reports[-1].accuracy.series.later == 2 and not reports[-1].accuracy.series.rings
    assert "the accuracy fell" in markdown(reports[-1])
    (page,) = history_of(output["uri"], job="nightly")
    values = [row["e-value"].split(" / ")[1] for row in history_rows(page)]
    assert values[1:] == [nights[2].short(), "baseline 2 of 2", "baseline 1 of 2"]
    assert FALLEN_REMARK in headlines(page)[0]
    first = reports[0].judgement
    assert finalize_run(filled, run, None, job.output.uri).judgement.series == nights[-1]
    assert first == load_report(open_store(reports[0].run)).judgement
