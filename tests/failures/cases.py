"""The nights: how each is made to fail, and what must be on the first screen of the page."""

from __future__ import annotations

import csv
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from helpers import environ
from helpers.pager import automations_script, pager
from helpers.postgresql import for_prefect
from helpers.prefect_server import settings_for
from helpers.processes import ENGINE, below, held
from helpers.ray_head import ROOT
from s3server import proxy

from .world import World

BUCKET = "night"
# By its default an engine asks for nearly all memory, of a CPU too where the head claims a GPU.
ON_GPU = {"model": "demo", "device": "gpu", "max_model_len": 256, "gpu_memory_utilization": 0.1}
STALLED = "Check that the store is up and can be reached"
AWAY, BACK = "has not answered for", "Prefect was unreachable for"


@dataclass(frozen=True)
class Seen:
    """Where a night is looked at: the artifact `key`, or the log of flow run `run`; each of `texts`
    must be there. `seconds` from the fault to where the page says so. Of a run that has not failed
    the `warnings` alone are looked at, as whoever asks what happened to it would. `file` is a page
    that a command wrote. After `mend`, which removes the cause, the command that is shown must
    complete the run `mends`, or it completes `by_itself`."""

    run: str
    key: str | None
    texts: tuple[str, ...]
    seconds: float
    warnings: bool = False
    file: Path | None = None
    mend: Callable[[], None] | None = None
    mends: str = ""
    by_itself: bool = False


@dataclass(frozen=True)
class Case:
    """A night that fails: its name, how it is made to, what the page says of it, and how it is
    played."""

    name: str
    title: str
    planted: str
    said: str
    play: Callable[[World], Seen]


CASES: list[Case] = []
Play = Callable[[World], Seen]


def case(title: str, planted: str, said: str) -> Callable[[Play], Play]:
    def keep(play: Play) -> Play:
        CASES.append(Case(play.__name__.replace("_", "-"), title, planted, said, play))
        return play

    return keep


PATH = f"{ROOT}{os.pathsep}{environ.python_path()}"  # what workers can import


def many(world: World, rows: int = 3_000) -> dict[str, Any]:
    """A source in many shards."""
    return {"uri": world.customers("many.csv", rows), "rows_per_shard": 50}


def holding(world: World, key: str) -> AbstractContextManager[None]:
    """No machine is to be through with a run on the head before what is done to it."""
    return held(lambda: below(world.head.pid, *ENGINE), lambda: world.commits(key))


def kill(pid: int) -> None:
    """A process and all below it, at once."""
    for process in [*below(pid), psutil.Process(pid)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def worker(world: World) -> None:
    """Another worker in place of the one there, with the variables as they are now."""
    kill(world.prefect.worker)
    world.prefect.work()


def nothing() -> None:
    """What is to be mended before the command is carried out."""


Pages = list[dict[str, Any]]


@contextmanager
def on_call(world: World) -> Iterator[Pages]:
    """The pages that our automations send to the one on call."""
    with settings_for(world.prefect), pager() as pages:
        automations_script().deploy("custom-webhook/on-call")
        yield pages


def paged_once(world: World, pages: Pages, subject: str, seconds: float = 90) -> str:
    """Waits for the page with that in its subject, which comes once; its text."""

    def found() -> Pages:
        return [page for page in pages if subject in page["subject"]]

    world.prefect.until(found, seconds, "the page to the one on call")
    (page,) = found()
    return str(page["body"])


def failed(world: World, job: dict[str, Any], texts: tuple[str, ...], seconds: float) -> Seen:
    """Runs a job that must fail, and is told of in its failure artifact."""
    began = time.monotonic()
    run = world.start(job, f"{job['name']}-tuesday")
    world.ended(run, "FAILED", seconds)
    return Seen(run, f"raybatch-{job['name']}-failure", texts, time.monotonic() - began)


@case(
    "A column is missing",
    "The prompt names a column that the input no longer has.",
    "The missing column and those there are.",
)
def missing_column(world: World) -> Seen:
    source = {"uri": world.customers("renamed.csv", 100)}
    job = world.job("missing-column", source=source, prompt={"template": "What is {Nothing}?"})
    seen = failed(world, job, ("Nothing", "prefect deployment run batch_inference/dev"), 120)
    path = Path(source["uri"])
    text = path.read_text(encoding="utf-8")
    named = partial(path.write_text, text.replace("Company", "Nothing", 1), encoding="utf-8")
    return replace(seen, mend=named, mends="missing-column-tuesday")


@case(
    "There is no GPU",
    "The job asks for GPUs on a cluster without any.",
    "What the job needs and the cluster has.",
)
def no_gpus(world: World) -> Seen:
    job = world.job("no-gpus", engine=ON_GPU, cluster={"job_server": world.head.url})
    texts = ("GPU", "prefect deployment run batch_inference/dev")
    seen = failed(world, job, texts, 240)
    return replace(seen, mend=partial(world.renew_head, gpus=1), mends="no-gpus-tuesday")


@case(
    "Wrong keys",
    "The store's secret key was changed.",
    "The store's message and the variables with the keys.",
)
def wrong_keys(world: World) -> Seen:
    world.s3.create_bucket(BUCKET)
    job = world.job("wrong-keys", output={"uri": f"s3://{BUCKET}/out", "column": "industry"})
    world.prefect.env |= {**world.s3.env, "AWS_SECRET_ACCESS_KEY": "x" * 40}
    worker(world)
    began = time.monotonic()
    run = world.start(job, "tuesday")
    world.ended(run, "FAILED", 120)
    texts = ("SignatureDoesNotMatch", "AWS_ACCESS_KEY_ID", "prefect flow-run retry")
    took = time.monotonic() - began

    def mend() -> None:
        world.prefect.env |= world.s3.env
        worker(world)

    return Seen(
        run, "raybatch-wrong-keys-failure", texts, took, mend=mend,
        mends=f"s3://{BUCKET}/out/tuesday",
    )  # fmt: skip


@case(
    "Too many bad rows",
    "Every fifth company name has 3,000 characters, more than max_model_len.",
    "How many rows failed, why, and some of them.",
)
def bad_rows(world: World) -> Seen:
    path = world.customers("long.csv", 400)
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows[::5]:
        row["Company"] += " and Sons" * 330
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    job = world.job(
        "bad-rows",
        source={"uri": path, "rows_per_shard": 50},
        cluster={"job_server": world.head.url},
    )
    texts = ("rows tried failed", "limits.max_failed_fraction", "Examples of failed rows")
    return replace(failed(world, job, texts, 900), mend=nothing, mends="bad-rows-tuesday")


@contextmanager
def killing(world: World) -> Iterator[None]:
    """Kills each engine that is seen."""
    over = threading.Event()

    def hunt() -> None:
        while not over.wait(0.5):
            for process in below(world.head.pid, "EngineStage"):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    thread = threading.Thread(target=hunt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@case(
    "An engine that dies",
    "Each engine process gets SIGKILL as it starts.",
    "How often and where engines died as they started.",
)
def engine_dies(world: World) -> Seen:
    job = world.job("engine-dies", cluster={"job_server": world.head.url})
    with killing(world):
        texts = ("process died while starting", "their memory", "prefect flow-run retry")
        seen = failed(world, job, texts, 900)
    return replace(seen, mend=nothing, mends="engine-dies-tuesday")


@case(
    "The store stalls",
    "The store takes requests for half a minute and answers none.",
    "A warning: which request waits and what to check.",
)
def store_stalls(world: World) -> Seen:
    world.s3.create_bucket(BUCKET)
    committed, over = threading.Event(), threading.Event()

    def decide(method: str, path: str, headers: Any) -> str:
        if committed.is_set() and not over.is_set():
            return "slow 40"
        if method == "PUT" and "/commits/" in path:  # the first one; all that comes after it waits
            committed.set()
        return "pass"

    output = {"uri": f"s3://{BUCKET}/stalls", "column": "industry"}
    with proxy(world.s3, decide) as between:
        env = {**world.s3.env, "AWS_ENDPOINT_URL": between.endpoint}
        job = world.job("store-stalls", source=many(world), output=output)
        run = world.start(job, "tuesday", **env)
        world.committed(run, committed.is_set)
        took = world.logs(run, STALLED, 90)
        over.set()
        world.ended(run, "COMPLETED", 300)
    return Seen(run, None, (STALLED,), took, warnings=True)


@case(
    "The cluster is gone",
    "The Ray head gets SIGKILL during the run and stays away.",
    "A warning: the job server does not answer. With it, the run continues.",
)
def cluster_gone(world: World) -> Seen:
    job = world.job("cluster-gone", source=many(world), cluster={"job_server": world.head.url})
    run = world.start(job, "cluster-gone")
    world.logs(run, "starting engines", 240)
    kill(world.head.pid)
    # It fails after 20 minutes of asking, four times: the one on call looks before that.
    took = world.logs(run, AWAY, 120)
    return Seen(
        run, None, (AWAY, "raybatch doctor"), took, warnings=True, mend=world.renew_head,
        mends="cluster-gone", by_itself=True,
    )  # fmt: skip


@case(
    "The worker's host is gone",
    "Worker and flow run get SIGKILL.",
    "Crashed, with the cause and the command.",
)
def dead_worker(world: World) -> Seen:
    cluster = {"job_server": world.head.url}
    with on_call(world) as pages:
        job = world.job("dead-worker", source=many(world), cluster=cluster)
        with holding(world, "dead-worker"):
            run = world.start(job, "dead-worker", PREFECT_FLOWS_HEARTBEAT_FREQUENCY="30")
            world.logs(run, "starting engines", 240)
            beats = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}}}
            # After one the automation looks for the next.
            world.prefect.until(
                lambda: world.prefect.ask("events/filter", beats)["events"], 90, "a heartbeat"
            )
            kill(world.prefect.worker)
        began = time.monotonic()
        world.ended(run, "CRASHED", 240)
        took = time.monotonic() - began
        body = paged_once(world, pages, "crashed")
        assert f"prefect flow-run retry {run}" in body, body
    texts = ("dead-worker crashed", "no heartbeat for", f"prefect flow-run retry {run}")
    return Seen(
        run, None, texts, took, file=world.history(), mend=world.prefect.work, mends="dead-worker"
    )


@case(
    "A deadline is missed",
    "The deadline is ten seconds.",
    "A warning: by how much, and the field that sets the deadline.",
)
def deadline_missed(world: World) -> Seen:
    limits = {"deadline": "10s"}
    source = {**many(world), "rows_per_shard": 100}
    cluster = {"job_server": world.head.url}
    job = world.job("deadline-missed", source=source, cluster=cluster, limits=limits)
    began = time.monotonic()
    with holding(world, "deadline-missed"):
        run = world.start(job, "deadline-missed")
        world.committed(run, lambda: world.commits("deadline-missed"))
        time.sleep(10)  # it began before its first commit, so that it is late now
    world.ended(run, "COMPLETED", 900)
    texts = ("the deadline was missed", "limits.deadline")
    return Seen(run, None, texts, time.monotonic() - began, warnings=True)


def away(world: World, name: str) -> Seen:
    """Takes Prefect's server away for two minutes of a run, and gives it back."""
    # As docs/how-to/schedule.md says, or Prefect ends the run once its server has forgotten it.
    storage = "prefect.server.concurrency.lease_storage.filesystem"
    world.env["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"] = storage
    cluster = {"job_server": world.head.url}
    job = world.job(name, source=many(world, 20_000), cluster=cluster)
    with holding(world, name):  # it is at work when its API is back
        run = world.start(job, name)
        world.logs(run, "starting engines", 240)
        server = next(p for p in world.prefect.started if p.args[-1] == str(world.prefect.port))
        kill(server.pid)
        began = time.monotonic()
        time.sleep(120)
        world.prefect.serve()
        world.logs(run, BACK, 240)
    took = time.monotonic() - began
    world.ended(run, "COMPLETED", 420)  # longer than Prefect waits before it ends a run it forgot
    return Seen(run, None, (BACK, "The run continued"), took, warnings=True)


@case(
    "Prefect is away (SQLite)",
    "Its server gets SIGKILL and starts again two minutes later.",
    "A warning: how long its API was away.",
)
def prefect_away(world: World) -> Seen:
    return away(world, "prefect-away")


@case(
    "Prefect is away (PostgreSQL)",
    "The same, with PostgreSQL as database.",
    "The same.",
)
def prefect_away_postgresql(world: World) -> Seen:
    world.env |= world.stack.enter_context(for_prefect())
    return away(world, "prefect-away-postgresql")


def usual(world: World, name: str, rows: int, **groups: Any) -> dict[str, Any]:
    """A job with a completed run of so many rows."""
    cluster = {"job_server": world.head.url}
    job = world.job(name, source=many(world, rows), cluster=cluster, **groups)
    world.ended(world.start(job, f"{name}-monday"), "COMPLETED", 600)
    return job


@case(
    "Far fewer rows than usual",
    "The input has 60 rows, and had 600 the night before.",
    "The verdict: rows of tonight and usual ones.",
)
def few_rows(world: World) -> Seen:
    with on_call(world) as pages:
        usual(world, "few-rows", 600)
        began = time.monotonic()
        cluster = {"job_server": world.head.url}
        tonight = world.job("few-rows", source=many(world, 60), cluster=cluster)
        run = world.start(tonight, "few-rows-tuesday")
        message = world.ended(run, "COMPLETED", 600)["message"]
        assert "Far fewer rows than usual: 60" in message, message
        took = time.monotonic() - began
        paged_once(world, pages, "far fewer rows")
    texts = ("Far fewer rows than usual: 60", "Check the input", "few-rows-monday")
    return Seen(run, "raybatch-few-rows-history", texts, took)


@case(
    "A night that never started",
    "No worker is there when the run is due.",
    "`raybatch history` and the alarm: why, and the command.",
)
def never_started(world: World) -> Seen:
    with on_call(world) as pages:
        job = usual(world, "never-started", 100)
        kill(world.prefect.worker)
        began = time.monotonic()
        run = world.start(job, "never-started-tuesday")
        body = paged_once(world, pages, "never-started is late", 240)
        took = time.monotonic() - began
        assert "prefect worker start --pool raybatch" in body, body
        world.prefect.until(
            lambda: "is late" in world.history().read_text(encoding="utf-8"), 240, "the history"
        )
    command = "prefect worker start --pool raybatch"
    texts = ("never-started-tuesday is late", "no worker of work pool raybatch", command)
    return Seen(
        run, None, texts, took, file=world.history(), mend=nothing, mends="never-started-tuesday"
    )


@case(
    "Twice the usual time",
    "The engines are halted until the run takes twice as long as the night before.",
    "A warning: the time so far and the usual one.",
)
def twice_the_time(world: World) -> Seen:
    with on_call(world) as pages:
        job = usual(world, "twice-the-time", 3_000)
        began = time.monotonic()
        slow = "at least twice the usual time"
        with holding(world, "twice-the-time-tuesday"):
            run = world.start(job, "twice-the-time-tuesday")
            world.logs(run, slow, 900)
        took = time.monotonic() - began
        paged_once(world, pages, "twice the usual time")
        world.ended(run, "COMPLETED", 600)
    return Seen(run, None, (slow, "usually takes"), took, warnings=True)


@case(
    "The cost is near its limit",
    "At its rate the run will cost more than limits.max_cost.",
    "A warning: the cost, the limit, and what happens there.",
)
def cost_near(world: World) -> Seen:
    world.gpus = 1
    with on_call(world) as pages:
        cluster = {"job_server": world.head.url, "price_per_gpu_hour": 3600}
        limits = {"max_cost": 900}  # of 1 a second: long after the warning
        job = world.job(
            "cost-near", source=many(world, 300_000), engine=ON_GPU, cluster=cluster, limits=limits
        )
        began = time.monotonic()
        run = world.start(job, "cost-near-tuesday")
        near = "the cost is near its limit"
        world.logs(run, near, 900)
        took = time.monotonic() - began
        paged_once(world, pages, "cost near the limit")
    return Seen(run, None, (near, "limits.max_cost is 900.00"), took, warnings=True)


@case(
    "Ray on the worker's host dies",
    "The raylet of a run's own Ray gets SIGKILL.",
    "Crashed, with the cause and the command.",
)
def raylet_killed(world: World) -> Seen:
    job = world.job("raylet-killed", source=many(world))
    run = world.start(job, "raylet-killed")
    world.committed(run, lambda: world.commits("raylet-killed"))
    began = time.monotonic()
    (raylet, *_) = below(world.prefect.worker, "raylet")
    raylet.kill()
    message = world.ended(run, "CRASHED", 300)["message"]
    took = time.monotonic() - began
    command = f"prefect flow-run retry {run}"
    assert "Ray on this host died" in message and command in message, message
    texts = ("raylet-killed crashed", "Ray on this host died", command)
    return Seen(run, None, texts, took, file=world.history(), mend=nothing, mends="raylet-killed")


@case(
    "Cancelled after an outage",
    "Prefect's server gets SIGKILL for five minutes; then the run is cancelled.",
    "Cancelled by itself, because no worker did.",
)
def cancelled_after_outage(world: World) -> Seen:
    """Longer than the lease of the concurrency limit; the worker asks for no cancellation then."""
    key, retry = "cancelled-after-outage", "prefect flow-run retry"
    cluster = {"job_server": world.head.url}
    job = world.job(key, source=many(world, 20_000), cluster=cluster)
    with on_call(world) as pages, holding(world, key):
        run = world.start(job, key)
        world.committed(run, lambda: world.commits(key))
        server = next(p for p in world.prefect.started if p.args[-1] == str(world.prefect.port))
        kill(server.pid)
        time.sleep(330)  # the lease lasts five minutes
        world.prefect.serve()
        world.logs(run, BACK, 240)
        began = time.monotonic()
        world.carry_out(f"prefect flow-run cancel {run}")
        world.ended(run, "CANCELLED", 240)
        took = time.monotonic() - began
        body = paged_once(world, pages, "nobody noticed its cancellation")
        assert f"{retry} {run}" in body, body
    texts = (f"{key} was cancelled", "Committed shards are kept", f"{retry} {run}")
    return Seen(run, None, texts, took, file=world.history(), mend=nothing, mends=key)
