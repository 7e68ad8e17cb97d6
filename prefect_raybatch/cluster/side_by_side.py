"""Runs a function for many items in parallel on a Ray cluster, without engines or datasets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from prefect_raybatch import cpu_limit
from prefect_raybatch.cluster.connect import (
    CLUSTER_SESSION,
    address_of,
    capacity,
    connected,
)
from prefect_raybatch.cluster.prewarm import current_prewarming
from prefect_raybatch.cluster.sharing import Tenant
from prefect_raybatch.errors import ClusterUnavailable, RayBatchError
from prefect_raybatch.source.cuts import Everywhere
from prefect_raybatch.source.side_copies import in_threads
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.storage import Item, Value
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)


WORTH_A_START = 1 << 30  # bytes of work for which a cluster is joined or started
WORTH_A_TASK = 256 << 20  # bytes of work for which an already joined cluster is used
TASKS_A_CPU = 2  # tasks in flight per CPU: one works, one waits
TASK_RETRIES = 3  # of an item if its worker or node dies; errors of the work are not retried


@contextmanager
def copying_for(cluster: ClusterSpec, size: int, reachable: bool) -> Iterator[Everywhere]:
    """Yield a function that copies files in parallel: as Ray tasks on the cluster, or in threads.

    It uses tasks if the cluster is not started here, the input of `size` bytes is large enough, and
    all of it is `reachable` from the cluster. On a local cluster, tasks are not faster than
    threads.
    """
    workers = 0
    with ExitStack() as stack:
        if reachable and address_of(cluster) is not None:
            workers = stack.enter_context(workers_for(cluster, size, "snapshot"))
        if workers > 1:
            log.info("copying the input on %s of the cluster", counted(workers, "CPU"))
            early = current_prewarming()
            room = None if early is None else partial(early.copy_room, workers)
            yield partial(_everywhere, TASKS_A_CPU * workers, room)
        else:
            yield in_threads(cpu_limit.usable_cpus(), reachable)


def _everywhere(
    at_once: int,
    room: Callable[[], int | None] | None,
    work: Callable[[Item], Value],
    items: Iterable[Item],
    size: int,
) -> Generator[tuple[int, Value], None, None]:
    yield from run_in_parallel(partial(_numbered, work), enumerate(items), at_once, room)


def _numbered(work: Callable[[Item], Value], item: tuple[int, Item]) -> tuple[int, Value]:
    return item[0], work(item[1])


@contextmanager
def workers_for(cluster: ClusterSpec, size: int, made: str = "result") -> Iterator[int]:
    """Yield how many CPUs of the cluster to use for `size` bytes of work; 0: use this process.

    If the number is above 0, the process is in the cluster during the block. Yields 0 if there is
    too little work, or the cluster cannot be joined from here. `made` is a noun for the product of
    the work, such as "result", for use in messages.
    """
    with CLUSTER_SESSION.visited() as there:
        if there:
            yield int(capacity().cpus) if size >= WORTH_A_TASK else 0
            return
    with ExitStack() as stack:
        workers = 0
        # A cluster with a job server cannot be joined from here.
        if size >= WORTH_A_START and not cluster.access.remote:
            try:
                found = stack.enter_context(connected(cluster, Tenant(f"{cluster.name}: {made}")))
                # A local cluster may claim more CPUs than the machine has.
                here = address_of(cluster) is None
                workers = int(min(found.cpus, cpu_limit.usable_cpus()) if here else found.cpus)
            except ClusterUnavailable as error:
                log.warning("writing the %s without the cluster: %s", made, error)
        yield workers


def run_in_parallel(
    work: Callable[[Item], Value],
    items: Iterator[Item],
    at_once: int,
    room: Callable[[], int | None] | None = None,
) -> Iterator[Value]:
    """Run `work(item)` for each item as a Ray task of one CPU; yield the results in any order.

    At most `at_once` tasks are in progress. If `room` is given and returns a number, that number is
    the limit instead. The first error is raised here; then no further task starts, and running ones
    are cancelled. `work` must be idempotent: Ray runs a task again if its worker or node is lost,
    perhaps while the lost one still works.
    """
    import ray

    from prefect_raybatch.stages.ray_internals import still_running

    task: Any = ray.remote(num_cpus=1, max_retries=TASK_RETRIES, scheduling_strategy="SPREAD")(
        _done
    )
    shared, under_way = ray.put(work), set[Any]()
    try:
        for item in items:
            under_way.add(task.remote(shared, item))
            while len(under_way) >= ((room() if room is not None else None) or at_once):
                yield _next(under_way)
        while under_way:
            yield _next(under_way)
    finally:
        for reference in still_running(under_way):
            ray.cancel(reference, recursive=False)


def _done(work: Callable[[Item], Value], item: Item) -> Value | RayBatchError:
    """Return the result of `work(item)`, or the `RayBatchError` that it raised.

    The error is returned because Ray would wrap a raised one.
    """
    try:
        return work(item)
    except RayBatchError as error:
        return error


def _next(under_way: set[Any]) -> Any:
    """Wait for a task, remove it from `under_way`, and return its result or raise its error."""
    import ray

    (first,), _ = ray.wait(list(under_way), num_returns=1)
    under_way.remove(first)
    result = ray.get(first)
    if isinstance(result, RayBatchError):
        raise result
    return result
