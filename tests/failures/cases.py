"""The nights: how each is made to fail, and what must be on the first screen of the page."""

from __future__ import annotations

import csv
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import psutil
from helpers import environ
from helpers.pager import automations_script, pager
from helpers.postgresql import PASSWORD, postgresql
from helpers.prefect_server import settings_for
from helpers.processes import below
from helpers.ray_head import ROOT, start_head
from s3server import proxy

from .world import World, new_world

BUCKET = "night"
STALLED = "Meanwhile check that the store is up"


@dataclass(frozen=True)
class Seen:
    """Where a night is looked at: the artifact `key`, or the log of flow run `run`; each of `texts`
    must be there. `seconds` from the fault to where the page says so. Of a run that is `green` the
    warnings alone are looked at, as whoever asks what happened to it would."""

    run: str
    key: str | None
    texts: tuple[str, ...]
    seconds: float
    world: World | None = None  # where it is another than the one that was given
    green: bool = False


@dataclass(frozen=True)
class Case:
    """A night that fails: its name, what is told of it, and how it is played."""

    name: str
    title: str
    planted: str
    play: Callable[[World], Seen]


CASES: list[Case] = []
Play = Callable[[World], Seen]


def case(title: str, planted: str) -> Callable[[Play], Play]:
    def keep(play: Play) -> Play:
        CASES.append(Case(play.__name__.replace("_", "-"), title, planted, play))
        return play

    return keep


PATH = f"{ROOT}{os.pathsep}{environ.python_path()}"  # what workers can import


def many(world: World) -> dict[str, Any]:
    """A source of some seconds' work, in many shards."""
    return {"uri": world.customers("many.csv", 3000), "rows_per_shard": 50}


def kill(pid: int) -> None:
    """A process and all below it, at once."""
    for process in [*below(pid), psutil.Process(pid)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def failed(world: World, job: dict[str, Any], texts: tuple[str, ...], seconds: float) -> Seen:
    """Runs a job that must fail, and is told of in its failure artifact."""
    began = time.monotonic()
    run = world.start(job, f"{job['name']}-tuesday")
    world.ended(run, "FAILED", seconds)
    return Seen(run, f"raybatch-{job['name']}-failure", texts, time.monotonic() - began)


@case("A column is missing", "The prompt names a column that the input has no more.")
def missing_column(world: World) -> Seen:
    job = world.job("missing-column", prompt={"template": "What is {Nothing}?"})
    return failed(world, job, ("Nothing", "prefect deployment run batch_inference/dev"), 120)


@case("There is no GPU", "The job asks for GPUs on a cluster that has none.")
def no_gpus(world: World) -> Seen:
    engine = {"model": "demo", "device": "gpu", "max_model_len": 256}
    job = world.job("no-gpus", engine=engine, cluster={"job_server": world.head.url})
    return failed(world, job, ("GPU", "prefect deployment run batch_inference/dev"), 240)


@case("Wrong keys", "The secret key of the store was changed.")
def wrong_keys(world: World) -> Seen:
    world.s3.create_bucket(BUCKET)
    job = world.job("wrong-keys", output={"uri": f"s3://{BUCKET}/out", "column": "industry"})
    env = {**world.s3.env, "AWS_SECRET_ACCESS_KEY": "x" * 40}
    began = time.monotonic()
    run = world.start(job, "tuesday", **env)
    world.ended(run, "FAILED", 120)
    texts = ("SignatureDoesNotMatch", "AWS_ACCESS_KEY_ID", "prefect flow-run retry")
    return Seen(run, "raybatch-wrong-keys-failure", texts, time.monotonic() - began)


@case(
    "Too many bad rows", "Every fifth company's name is 3,000 characters long: over max_model_len."
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
    texts = ("rows failed", "limits.max_failed_fraction", "Some of the rows that failed")
    return failed(world, job, texts, 300)


@contextmanager
def killing(world: World, pause: float) -> Iterator[None]:
    """Kills each engine this long after it is seen first."""
    over, seen = threading.Event(), dict[int, float]()

    def hunt() -> None:
        while not over.wait(0.5):
            for process in below(world.head.pid, "EngineStage"):
                first = seen.setdefault(process.pid, time.monotonic())
                if time.monotonic() - first > pause:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    thread = threading.Thread(target=hunt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@case("An engine that dies", "Each engine's process gets SIGKILL two seconds after it was started.")
def engine_dies(world: World) -> Seen:
    job = world.job("engine-dies", cluster={"job_server": world.head.url})
    with killing(world, 2.0):
        return failed(world, job, ("engine", "prefect flow-run retry"), 420)


@case("The store stalls", "Half a minute in which the store takes requests and answers none.")
def store_stalls(world: World) -> Seen:
    world.s3.create_bucket(BUCKET)
    stalled = threading.Event()

    def decide(method: str, path: str, headers: Any) -> str:
        return "slow 40" if stalled.is_set() else "pass"

    output = {"uri": f"s3://{BUCKET}/stalls", "column": "industry"}
    with proxy(world.s3, decide) as between:
        env = {**world.s3.env, "AWS_ENDPOINT_URL": between.endpoint}
        job = world.job("store-stalls", source=many(world), output=output)
        run = world.start(job, "tuesday", **env)
        puts = lambda: sum("/commits/" in p for m, p, _ in between.seen if m == "PUT")  # noqa: E731
        world.committed(run, puts)
        stalled.set()
        took = world.logs(run, STALLED, 90)
        stalled.clear()
        world.ended(run, "COMPLETED", 300)
    return Seen(run, None, (STALLED,), took, green=True)


@case("The cluster is gone", "The head of the Ray cluster gets SIGKILL in the middle of the run.")
def cluster_gone(world: World) -> Seen:
    with start_head(2, PYTHONPATH=PATH) as head:
        job = world.job("cluster-gone", source=many(world), cluster={"job_server": head.url})
        run = world.start(job, "cluster-gone")
        world.committed(run, lambda: world.commits("cluster-gone"))
        kill(head.pid)
        began = time.monotonic()
        world.ended(run, "FAILED", 600)
    texts = ("job server", "prefect flow-run retry")
    return Seen(run, "raybatch-cluster-gone-failure", texts, time.monotonic() - began)


@case("The worker's host is gone", "Worker and flow run get SIGKILL: nobody is left to say so.")
def dead_worker(world: World) -> Seen:
    cluster = {"job_server": world.head.url}
    with settings_for(world.prefect), ExitStack() as stack, ThreadPoolExecutor(1) as apart:
        # The browser's loop runs in this thread, in which Prefect's calls would be awaitables.
        pages = apart.submit(copy_context().run, stack.enter_context, pager()).result()
        deploy = automations_script().deploy
        apart.submit(copy_context().run, deploy, "custom-webhook/on-call").result()
        job = world.job("dead-worker", source=many(world), cluster=cluster)
        run = world.start(job, "dead-worker", PREFECT_FLOWS_HEARTBEAT_FREQUENCY="30")
        world.committed(run, lambda: world.commits("dead-worker"))
        world.logs(run, "rows", 60)
        time.sleep(35)  # a heartbeat came: the automation looks for the next
        kill(world.prefect.worker)
        began = time.monotonic()
        world.ended(run, "CRASHED", 240)
        took = time.monotonic() - began
        paged = lambda: [p for p in pages if "crashed" in p["subject"]]  # noqa: E731
        world.prefect.until(paged, 60, "the page to the one on call")
    world.prefect.work()
    return Seen(run, None, ("Crashed",), took)


@case("A deadline is missed", "A run is given ten seconds, and needs more.")
def deadline_missed(world: World) -> Seen:
    limits = {"deadline": "10s"}
    source = {**many(world), "rows_per_shard": 100}
    cluster = {"job_server": world.head.url}
    job = world.job("deadline-missed", source=source, cluster=cluster, limits=limits)
    run = world.start(job, "deadline-missed")
    began = time.monotonic()
    world.ended(run, "COMPLETED", 300)
    texts = ("the deadline was missed", "limits.deadline")
    return Seen(run, None, texts, time.monotonic() - began, green=True)


def away(world: World, name: str) -> Seen:
    """Takes Prefect's server away for two minutes of a run, and gives it back."""
    source = {"uri": world.customers("more.csv", 12_000), "rows_per_shard": 50}
    job = world.job(name, source=source, cluster={"job_server": world.head.url})
    run = world.start(job, name)
    world.committed(run, lambda: world.commits(name))
    server = next(p for p in world.prefect.started if p.args[-1] == str(world.prefect.port))
    kill(server.pid)
    began = time.monotonic()
    time.sleep(120)
    world.prefect.serve()
    world.ended(run, "COMPLETED", 420)
    texts = ("has not answered for", "answers again, after")
    return Seen(run, None, texts, time.monotonic() - began, green=True)


@case(
    "Prefect is away (SQLite)", "Its server gets SIGKILL, and is started again two minutes later."
)
def prefect_away(world: World) -> Seen:
    return away(world, "prefect-away")


@case("Prefect is away (PostgreSQL)", "The same with a server whose database is PostgreSQL.")
def prefect_away_postgresql(world: World) -> Seen:
    url = world.stack.enter_context(postgresql())
    url = url.replace("postgresql://", f"postgresql+asyncpg://reader:{PASSWORD}@")
    folder = world.folder / "other"
    folder.mkdir()
    beside = {"PREFECT_API_DATABASE_CONNECTION_URL": url}
    other = world.stack.enter_context(new_world(folder, **beside))
    return replace(away(other, "prefect-away-postgresql"), world=other)
