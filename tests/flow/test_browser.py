"""What an operator sees and clicks: Prefect's pages over a deployed flow, in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from failures.campaign import look
from failures.cases import CASES
from failures.world import World
from helpers.browser import browser_page, expect, form_field, picture
from helpers.prefect_server import Prefect
from helpers.processes import below, held, running, title, until
from helpers.ray_head import Head
from playwright.sync_api import Locator, Page

from prefect_raybatch.demo.customers import companies, write_customers
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.job.source import Source
from prefect_raybatch.remote.client import JobServer, RayJob
from prefect_raybatch.report.answers import shifts
from prefect_raybatch.report.plots import data_uri, history_plot
from prefect_raybatch.report.run_history import HistoryLine, HistoryPage, history_markdown
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

pytestmark = [pytest.mark.e2e, pytest.mark.whole, pytest.mark.timeout(1500)]

SHARD = 50
LABELS = ".schema-form-property__label"
ROWS = 1_500
MANY = 20_000  # a minute of work on a quiet machine, which cancelling cuts short
CANCELLED = 120  # seconds until nothing is left of a run on a busy machine; 5 to 10 on a quiet one
TERMINAL = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}
WORK = 600  # seconds for a run on a busy machine, which may need Prefect's retry of its start


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the jobs read and write: a short path, as it is to be seen in the pictures."""
    with TemporaryDirectory(prefix="nightly-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser_page() as made:
        yield made


def site(prefect: Prefect, path: str) -> str:
    return prefect.url.removesuffix("/api") + path


def open_run(page: Page, prefect: Prefect, run: str) -> None:
    page.goto(site(prefect, f"/runs/flow-run/{run}"))
    expect(page.get_by_text("batch_inference", exact=True).first).to_be_visible()


def search_artifacts(page: Page, prefect: Prefect, text: str) -> None:
    """The page of artifacts as the operator narrows it: of all keys it shows only fifty."""
    page.goto(site(prefect, "/artifacts"))
    page.get_by_placeholder("Search artifacts").fill(text)


def open_artifact(page: Page, prefect: Prefect, key: str) -> None:
    """Follows the operator's way: the artifacts, the key's card, its newest version."""
    search_artifacts(page, prefect, key)
    page.get_by_text(key, exact=True).click()
    page.locator("a[href*='/artifacts/artifact/']").first.click()
    expect(page.get_by_text("Show raw data")).to_be_visible()


def submit(page: Page) -> None:
    """Clicks as an operator does: again where the page says that the server took nothing, as one
    on a busy machine may."""
    taken = page.get_by_text("scheduled to start")
    refused = page.get_by_text("Something went wrong")
    for _ in range(5):
        page.get_by_role("button", name="Submit").click()
        expect(taken.or_(refused).first).to_be_visible()
        if taken.first.is_visible():
            return
        page.get_by_role("button", name="Close").first.click()
        expect(refused).to_have_count(0)
    expect(taken.first).to_be_visible()


def leave(page: Page) -> None:
    """Shows nothing until the next page is opened: that of a run draws itself all the time, which
    takes most of a core."""
    page.goto("about:blank")


def in_time(page: Page, shown: Locator) -> None:
    """Waits for what an artifact says later: its page shows it as it was when it was opened."""
    for _ in range(30):
        with suppress(AssertionError):
            expect(shown.first).to_be_visible(timeout=2_000)
            return
        page.reload()
    expect(shown.first).to_be_visible()


def row_in_time(page: Page, text: str) -> None:
    in_time(page, page.get_by_role("row", name=re.compile(text)))


def tab(page: Page, name: str) -> None:
    page.locator(".p-tab", has_text=re.compile(f"^{name}$")).click()


def committed(run_dir: Path) -> int:
    return sum(1 for _ in run_dir.glob("_raybatch/commits/*.json"))


def commits(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run_dir.glob("_raybatch/commits/*.json")}


def holding(head: Head, run_dir: Path, every: float = 20.0) -> AbstractContextManager[None]:
    """No machine is to be through with the run before it has been looked at."""
    return held(lambda: below(head.pid, "EngineStage"), lambda: committed(run_dir), every)


def working(prefect: Prefect, run: str, run_dir: Path, least: int) -> None:
    """Waits for this many commits; a run that ends before fails."""

    def look() -> bool:
        state = prefect.state(run)
        assert state["type"] in ("SCHEDULED", "PENDING", "RUNNING"), state
        return committed(run_dir) >= least

    prefect.until(look, WORK, "the first commits")


def at_work(prefect: Prefect, head: Head) -> list[psutil.Process]:
    """What works for the runs: the flows' processes, and on the Ray head the workers of the
    pipeline, among them the engines, and what these have started."""
    workers = below(head.pid, "MapBatches(")
    return [*below(prefect.worker), *workers, *(p for w in workers for p in below(w.pid))]


def seen_at_work(page: Page, prefect: Prefect, run: str, tmp_path: Path) -> None:
    """Looks at the pages of a run that works, for which a second one waits meanwhile."""
    dev = prefect.deployments["dev"]["id"]
    again = {"parameters": prefect.ask(f"flow_runs/{run}")["parameters"]}
    second = prefect.ask(f"deployments/{dev}/create_flow_run", again)["id"]
    open_run(page, prefect, run)
    expect(page.get_by_text("Running", exact=True).first).to_be_visible()
    line = page.get_by_text(
        re.compile(rf"of {ROWS:,} rows \(\d+%\), \d+ rows/s, .* left, 0 failed")
    )
    expect(line.first).to_be_visible()
    page.get_by_role("button", name="Oldest to newest").press("ArrowDown")
    page.locator(".p-select-option", has_text="Newest to oldest").click()
    expect(line.first).to_be_visible()
    picture(page, "run", tmp_path, 1000)
    open_artifact(page, prefect, "raybatch-dev-live")
    row_in_time(page, f"rows .*of {ROWS:,}")
    row_in_time(page, "state inferring")
    row_in_time(page, "engines alive 1")
    picture(page, "live", tmp_path, 700)
    open_artifact(page, prefect, "raybatch-dev-progress")
    in_time(page, page.get_by_text(re.compile(r"Progress: (0\.\d*[1-9]|[1-9])")))
    (share,) = set(re.findall(r"Progress: ([\d.]+)", page.locator("body").inner_text()))
    assert 0 < float(share) < 100, "the run had ended: nothing was seen of its work"
    prefect.until(
        lambda: prefect.state(second)["name"] == "AwaitingConcurrencySlot",
        60,
        "a second run that waits for the first",
    )
    cancelled = {"state": {"type": "CANCELLED"}, "force": True}
    prefect.ask(f"flow_runs/{second}/set_state", cancelled)
    assert prefect.state(run)["type"] == "RUNNING", "the first had ended: nothing was tested"


def runs_of(prefect: Prefect, deployment: str) -> dict[str, dict[str, Any]]:
    found = prefect.ask("flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}})
    return {run["id"]: run for run in found}


def submitted(prefect: Prefect, deployment: str, before: Collection[str]) -> dict[str, Any]:
    """The run of a deployment that was not there before, as soon as it is there."""

    def found() -> list[dict[str, Any]]:
        return [run for id, run in runs_of(prefect, deployment).items() if id not in before]

    (run,) = prefect.until(found, 60, "the run that was submitted")
    return dict(run)


def job_of(url: str, run_dir: Path) -> RayJob:
    """The Ray job of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        jobs = JobServer(url).jobs()
    (job,) = (job for job in jobs if job.metadata.get("raybatch_run") == str(run_dir))
    return job


def test_the_form_starts_a_run_and_the_pages_tell_of_it(
    deployed: Prefect, page: Page, ray_head: Head, folder: Path, tmp_path: Path
) -> None:
    prefect, job_server = deployed, ray_head.url
    run_dir, table = folder / "out/monday", str(folder / "customers.csv")
    write_customers(table, ROWS, 3)
    dev = prefect.deployments["dev"]["id"]
    before = runs_of(prefect, dev)

    page.goto(site(prefect, f"/deployments/deployment/{dev}/run"))
    form = page.locator("form").first
    where = form_field(form, "Job", "Source", "Location")
    expect(where).to_contain_text("Folders are read recursively")
    expect(where.locator("textarea")).to_have_value("customers.csv")
    # Titles and not the names of fields; a choice is a list to choose from.
    labels = form.locator(LABELS).all_inner_texts()
    assert len(labels) > 60, labels
    first = [text.removesuffix(" (Optional)") for text in labels[:4]]
    assert first == ["Run key", "Scheduled for", "Run date", "Row limit"]  # then the job
    assert not [text for text in labels if "_" in text or text[:1].islower()]
    device = form_field(form, "Job", "Engine", "Device")
    device.locator("button.p-select-button__control").press("ArrowDown")
    options = page.locator(".p-select-option")
    expect(options).to_have_text(["auto", "gpu", "cpu"])
    options.nth(2).click()
    expect(device).to_contain_text("cpu")
    # Tabs with the names of Python's types are only left where both are of use.
    assert "Property is type" not in form_field(form, "Job").inner_text()

    where.locator("textarea").fill(table)
    form_field(form, "Job", "Output", "Location").locator("textarea").fill(str(folder / "out"))
    form_field(form, "Job", "Cluster", "Job server").locator("textarea").fill(job_server)
    form_field(form, "Job", "Source", "Rows per shard").locator("input").fill(str(SHARD))
    key = form_field(form, "Run key")
    key.get_by_role("button", name="Value", exact=True).click()
    key.locator("textarea").fill("monday")
    page.get_by_role("link", name="Deployments").last.scroll_into_view_if_needed()
    picture(page, "form", tmp_path, 1000)
    with holding(ray_head, run_dir):
        submit(page)
        leave(page)
        run = submitted(prefect, dev, before)
        job = run["parameters"]["job"]
        # Beside it the form sends what is there anyway.
        given = Source(uri=table, rows_per_shard=SHARD)
        assert Source.model_validate(job["source"]).model_dump() == given.model_dump()
        assert job["cluster"]["job_server"] == job_server
        assert job["engine"]["device"] == "cpu" and run["parameters"]["run_key"] == "monday"
        working(prefect, run["id"], run_dir, 1)
        seen_at_work(page, prefect, run["id"], tmp_path)
        leave(page)
    prefect.until(lambda: prefect.state(run["id"])["type"] == "COMPLETED", WORK, "the end")
    proof = verify(open_store(str(run_dir)))
    assert proof.ok and (proof.rows, proof.data, proof.quarantined) == (ROWS, ROWS, 0)
    answers = pq.read_table(run_dir / "data")["industry"].to_pylist()
    truth = [label for _, label in companies(ROWS, 3, "all")]
    assert sum(a == b for a, b in zip(answers, truth, strict=True)) >= 0.95 * ROWS
    open_run(page, prefect, run["id"])
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
    expect(page.get_by_text(f"{ROWS:,} rows = {ROWS:,} answered + 0 in quarantine")).to_be_visible()
    assert page.locator(".log-row").count() < 60, "a log line every 15 seconds, not spam"
    tab(page, "Task Runs")
    for name in ("plan-shards", "infer-shards", "finalize-run", "result-asset"):
        expect(page.get_by_text(f"{name}-monday", exact=True)).to_be_visible()
    tab(page, "Artifacts")
    expect(page.get_by_text("raybatch-dev-report", exact=True)).to_be_visible()
    expect(page.get_by_text("raybatch-dev-history", exact=True)).to_be_visible()

    search_artifacts(page, prefect, "raybatch-dev-")
    for kind in ("progress", "live", "stages", "report"):
        expect(page.get_by_text(f"raybatch-dev-{kind}", exact=True)).to_be_visible()
    picture(page, "artifacts", tmp_path, 500)
    open_artifact(page, prefect, "raybatch-dev-report")
    expect(page.get_by_role("heading", name="dev: completed")).to_be_visible()
    expect(page.get_by_role("row", name=f"Rows answered {ROWS:,}")).to_be_visible()
    expect(page.get_by_role("heading", name="Stages")).to_be_visible()
    picture(page, "report", tmp_path, 1100)
    open_artifact(page, prefect, "raybatch-dev-stages")
    for stage in ("read", "prepare", "engine", "finish"):
        expect(page.locator("tr", has_text=stage)).to_contain_text(f"{ROWS:,}")
    open_artifact(page, prefect, "raybatch-dev-progress")
    expect(page.get_by_text("Progress: 100%")).to_be_visible()


def test_the_form_asks_kubernetes_for_a_cluster_of_the_runs_own(
    deployed: Prefect, page: Page, folder: Path, tmp_path: Path
) -> None:
    """What is typed there becomes the job's `cluster.kubernetes`, and what is left empty stays out.
    Where there is no Kubernetes the page says so."""
    prefect, table = deployed, str(folder / "few.csv")
    write_customers(table, 20, 3)
    dev = prefect.deployments["dev"]["id"]
    page.goto(site(prefect, f"/deployments/deployment/{dev}/run"))
    form = page.locator("form").first
    within = ("Job", "Cluster", "Cluster on Kubernetes")
    group = form_field(form, *within)
    expect(group).to_contain_text("Create a Ray cluster with KubeRay")
    titles = [text.removesuffix(" (Optional)") for text in group.locator(LABELS).all_inner_texts()]
    fields = [str(one.title) for one in Kubernetes.model_fields.values()]
    assert sorted(titles[1:]) == sorted(fields), titles
    form_field(form, "Job", "Source", "Location").locator("textarea").fill(table)
    form_field(form, "Job", "Output", "Location").locator("textarea").fill(str(folder / "kube"))
    for name, value in {
        "Image": "registry.example.com/raybatch:1.0",
        "Memory per worker": "64Gi",
        "Namespace": "ray",
        "Context": "nowhere",
        "Start timeout": "45m",
    }.items():
        form_field(form, *within, name).locator("textarea").fill(value)
    for name, number in {"Workers": 4, "GPUs per worker": 2}.items():
        form_field(form, *within, name).locator("input").fill(str(number))
    key = form_field(form, "Run key")
    key.get_by_role("button", name="Value", exact=True).click()
    key.locator("textarea").fill("kube")
    form_field(form, *within, "Image").scroll_into_view_if_needed()
    picture(page, "form-kubernetes", tmp_path, 1000)
    submit(page)
    leave(page)

    asked = {"flow_runs": {"name": {"any_": ["kube"]}}}

    def ended() -> Any:
        found = prefect.ask("flow_runs/filter", asked)
        return [run for run in found if run["state_type"] in TERMINAL]

    (run,) = prefect.until(ended, WORK, "the end of the run that was submitted")
    assert run["state_type"] == "FAILED", run["state"]
    job = BatchJob.from_dict(run["parameters"]["job"])
    assert job.cluster.kubernetes.model_dump(exclude_defaults=True) == {
        "image": "registry.example.com/raybatch:1.0",
        "workers": 4,
        "gpus_per_worker": 2,
        "worker_memory": "64Gi",
        "namespace": "ray",
        "context": "nowhere",
        "ready_within": "45m",
    }
    assert job.cluster.kubernetes.asked and not job.cluster.job_server
    open_run(page, prefect, run["id"])
    expect(page.get_by_text("nowhere").first).to_be_visible()
    assert "run_key=kube" in run["state"]["message"]


def test_the_morning_page_shows_a_table_and_plots(
    prefect_process: Prefect, page: Page, tmp_path: Path
) -> None:
    history = made_up_history()
    for other in range(60):  # more keys than the page of artifacts shows at once
        prefect_process.ask(
            "artifacts/", {"key": f"another-{other}", "type": "markdown", "data": "Another."}
        )
    for key, kind, data in (
        ("history", "markdown", history_markdown(history)),
        ("history-plots", "image", data_uri(history_plot(history.runs) or "")),
    ):
        name = f"raybatch-{history.job}-{key}"
        prefect_process.ask(
            "artifacts/", {"key": name, "type": kind, "data": data, "description": "Run history."}
        )
    open_artifact(page, prefect_process, f"raybatch-{history.job}-history")
    expect(page.get_by_role("heading", name=f"{history.job}: the last 14 runs")).to_be_visible()
    expect(page.get_by_text("the labels differ from").first).to_be_visible()
    drawn = page.get_by_role("img", name="Runs")
    expect(drawn).to_be_visible()
    assert drawn.evaluate("image => image.naturalWidth") > 500
    picture(page, "nights", tmp_path, 1500)
    open_artifact(page, prefect_process, f"raybatch-{history.job}-history-plots")
    expect(page.locator("img[src^='data:image/svg']").first).to_be_visible()


def made_up_history() -> HistoryPage:
    """Two weeks of a job: one night was not finished, and in the last one labels shifted."""
    days = []
    for day in range(14):
        key, began = f"industries-202603{day + 1:02}T010000Z", 1772326800.0 + 86400 * day
        rows = 1_000_000 + 7_000 * day
        if day == 9:
            days.append(HistoryLine(key, "/r", "unfinished", began, rows, 0.4))
            continue
        shares = {"Retail": 0.5, "Finance": 0.3, "Law Firm": 0.2}
        if day == 13:
            shares = {"Retail": 0.3, "Finance": 0.3, "Law Firm": 0.4}
        counts = {"labels": {name: share * rows for name, share in shares.items()}}
        changed = shifts(counts, days[-1].answers, days[-1].run_key) if day == 13 else ()
        done = rows - 120 * day
        days.append(
            HistoryLine(key, "/r", "completed", began, rows, 1.0, done, 120 * day, 310.0 + day,
                  rows / 310, 21.5 + day / 4, counts, changed)
        )  # fmt: skip
    return HistoryPage("industries", tuple(reversed(days)))


@pytest.mark.nightly
def test_cancel_in_the_page_ends_the_run_and_keeps_its_commits(
    deployed: Prefect, page: Page, ray_head: Head, folder: Path, tmp_path: Path
) -> None:
    prefect, job_server = deployed, ray_head.url
    run_dir, table = folder / "out/dev-20260301T010000Z", str(folder / "many.csv")
    write_customers(table, MANY, 3)
    dev = prefect.deployments["dev"]
    job = {
        **dev["parameters"]["job"],
        "source": {"uri": table, "rows_per_shard": SHARD},
        "output": {"uri": str(folder / "out"), "column": "industry"},
        "cluster": {"job_server": job_server},
    }
    # Of a night that was missed: its key follows from the time it was scheduled for.
    body = {"parameters": {"job": job, "scheduled_for": "2026-03-01T02:00:00+01:00"}}
    with holding(ray_head, run_dir, 2.0):
        run = prefect.ask(f"deployments/{dev['id']}/create_flow_run", body)["id"]
        working(prefect, run, run_dir, 5)
        kept, before = commits(run_dir), at_work(prefect, ray_head)
        ray_job = job_of(job_server, run_dir)
        assert prefect.ask(f"flow_runs/{run}")["labels"]["raybatch.job"] == ray_job.id
        titles = "\n".join(map(title, before))
        assert "prefect.engine" in titles and "EngineStage" in titles, titles
        open_run(page, prefect, run)
        page.get_by_role("button", name="Cancel", exact=True).click()
        expect(page.get_by_text("Cancel Flow Run", exact=True)).to_be_visible()
        page.get_by_role("button", name="Confirm", exact=True).click()
        badge = page.locator(".state-badge", has_text=re.compile("^Cancelled$"))
        expect(badge.first).to_be_visible()
    until(lambda: not [*running(before), *at_work(prefect, ray_head)], CANCELLED, "their end")
    assert prefect.state(run)["type"] == "CANCELLED"
    assert job_of(job_server, run_dir).status == "STOPPED"
    picture(page, "cancelled", tmp_path, 600)

    now = commits(run_dir)
    assert kept.items() <= now.items(), "a commit was changed or lost"
    assert len(now) < MANY // SHARD and not (run_dir / "_SUCCESS").exists()
    command = ["raybatch", "reconcile", job_server, "--json"]
    done = subprocess.run(command, env=prefect.env, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["actions"] == [], done.stderr


def test_the_cause_of_a_failure_is_on_the_first_screen(
    deployed: Prefect, page: Page, folder: Path, tmp_path: Path
) -> None:
    night = next(case for case in CASES if case.name == "missing-column")
    with ExitStack() as stack:
        world = World(folder, stack, given=deployed)
        seen = night.play(world)
        command = deployed.state(seen.run)["message"].rstrip().splitlines()[-1].strip()
        assert command.startswith("prefect deployment run batch_inference/dev -p ")
        assert " -p run_key=missing-column-tuesday" in command
        open_run(page, deployed, seen.run)
        cause = page.locator(".log-row", has_text="plan_shards failed: ConfigError")
        expect(cause.first).to_contain_text(command)
        assert "Traceback" not in page.locator("body").inner_text()
        picture(page, "failed", tmp_path, 900)
        look(page, world, night, seen, tmp_path)
