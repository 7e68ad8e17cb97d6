"""What an operator sees and clicks: Prefect's pages over a deployed flow, in a real browser."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from helpers.browser import browser_page, expect, form_field, picture
from helpers.prefect_server import ROOT, Prefect, prefect_server
from helpers.ray_head import start_head
from playwright.sync_api import Page

from prefect_raybatch.demo.customers import write_customers
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

pytestmark = pytest.mark.e2e

SHARD = 50
ROWS = 20_000  # a minute of work on a quiet machine: the pages must be seen meanwhile
MARK = "RAYBATCH_TEST_HEAD"  # tells this head's processes from others on the machine
WORK = 600  # seconds for a run on a busy machine, which may need Prefect's retry of its start


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the jobs read and write: a short path, as it is to be seen in the pictures."""
    with TemporaryDirectory(prefix="nightly-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def job_server(folder: Path) -> Iterator[str]:
    with start_head(4, PYTHONPATH=str(ROOT), **{MARK: str(folder)}) as url:
        yield url


@pytest.fixture(scope="module")
def prefect(job_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    with prefect_server(tmp_path_factory.mktemp("prefect")) as made:
        made.env["RAY_AUTH_MODE"] = "disabled"
        made.deploy()
        made.work()
        yield made


@pytest.fixture(scope="module")
def page(prefect: Prefect) -> Iterator[Page]:
    with browser_page() as made:
        yield made


def site(prefect: Prefect, path: str) -> str:
    return prefect.url.removesuffix("/api") + path


def open_run(page: Page, prefect: Prefect, run: str) -> None:
    page.goto(site(prefect, f"/runs/flow-run/{run}"))
    expect(page.get_by_text("batch_inference", exact=True).first).to_be_visible()


def open_artifact(page: Page, prefect: Prefect, key: str) -> None:
    """Follows the operator's way: the artifacts, the key's card, its newest version."""
    page.goto(site(prefect, "/artifacts"))
    page.get_by_text(key, exact=True).click()
    page.locator("a[href*='/artifacts/artifact/']").first.click()
    expect(page.get_by_text("Show raw data")).to_be_visible()


def row_in_time(page: Page, text: str) -> None:
    """Waits for a row of the live table, which its page shows as it was when it was opened."""
    row = page.get_by_role("row", name=re.compile(text))
    for _ in range(30):
        with suppress(AssertionError):
            expect(row).to_be_visible(timeout=2_000)
            return
        page.reload()
    expect(row).to_be_visible()


def tab(page: Page, name: str) -> None:
    page.locator(".p-tab", has_text=re.compile(f"^{name}$")).click()


def commits(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run_dir.glob("_raybatch/commits/*.json")}


def working(prefect: Prefect, run: str, run_dir: Path, least: int) -> None:
    """Waits for this many commits; a run that ends before fails."""

    def look() -> bool:
        state = prefect.state(run)
        assert state["type"] in ("SCHEDULED", "PENDING", "RUNNING"), state
        return len(commits(run_dir)) >= least

    prefect.until(look, WORK, "the first commits")


def at_work(prefect: Prefect, folder: Path) -> list[psutil.Process]:
    """What works for the runs: the flows' processes, and on this test's Ray head the workers of
    the pipeline, among them the engines, and what these have started."""
    found = psutil.Process(prefect.worker).children(recursive=True)
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):  # gone meanwhile
            if "MapBatches(" not in " ".join(process.info["cmdline"] or ()):
                continue
            if process.environ().get(MARK) == str(folder):
                found += [process, *process.children(recursive=True)]
    return [process for process in found if running(process)]


def running(process: psutil.Process) -> str:
    """A process's command line, empty when it has ended."""
    with suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return " ".join(process.cmdline()).strip()
    return ""


def test_the_form_starts_a_run_and_the_pages_tell_of_it(
    prefect: Prefect, page: Page, job_server: str, folder: Path, tmp_path: Path
) -> None:
    run_dir, table = folder / "out/monday", str(folder / "customers.csv")
    write_customers(table, ROWS, 3)
    dev = prefect.deployments["dev"]["id"]

    page.goto(site(prefect, f"/deployments/deployment/{dev}/run"))
    form = page.locator("form").first
    where = form_field(form, "Job", "Source", "Where")
    expect(where).to_contain_text("A folder is read recursively.")
    expect(where.locator("textarea")).to_have_value("deployments/customers.csv")
    # Titles and not the names of fields; a choice is a list to choose from.
    labels = form.locator(".schema-form-property__label").all_inner_texts()
    assert len(labels) > 60 and labels[0] == "Job", labels
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
    form_field(form, "Job", "Output", "Where").locator("textarea").fill(str(folder / "out"))
    form_field(form, "Job", "Cluster", "Job server").locator("textarea").fill(job_server)
    form_field(form, "Job", "Source", "Rows a shard").locator("input").fill(str(SHARD))
    key = form_field(form, "Run key")
    key.get_by_role("button", name="Given").click()
    key.locator("textarea").fill("monday")
    page.get_by_role("link", name="Deployments").last.scroll_into_view_if_needed()
    picture(page, "form", tmp_path, 1000)
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_text("scheduled to start").first).to_be_visible()

    def runs() -> Any:
        return prefect.ask("flow_runs/filter", {"deployments": {"id": {"any_": [dev]}}})

    (run,) = prefect.until(runs, 60, "the run that was submitted")
    job = run["parameters"]["job"]
    read = {"uri": table, "rows_per_shard": SHARD, "format": "auto", "options": {}}
    assert job["source"] == read and job["cluster"]["job_server"] == job_server
    assert job["engine"]["device"] == "cpu" and run["parameters"]["run_key"] == "monday"

    working(prefect, run["id"], run_dir, 3)
    open_run(page, prefect, run["id"])
    expect(page.get_by_text("Running", exact=True).first).to_be_visible()
    line = page.get_by_text(
        re.compile(rf"of {ROWS:,} rows \(\d+%\), \d+ rows/s, .* left, 0 failed")
    )
    expect(line.first).to_be_visible()
    page.get_by_role("button", name="Oldest to newest").press("ArrowDown")
    page.locator(".p-select-option", has_text="Newest to oldest").click()
    expect(line.first).to_be_visible()
    picture(page, "run", tmp_path, 1000)
    open_artifact(page, prefect, "raybatch-monday-live")
    row_in_time(page, f"rows .*of {ROWS:,}")
    row_in_time(page, "state inferring")
    row_in_time(page, "engines alive 1")
    picture(page, "live", tmp_path, 700)
    open_artifact(page, prefect, "raybatch-monday-progress")
    (share,) = re.findall(r"Progress: ([\d.]+)", page.locator("body").inner_text())
    assert 0 < float(share) < 100, "the run had ended: nothing was seen of its work"

    prefect.until(lambda: prefect.state(run["id"])["type"] == "COMPLETED", WORK, "the end")
    assert verify(open_store(str(run_dir))).ok
    open_run(page, prefect, run["id"])
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
    expect(page.get_by_text(f"{ROWS:,} rows = {ROWS:,} answered + 0 in quarantine")).to_be_visible()
    assert page.locator(".log-row").count() < 60, "a log line every 15 seconds, not spam"
    tab(page, "Task Runs")
    for name in ("plan-shards", "infer-shards", "finalize-run", "result-asset"):
        expect(page.get_by_text(f"{name}-monday", exact=True)).to_be_visible()
    tab(page, "Artifacts")
    expect(page.get_by_text("raybatch-monday-report", exact=True)).to_be_visible()

    page.goto(site(prefect, "/artifacts"))
    for kind in ("progress", "live", "stages", "report"):
        expect(page.get_by_text(f"raybatch-monday-{kind}", exact=True)).to_be_visible()
    picture(page, "artifacts", tmp_path, 500)
    open_artifact(page, prefect, "raybatch-monday-report")
    expect(page.get_by_role("heading", name="dev: completed")).to_be_visible()
    expect(page.get_by_role("row", name=f"Rows answered {ROWS:,}")).to_be_visible()
    expect(page.get_by_role("heading", name="Stages")).to_be_visible()
    picture(page, "report", tmp_path, 1100)
    open_artifact(page, prefect, "raybatch-monday-stages")
    for stage in ("read", "prepare", "engine", "finish"):
        expect(page.locator("tr", has_text=stage)).to_contain_text(f"{ROWS:,}")
    open_artifact(page, prefect, "raybatch-monday-progress")
    expect(page.get_by_text("Progress: 100%")).to_be_visible()


def test_cancel_in_the_page_ends_the_run_and_keeps_its_commits(
    prefect: Prefect, page: Page, job_server: str, folder: Path, tmp_path: Path
) -> None:
    run_dir, table = folder / "out/long", str(folder / "many.csv")
    write_customers(table, 60_000, 3)
    dev = prefect.deployments["dev"]
    job = {
        **dev["parameters"]["job"],
        "source": {"uri": table, "rows_per_shard": SHARD},
        "output": {"uri": str(folder / "out"), "column": "industry"},
        "cluster": {"job_server": job_server},
    }
    body = {"parameters": {"job": job, "run_key": "long"}}
    run = prefect.ask(f"deployments/{dev['id']}/create_flow_run", body)["id"]
    working(prefect, run, run_dir, 5)
    kept, before = commits(run_dir), at_work(prefect, folder)
    titles = "\n".join(map(running, before))
    assert "prefect.engine" in titles and "EngineStage" in titles, titles

    open_run(page, prefect, run)
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.get_by_text("Cancel Flow Run", exact=True)).to_be_visible()
    clicked = time.monotonic()
    page.get_by_role("button", name="Confirm", exact=True).click()
    badge = page.locator(".state-badge", has_text=re.compile("^Cancelled$"))
    expect(badge.first).to_be_visible(timeout=30_000)
    while left := [*filter(running, before), *at_work(prefect, folder)]:
        assert time.monotonic() - clicked < 30, f"these outlive the cancelled run: {left}"
        time.sleep(0.2)
    took = time.monotonic() - clicked
    print(f"cancelled, and its engines gone, within {took:.1f} s of the click")
    assert took < 30
    assert prefect.state(run)["type"] == "CANCELLED"
    picture(page, "cancelled", tmp_path, 600)

    now = commits(run_dir)
    assert kept.items() <= now.items(), "a commit was changed or lost"
    assert len(now) < 60_000 // SHARD and not (run_dir / "_SUCCESS").exists()
    time.sleep(3)
    assert commits(run_dir) == now, "something goes on committing"
