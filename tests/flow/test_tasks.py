"""The Prefect side against a real Prefect server: run keys, retries by class, artifacts, logs."""

from __future__ import annotations

import importlib
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from helpers.heard import caught_events
from helpers.prefect_server import artifacts_of
from helpers.reports import report
from helpers.retries import first_run, numbers, work
from helpers.small import make_job
from helpers.targets import delta, delta_rows
from prefect import flow
from prefect.artifacts import MarkdownArtifact, TableArtifact
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.states import State
from pydantic import SecretStr

from prefect_raybatch import BatchJob, batch_inference, infer_shards, plan_shards, retry_failed
from prefect_raybatch.cluster.prewarm import Prewarming, current_prewarming
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import ConfigError, EngineStartError, StoreUnavailable
from prefect_raybatch.flow import artifacts, completion, tasks
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.records import Commit
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.report.advice import DEADLINE_MISSED
from prefect_raybatch.report.records import Advice, RunReport
from prefect_raybatch.report.verdict import verdict_of
from prefect_raybatch.runs.listing import list_runs
from prefect_raybatch.runs.run import Run

RUN = Run("/nowhere/k", "k", "hash", 100, 4, False)

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The plain functions behind the tasks, replaced by ones that note how they were called."""
    made: dict[str, list[Any]] = {"plan": [], "infer": [], "finalize": []}

    def plan_run(job: BatchJob, key: str, dataset: Any = None, accept: Any = ()) -> Run:
        made["plan"].append(key)
        return RUN

    def infer_run(job: BatchJob, run: Run, observe: Any) -> Progress:
        made["infer"].append(run)
        progress = Progress(100, 4)
        good, none = Positions.spans((0, 25)), Positions()
        for shard in range(4):
            stats = ShardStats(rows=25, started=time.time(), ended=time.time())
            commit = Commit(shard, "a", "t", "h", good, none, none, (), stats, {}, {}, 0.0)
            progress.add(commit, time.time())
            observe(progress)
        return progress

    def finalize_run(job: BatchJob, run: Run, progress: Any, *_: Any) -> RunReport:
        made["finalize"].append(run)
        return report()

    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", plan_run)
    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)
    monkeypatch.setattr("prefect_raybatch.flow.tasks.finalize", finalize_run)
    monkeypatch.setattr(completion, "put_sent", lambda *_: None)  # the run has no directory
    return made


def test_the_default_key_is_the_outermost_scheduled_start(calls: dict[str, list[Any]]) -> None:
    keys: list[str] = []

    @flow
    def nightly() -> None:
        batch_inference(make_job(name="inner"))
        keys.append(calls["plan"][-1])

    before = datetime.now(UTC).replace(microsecond=0)
    state = nightly(return_state=True)
    assert state.is_completed()
    with get_client(sync_client=True) as client:
        outermost = client.read_flow_run(state.state_details.flow_run_id)
        named = FlowRunFilter(name=FlowRunFilterName(any_=keys))
        assert client.read_flow_runs(flow_run_filter=named)
    start = outermost.expected_start_time
    assert start and keys == [f"inner-{start.astimezone(UTC):%Y%m%dT%H%M%SZ}"]
    assert re.fullmatch(r"inner-\d{8}T\d{6}Z", keys[0])
    assert keys[0] >= f"inner-{before:%Y%m%dT%H%M%SZ}"


def test_the_state_of_a_completed_run_has_the_verdict(calls: dict[str, list[Any]]) -> None:
    state = batch_inference(make_job(), "k", return_state=True)
    report = batch_inference(make_job(), "k")  # callers get the report all the same
    assert state.is_completed() and state.result() == report
    assert state.message == verdict_of(report)
    assert re.fullmatch(
        r"99 of 100 rows, 1 in quarantine \(1\.0 %\), .*\. Nothing to do\.", state.message
    )


def test_engines_may_start_early_from_the_plan_to_the_end_of_inference(
    calls: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks are in the flow's context, however Prefect calls them."""
    seen: list[Prewarming | None] = []
    names = ("flow.tasks.plan_run", "api.submission.infer_run", "flow.tasks.finalize")
    for name in names:
        place, _, last = f"prefect_raybatch.{name}".rpartition(".")
        plain = getattr(importlib.import_module(place), last)

        def noted(*given: Any, plain: Any = plain) -> Any:
            seen.append(current_prewarming())
            return plain(*given)

        monkeypatch.setattr(f"{place}.{last}", noted)
    batch_inference(make_job(), "k")
    planned, inferred, finalized = seen
    assert planned is inferred is not None and finalized is None and planned.closed


def test_the_flow_run_is_named_by_the_run_key(calls: dict[str, list[Any]]) -> None:
    def made(*arguments: Any, **named: Any) -> tuple[State, str]:
        state = batch_inference(*arguments, return_state=True, **named)
        assert state.state_details.flow_run_id is not None
        with get_client(sync_client=True) as client:
            return state, client.read_flow_run(state.state_details.flow_run_id).name

    assert made(make_job(), "night-7")[1] == "night-7"
    missed = datetime(2026, 3, 1, 2, tzinfo=UTC)
    assert made(make_job(name="j"), scheduled_for=missed)[1] == "j-20260301T020000Z"
    state, _ = made({"name": "nothing-else"})
    assert state.is_failed() and "job.source: Field required" in (state.message or "")


def test_a_deadline_that_was_missed_is_the_last_word_of_a_green_run(
    calls: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missed = Advice(DEADLINE_MISSED, "49 s of work where 10s are allowed", "9 engines instead of 1")
    other = Advice("engines are uneven", "1.3", "less")
    late = replace(report(), advice=(missed, other))
    monkeypatch.setattr("prefect_raybatch.flow.tasks.finalize", lambda *_: late)
    state = batch_inference(make_job(), "late", return_state=True)
    assert state.is_completed()
    told = [r.message for r in caplog.records if r.levelname == "WARNING"]
    line = "the deadline was missed: 49 s of work where 10s are allowed. Use 9 engines instead of 1"
    assert [text for text in told if "deadline" in text] == [line]
    assert "uneven" not in "".join(told)


@pytest.mark.parametrize(
    ("error", "tries"), [(ConfigError("field x is wrong"), 1), (StoreUnavailable("away"), 4)]
)
def test_only_passing_faults_are_tried_again(
    error: Exception, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def plan_run(job: BatchJob, key: str, dataset: Any = None, accept: Any = ()) -> Run:
        seen.append(key)
        raise error

    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", plan_run)

    @flow
    def once() -> None:
        plan_shards.with_options(retry_delay_seconds=0)(make_job(), "k")

    state = once(return_state=True)
    assert state.is_failed() and len(seen) == tries
    with pytest.raises(type(error), match=str(error)):
        state.result()


def test_a_start_error_is_terminal_and_the_flow_is_failed(
    calls: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def infer_run(job: BatchJob, run: Run, observe: Any) -> Progress:
        calls["infer"].append(run)
        raise EngineStartError("no such model")

    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)
    state = batch_inference(make_job(), "k", return_state=True)
    assert state.is_failed() and "no such model" in (state.message or "")
    assert len(calls["infer"]) == 1 and not calls["finalize"]


def test_artifacts_and_logs_are_in_the_page(
    calls: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "Night_1.a"

    def finalize_run(job: BatchJob, run: Run, progress: Any, *_: Any) -> RunReport:
        return report(key)

    def plan_run(job: BatchJob, run_key: str, dataset: Any = None, accept: Any = ()) -> Run:
        return Run("/nowhere/k", key, "hash", 100, 4, False)

    monkeypatch.setattr("prefect_raybatch.flow.tasks.finalize", finalize_run)
    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", plan_run)
    job = make_job(name="Artifacts.of-one")
    base = artifacts.artifact_key(job.name)
    wanted = {f"{base}-{kind}" for kind in ("progress", "live", "stages", "failures", "report")}
    with get_client(sync_client=True) as client:
        # Prefect's server on SQLite was once locked for a minute; the page then gives up in time.
        for _ in range(2):
            state = batch_inference(job, key, return_state=True)
            assert state.is_completed()
            found = {a.key: a for a in artifacts_of(f"{base}-")}
            if wanted <= set(found):
                break
        run_id = state.state_details.flow_run_id
        deadline, logs = time.time() + 120, []
        while not any("100 of 100 rows" in text for text in logs) and time.time() < deadline:
            time.sleep(0.5)
            lines = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id]))
            logs = [line.message for line in client.read_logs(lines)]
    assert wanted <= set(found)
    assert found[f"{base}-progress"].data == 100.0
    assert "| Rows in quarantine | 1 (1.00%) |" in found[f"{base}-report"].data
    assert any("100 of 100 rows" in text for text in logs)


class KeysLikeAws(Block):
    """The fields of prefect-aws's AwsCredentials that matter here."""

    _block_type_slug = "keys-like-aws"

    aws_access_key_id: str
    aws_secret_access_key: SecretStr
    aws_session_token: SecretStr | None = None
    aws_client_parameters: dict = {}


def test_keys_come_from_a_block_and_stay_out_of_the_flow_parameters(
    calls: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = KeysLikeAws(aws_access_key_id="id-1", aws_secret_access_key=SecretStr("hush-hush"))
    block.save("night", overwrite=True)
    seen: list[dict[str, Any]] = []

    def plan_run(job: BatchJob, key: str, dataset: Any = None, accept: Any = ()) -> Run:
        seen.append(job.output.options)
        return RUN

    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", plan_run)
    # It would ask the store, which nobody answers for, for as long as a store is asked.
    monkeypatch.setattr("prefect_raybatch.flow.tasks.send_history_events", lambda *_, **__: None)
    name = "keys-like-aws/night"
    job = make_job(output={"uri": "s3://b/out", "credentials_block": name})
    state = batch_inference(job, "k", return_state=True)
    assert state.is_completed()
    assert seen == [{"key": "id-1", "secret": "hush-hush"}]
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(state.state_details.flow_run_id)
    assert run.parameters and "hush-hush" not in str(run.parameters)


class CountedKeys(KeysLikeAws):
    """Keys whose block counts how often it is loaded."""

    _block_type_slug = "counted-keys"
    loaded: ClassVar[list[str]] = []

    def block_initialization(self) -> None:
        self.loaded.append(self.aws_access_key_id)


def test_a_task_loads_a_block_once(calls: dict[str, list[Any]]) -> None:
    CountedKeys(aws_access_key_id="id-1", aws_secret_access_key=SecretStr("hush")).save(
        "night", overwrite=True
    )
    job = make_job(output={"uri": "s3://b/out", "credentials_block": "counted-keys/night"})

    @flow
    def infer() -> int:
        CountedKeys.loaded.clear()
        return infer_shards(job, RUN).done

    assert infer() == 100
    assert CountedKeys.loaded == ["id-1"]


@pytest.mark.parametrize("name", ["keys-like-aws/nobody", "no-such-type/x", "nonsense"])
def test_a_block_that_cannot_be_loaded_is_a_config_error(name: str) -> None:
    job = make_job(source={"uri": "in.parquet", "credentials_block": name})
    with pytest.raises(ConfigError, match="credentials_block"):
        tasks.with_blocks(job)


def test_a_page_that_is_away_stops_nothing(
    calls: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def away(*_: Any, **__: Any) -> Any:
        asked.append("artifact")
        raise ConnectionError("no API")

    monkeypatch.setattr(artifacts, "get_client", away)

    @flow
    def infer() -> int:
        return infer_shards(make_job(), RUN).done

    assert infer() == 100
    assert asked


def answered(status: int) -> httpx.HTTPStatusError:
    response = httpx.Response(status, request=httpx.Request("POST", "http://prefect/artifacts"))
    return httpx.HTTPStatusError(f"status {status}", request=response.request, response=response)


@pytest.mark.parametrize(
    ("error", "tries"),
    [(answered(413), 1), (answered(429), 3), (httpx.ConnectError("refused"), 3)],
)
def test_artifacts_that_prefect_does_not_take_fail_no_run(
    error: Exception, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is tried again only in an outage, and then published without them."""
    refused: list[str] = []

    def refuse(self: TableArtifact, **_: Any) -> None:
        refused.append(str(self.key))
        raise error

    monkeypatch.setattr(TableArtifact, "create", refuse)
    output = {"publish": [delta(tmp_path)]}
    made = first_run(tmp_path / "out", name=f"untaken-{tries}", finish=False, output=output)
    run = Run(made.store.uri, "key", made.plan.hash, 20, 4, False)

    @flow
    def night() -> None:
        again: dict[str, Any] = {"retries": 2, "retry_delay_seconds": 0}
        tasks.finalize_run.with_options(**again)(made.job, run)
        tasks.publish_run.with_options(**again)(made.job, run)

    with monkeypatch.context() as patch:
        if tries > 1:  # then it is the page of the report, too
            patch.setattr(MarkdownArtifact, "create", refuse)
        assert night(return_state=True).is_completed()
    assert delta_rows(tmp_path)
    base = artifacts.artifact_key(made.job.name)
    assert refused.count(f"{base}-stages") == tries
    assert refused.count(f"{base}-report") == (tries if tries > 1 else 0)
    kinds = {artifact.key.removeprefix(f"{base}-") for artifact in artifacts_of(f"{base}-")}
    assert ("report" in kinds) == (tries == 1) and "stages" not in kinds


def test_a_night_is_completed_once_it_is_published_to_all(tmp_path, monkeypatch):
    sent = caught_events(monkeypatch)
    (tmp_path / "file").write_text("in the way")
    broken = {"format": "jsonl", "uri": str(tmp_path / "file")}
    made = first_run(tmp_path / "out", finish=False, output={"publish": [delta(tmp_path), broken]})
    job, run = made.job, Run(made.store.uri, "key", made.plan.hash, 20, 4, False)

    @flow
    def night(begun: Run) -> None:
        tasks.finalize_run(job, begun)
        tasks.publish_run.with_options(retries=0)(job, begun)

    assert night(run, return_state=True).is_failed()
    assert [event["event"] for event in sent] == ["raybatch.run.failed"]
    (tmp_path / "file").unlink()
    again = replace(run, finished=True)
    assert night(again, return_state=True).is_completed()
    assert sent[1]["event"] == "raybatch.run.completed"
    assert sent[1]["payload"]["published"] == ["delta", "jsonl"]
    assert night(again, return_state=True).is_completed() and len(sent) == 2  # it was before


def test_the_flow_that_retries_failed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states tell the truth: completed with a report, completed with nothing to do, failed."""

    def infer_run(job: BatchJob, run: Run, observe: Any = None) -> None:
        work(run, job, {7: "Again"})

    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)
    output = {"publish": [delta(tmp_path)]}
    uri = first_run(tmp_path, output=output).store.uri
    # Targets come from whoever calls it, and not from the run directory.
    state = retry_failed(uri, ["ValueError"], return_state=True)
    with pytest.raises(ConfigError, match="name the job with --job"):
        state.result()
    changes = {"sampling.max_tokens": 9, "output.publish": output["publish"]}
    report = retry_failed(uri, ["ValueError", "EngineDied"], changes)
    assert report is not None
    assert (report.run_key, report.good, report.failed) == ("key.r1", 2, 1)
    assert numbers(report.run) == [4, 11]
    assert [one.rows for one in report.published] == [2]  # the flow is completed after it
    assert sorted(row["_row"] for row in delta_rows(tmp_path)) == [4, 11]
    state = retry_failed(uri, ["ValueError"], {"output.publish": []}, return_state=True)
    assert state.is_failed()
    with pytest.raises(ConfigError, match=r"retry-failed .*key\.r1"):
        state.result()
    state = retry_failed(uri, ["ValueEror"], return_state=True)
    assert state.is_failed()
    with pytest.raises(ConfigError, match=r"failed with ValueEror\. .* ValueError \(2\)"):
        state.result()
    empty = first_run(tmp_path, failed={}, key="good").store.uri
    state = retry_failed(empty, return_state=True)
    assert state.is_completed() and "no row of good failed" in str(state.message)
    assert retry_failed(empty) is None


def test_a_run_that_was_complete_before_says_so_in_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = first_run(tmp_path, failed={})
    plan = made.plan
    run = Run(made.store.uri, plan.run_key, plan.hash, plan.rows, plan.shards, True)
    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", lambda *_: run)
    state = batch_inference(made.job, run.run_key, return_state=True)
    assert state.is_completed() and "was complete before" in str(state.message)
    assert state.result().rows == plan.rows
    assert batch_inference(made.job, run.run_key).rows == plan.rows


def test_a_flow_run_that_fails_while_planning_is_among_the_nights(tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = make_job(
        name="no-input", source={"uri": str(tmp_path / "in.parquet")}, output={"uri": str(out)}
    )
    state = batch_inference(job, "monday", return_state=True)
    assert state.is_failed()
    (line,) = list_runs(str(out))
    assert line.state == "failed" and line.failure.startswith("planning: SourceError")
    assert "monday" in line.command
    page = str(artifacts_of("raybatch-no-input-history")[0].data)
    assert "monday failed: planning: SourceError" in page

    job = make_job(name="no-field", output={"uri": str(out)})
    state = batch_inference(job, "tuesday", overrides={"sampling.max_tokens": 0}, return_state=True)
    assert state.is_failed()
    page = str(artifacts_of("raybatch-no-field-history")[0].data)
    assert "tuesday failed: planning: ConfigError" in page
