"""Every use of Ray beyond its documented interface, in one file.

A new version of Ray may move or remove any of these names. So `pyproject.toml` allows only one
minor version of Ray, and `tests/stages/test_ray_internals.py` checks that the names exist in it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ray import ObjectRefGenerator
from ray.core.generated.common_pb2 import ActorDiedErrorContext  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.data import DataContext, Dataset, Datasource
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    BackpressurePolicy,
)
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from ray.data._internal.execution.operators.map_operator import MapOperator
from ray.data._internal.execution.operators.map_transformer import (
    BatchMapTransformFn,
    BlockMapTransformFn,
)
from ray.data._internal.execution.operators.task_pool_map_operator import TaskPoolMapOperator
from ray.data._internal.execution.streaming_executor import StreamingExecutor
from ray.data._internal.logical.interfaces import Rule
from ray.data._internal.logical.operators import Read
from ray.data._internal.logical.optimizers import get_physical_ruleset
from ray.data._internal.logical.rules import FuseOperators, SetReadParallelismRule
from ray.data._internal.output_buffer import OutputBlockSizeOption
from ray.data._internal.utils.cached_ray_internals import get_draining_nodes
from ray.exceptions import RayError

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.data._internal.execution.interfaces import PhysicalOperator
    from ray.data._internal.execution.operators.map_transformer import MapTransformFn
    from ray.data._internal.execution.resource_manager import ResourceManager
    from ray.data._internal.execution.streaming_executor_state import Topology

log = logging.getLogger(__name__)

END_GRACE = 2.0  # seconds for tasks to end by themselves before they are cancelled

# Loggers of Ray Data: progress bars of a pass, and tracebacks of lost tasks.
PROGRESS_LOG = logging.getLogger("ray.data._internal.progress")
EXECUTOR_LOG = logging.getLogger("ray.data._internal.execution.streaming_executor_state")


# --- one block a shard --------------------------------------------------------------------------


class UnjoinedBlocks(Datasource):
    """A data source whose blocks Ray passes on unchanged; see `NeverJoinBlocks`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        rules = get_physical_ruleset()
        if NeverJoinBlocks not in list(rules):
            rules.add(NeverJoinBlocks)


class NeverJoinBlocks(Rule):
    """Makes Ray pass on each block that a read task yields, instead of one joined block per task.

    With `target_max_block_size=None`, Ray 2.60 joins everything that a task yields into one block
    at its end (`BlockOutputBuffer` without a size option). That would hold up the first shard of a
    task until the last is read, multiply the memory, and mix `lost` blocks with rows. Map operators
    after the read that take whole blocks (batch_size=None), fused with the read or not, are changed
    as well: they return one block for each block. Only datasets that read from `UnjoinedBlocks` are
    changed.
    """

    @classmethod
    def dependencies(cls) -> list[type[Rule]]:
        return [SetReadParallelismRule]

    @classmethod
    def dependents(cls) -> list[type[Rule]]:
        return [FuseOperators]

    def apply(self, plan: Any) -> Any:
        """Return `plan` (a PhysicalPlan), with its operators changed in place."""
        operators = list(_with_inputs(plan.dag))
        logical = [plan.op_map.get(operator) for operator in operators]
        if not any(_is_ours(op) for op in logical):
            return plan
        for operator, op in zip(operators, logical, strict=True):
            if not isinstance(operator, MapOperator):
                continue
            if _is_ours(op):
                operator._additional_split_factor = None  # Ray may have set it to split blocks
            for function in operator.get_map_transformer().get_transform_fns():
                if _takes_blocks(function):
                    function._output_block_size_option = OutputBlockSizeOption.of(
                        disable_block_shaping=True
                    )
        return plan


def _with_inputs(operator: PhysicalOperator) -> Iterator[PhysicalOperator]:
    """Yield the operator and all its upstream operators."""
    yield operator
    for before in operator.input_dependencies:
        yield from _with_inputs(before)


def _is_ours(op: object) -> bool:
    return isinstance(op, Read) and isinstance(op.datasource, UnjoinedBlocks)


def _takes_blocks(function: MapTransformFn) -> bool:
    if isinstance(function, BatchMapTransformFn):
        return function._batch_size is None
    option = getattr(function, "_output_block_size_option", None)
    return isinstance(function, BlockMapTransformFn) and option is None


def map_actors(dataset: Dataset, stage: type, **options: Any) -> Dataset:
    """Return the dataset mapped by a pool of actors of class `stage`; each call gets a whole block.

    `options` are those of `Dataset.map_batches`. That method itself is not used: with `num_gpus` it
    rejects whole blocks, and with a batch size it waits until that many rows have arrived.
    """
    return dataset.map_batches_internal(stage, **options)


# --- how far engines may run ahead of the commits ------------------------------------------------


def limit_in_flight(context: DataContext, blocks: int) -> None:
    """Allow at most `blocks` blocks in the engines and the stages after them; set in `context`.

    Answers that are not committed yet are inferred again after a crash. Ray itself limits them only
    in bytes, which does not help with short rows: while the first finish worker starts, engines
    could answer the whole input (measured: one kill lost 1,000 of 1,200 rows). This also turns on
    the other policies of this module.
    """
    context.set_config(Window.BLOCKS, blocks)
    # Once a policy holds an operator back, Ray does not ask the policies after it. So the policies
    # that hold nothing back but do other work come first.
    ours = [LeavingNodes, DeadEngines, LateCancel]
    policies = [*ours, *ENABLED_BACKPRESSURE_POLICIES, Window]
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, policies)


class Window(BackpressurePolicy):
    """A policy that gives engines no new block while too many are in engines or later stages.

    The limit is set by `limit_in_flight`. The policy counts the blocks that are there now. If it
    counted arrivals minus departures, a block lost with its engine would count forever.
    """

    BLOCKS: ClassVar = "prefect_raybatch.window"  # setting of the context: the most blocks

    def __init__(
        self, data_context: DataContext, topology: Topology, resource_manager: ResourceManager
    ) -> None:
        super().__init__(data_context, topology, resource_manager)
        engines: list[Any] = [op for op in topology if isinstance(op, ActorPoolMapOperator)]
        for op in engines:
            # If nothing else runs, Ray starts a task even if policies forbid it (the stage after it
            # may wait for its budget). Only the operator's own method prevents that.
            op.can_add_input = partial(self._takes, op, op.can_add_input)

    def can_add_input(self, op: PhysicalOperator) -> bool:
        return not isinstance(op, ActorPoolMapOperator) or self._has_room(op)

    def _takes(self, op: PhysicalOperator, could: Callable[[], bool]) -> bool:
        return could() and self._has_room(op)

    def _has_room(self, op: PhysicalOperator) -> bool:
        behind = sum(self._held(stage) for stage in _after(op))
        held = op.num_active_tasks() + self._topology[op].total_enqueued_output_blocks() + behind
        return bool(held < self._data_context.get_config(self.BLOCKS, held + 1))

    def _held(self, op: PhysicalOperator) -> int:
        """Return how many blocks are in tasks of `op`, a stage after the engine, or in its output.

        The stage's own input queue does not count: Ray starts a task at once for each block that
        has rows, and keeps a block without rows there until one with rows follows. A block without
        rows stands for shards that engines skip, because another driver committed them or the run
        is draining. Counting such blocks would hold back new blocks forever.
        """
        waiting = self._topology[op].total_enqueued_output_blocks()
        return int(op.num_active_tasks() + waiting)


class LeavingNodes(BackpressurePolicy):
    """A policy that ends engines on a node that is being drained as soon as they have no task.

    Ray gives such an engine no new block, but keeps its actor in the pool. So no engine would start
    on another node in its place, and the drained node would wait for the actor until its deadline.
    It is a policy because Ray asks policies each time before it starts tasks; it never holds back a
    task.
    """

    def can_add_input(self, op: PhysicalOperator) -> bool:
        if isinstance(op, ActorPoolMapOperator) and (leaving := get_draining_nodes()):
            pool: Any = op._actor_pool
            for actor, state in list(pool._running_actors.items()):
                if state.actor_location in leaving and not state.num_tasks_in_flight:
                    pool._release_running_actor(actor)
        return True


class EnginesDied(Exception):
    """The engines of a pass died repeatedly without answering a block in between."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self.engines = engines  # number of actors that died for good, each after its restarts


class DeadEngines(BackpressurePolicy):
    """A policy that replaces engines that Ray no longer restarts.

    Raises `EnginesDied` if too many die without an answer in between (see `limit_deaths`).

    Ray 2.60 leaves an actor that has used up its `max_restarts` in the pool: it gets no blocks, no
    other actor takes its place, and once the last one is dead, the execution waits forever. So this
    policy releases the dead actor, and Ray's autoscaler starts another one. Actors that have
    placement groups are not replaced, because the group keeps its resources until the end of the
    pass; `EnginesDied` is raised when all of them are dead. This is a policy because Ray asks
    policies each time before it starts tasks; it never holds back a task.
    """

    MOST: ClassVar = "prefect_raybatch.dead_engines"  # setting of the context, see `limit_deaths`

    def __init__(
        self, data_context: DataContext, topology: Topology, resource_manager: ResourceManager
    ) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._dead = 0  # since the last answer
        self._answered = 0

    def can_add_input(self, op: PhysicalOperator) -> bool:
        if isinstance(op, ActorPoolMapOperator):
            self.replace_dead(op)
        return True

    def replace_dead(self, op: ActorPoolMapOperator) -> None:
        """Release dead actors of `op`, so that Ray starts others; or raise `EnginesDied`."""
        pool: Any = op._actor_pool
        # An actor's lost tasks are reported one by one and looked up in the pool until then.
        dead = [
            actor
            for actor, state in pool._running_actors.items()
            if not state.num_tasks_in_flight and is_dead(actor)
        ]
        if not dead:
            return
        if op._ray_remote_args_fn is not None:
            if len(dead) == pool.current_size():
                raise EnginesDied(len(dead))
            return
        answered = op.metrics.num_tasks_finished - op.metrics.num_tasks_failed
        self._dead = len(dead) + (self._dead if answered == self._answered else 0)
        self._answered = answered
        if self._dead >= self._data_context.get_config(self.MOST, pool.max_size()):
            raise EnginesDied(self._dead)
        for actor in dead:
            pool._release_running_actor(actor)


def is_dead(actor: ActorHandle[object]) -> bool:
    """Return whether an actor is dead for good, so that Ray will not restart it."""
    return bool(actor._get_local_state() == ActorTableData.ActorState.DEAD)


def limit_deaths(context: DataContext, engines: int) -> None:
    """Set in `context` how many engines may die in a row before a pass fails with `EnginesDied`.

    The pass fails at death number `engines`. An engine counts as dead once Ray no longer restarts
    it. The count starts again whenever an engine answers a block. Engines in placement groups are
    not counted (see `DeadEngines`).
    """
    context.set_config(DeadEngines.MOST, engines)


class LateCancel(BackpressurePolicy):
    """A policy that delays the cancelling of a pass: its tasks get END_GRACE seconds to end.

    Only tasks that still run after that are cancelled, for the reason given in `still_running`. It
    is a policy because Ray creates the policies of each execution with its operators; it never
    holds back a task.
    """

    def __init__(
        self, data_context: DataContext, topology: Topology, resource_manager: ResourceManager
    ) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._until: float | None = None  # one deadline for all operators
        stages: list[Any] = [op for op in topology if isinstance(op, TaskPoolMapOperator)]
        for op in stages:
            op._cancel_active_tasks = partial(self._cancel, op, op._cancel_active_tasks)

    def _cancel(self, op: Any, cancel: Callable[..., None], force: bool) -> None:
        self._until = self._until or time.monotonic() + END_GRACE
        tasks = {_whole(task.get_waitable()): task for task in op.get_active_tasks()}
        left = still_running(tasks, max(0.0, self._until - time.monotonic()))
        op.get_active_tasks = lambda: [tasks[reference] for reference in left]
        cancel(force=force)


def _whole(waitable: ObjectRef[object] | ObjectRefGenerator) -> ObjectRef[object]:
    """Return a reference that is ready when the whole task is over, not at its first block."""
    return waitable.completed() if isinstance(waitable, ObjectRefGenerator) else waitable


def still_running(
    tasks: Collection[ObjectRef[object]], seconds: float | None = None
) -> list[ObjectRef[object]]:
    """Return the references whose tasks still run after `seconds` (default: END_GRACE).

    A pass that ends early cancels only these. If Ray cannot tell, all of `tasks` are returned.

    Ray 2.60's driver aborts (`Tried to complete task that was not pending`) if a task is cancelled
    at the moment in which it ends: the reply removes it from the running tasks, and only then
    completes it. With tasks of a few milliseconds, cancelled at random moments, a driver survived
    about 100 rounds of six tasks; with this function, 2,645 rounds. A task that has not ended
    within some seconds is unlikely to end just when it is cancelled.
    """
    import ray

    if not tasks:
        return []
    grace = END_GRACE if seconds is None else seconds
    try:
        _, left = ray.wait(list(tasks), num_returns=len(tasks), timeout=grace, fetch_local=False)
    except RayError as error:  # the cluster itself is in trouble
        log.debug("which tasks are over is not known: %s", error)
        return list(tasks)
    return left


def leaving_nodes() -> dict[str, float | None]:
    """Return the ids of the nodes that Ray drains, with the seconds left (None if unknown).

    Ray drains a node after a preemption notice, SIGTERM to `ray start --block`, or `ray
    drain-node`.
    """
    now = time.time() * 1000
    return {
        node: max(0.0, (deadline - now) / 1000) if deadline else None
        for node, deadline in get_draining_nodes().items()
    }


def node_is_leaving() -> bool:
    """Return whether the node of this worker is being drained; False in a process outside Ray."""
    import ray

    if not ray.is_initialized():  # get_runtime_context would start a cluster
        return False
    return ray.get_runtime_context().get_node_id() in get_draining_nodes()


def _after(op: PhysicalOperator) -> list[PhysicalOperator]:
    """Return the operators downstream of `op`, the nearest first; they form a chain."""
    operators = []
    while op.output_dependencies:
        op = op.output_dependencies[0]
        operators.append(op)
    return operators


def stop_pass(dataset: Dataset) -> None:
    """End the execution of a dataset that another thread iterates over.

    Does nothing if the dataset is not being executed. Finds Ray's executor by its thread's name:
    until the first block arrives, only the iterating thread has a reference to it.
    """
    name = f"StreamingExecutor-{dataset.get_dataset_id()}"
    for thread in threading.enumerate():
        if thread.name == name and isinstance(thread, StreamingExecutor):
            thread.shutdown(force=True)


# --- the cluster --------------------------------------------------------------------------------


def dashboard_address() -> str:
    """Return the address of the connected cluster's dashboard; "" if there is none."""
    from ray._private import worker  # unlike ray.init()'s result, known to any caller

    return str(worker.get_dashboard_url() or "")


def raylet_socket() -> str | None:
    """Return the path of the socket of this driver's raylet; None if Ray is not connected."""
    from ray._private import worker

    node = worker._global_node
    return None if node is None else str(node.raylet_socket_name)


def actors_of_this_job(detached: bool = False) -> list[dict[str, Any]]:
    """Return the actors of this driver as rows of Ray's actor table; needs no dashboard.

    `detached` adds the detached actors of other drivers.
    """
    import ray
    from ray._private import state

    own = ray.get_runtime_context().get_job_id()
    if not detached:
        return list(state.actors(job_id=ray.JobID.from_hex(own)).values())
    table = state.actors().values()
    return [actor for actor in table if actor["JobID"] == own or actor["IsDetached"]]


def restarts_of(actor: ActorHandle[object]) -> int:
    """Return how often Ray has restarted this actor's process."""
    from ray._private import state

    return int(state.actors(actor_id=actor._actor_id.hex())["NumRestarts"])


def has_died(actor: Mapping[str, Any]) -> bool:
    """Return whether an actor, a row of Ray's table, is dead because its process or node died."""
    if actor["State"] != "DEAD":
        return False
    reason = actor["DeathCause"].actor_died_error_context.reason
    return reason in (ActorDiedErrorContext.WORKER_DIED, ActorDiedErrorContext.NODE_DIED)


def running_cluster() -> str | None:
    """Return the address of the cluster that `ray.init("auto")` would join; None without one."""
    from ray._private import services

    try:
        return services.canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError):
        return None


TOKEN_VARIABLE = "RAY_AUTH_TOKEN"


def use_token(token: str | None) -> dict[str, str | None]:
    """Make Ray send this authentication token from now on; None changes nothing.

    Returns the previous values of Ray's token variables in the environment, for `put_back_auth`.
    """
    from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR

    before = {name: os.environ.get(name) for name in (AUTH_MODE_ENV_VAR, TOKEN_VARIABLE)}
    if token is not None:
        os.environ |= {AUTH_MODE_ENV_VAR: "token", TOKEN_VARIABLE: token}
        _read_auth_again()
    return before


def put_back_auth(before: Mapping[str, str | None]) -> None:
    """Restore Ray's token variables in the environment to `before`, as returned by `use_token`.

    A local cluster's `ray.init()` turns token authentication on for the whole process and leaves it
    on. If this process then became a driver of a cluster without tokens, it would reject the calls
    of that cluster's head, and the head would conclude that nobody uses this driver's actors and
    end them.
    """
    if all(os.environ.get(name) == value for name, value in before.items()):
        return
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _read_auth_again()


def _read_auth_again() -> None:
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")  # reads the environment again
    AuthenticationTokenLoader.instance().reset_cache()  # a cached token is used in any mode


# --- what Ray prints ------------------------------------------------------------------------------


def log_deaths() -> None:
    """Log the messages of Ray's raylets, e.g. about dead workers, instead of printing them.

    The run reports such deaths itself, and the output may have to be a single JSON object.
    """
    from ray._private import worker

    printed: Callable[..., None] = worker.print_to_stdstream
    if getattr(printed, "logs_deaths", False):
        return

    def told(data: Mapping[str, Any], *more: object, **named: object) -> None:
        if data.get("pid") == "raylet":
            log.info("Ray: %s", " ".join(map(str, data["lines"])))
        else:
            printed(data, *more, **named)

    told.logs_deaths = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = told


# --- workers that are forked ----------------------------------------------------------------------


def title_forked_worker() -> None:
    """Make Ray use the package setproctitle for a forked worker's process title, which `ps` shows.

    Ray's own functions look for the title's memory next to the initial environment variables, which
    setproctitle has moved.
    """
    import setproctitle
    from ray import _raylet

    raylet: Any = _raylet
    raylet.setproctitle = setproctitle.setproctitle
    raylet.getproctitle = setproctitle.getproctitle


# --- how far the engines' starts have come --------------------------------------------------------

STARTS = b"prefect_raybatch.starts"  # namespace in the key-value store of Ray's head
STARTS_KEPT = 86400.0  # seconds after which the entries of a killed driver are removed


def report_start(attempt: str, engine: str, marks: Mapping[str, float]) -> None:
    """Report to the driver how far an engine's start has come; called in the engine's actor.

    `attempt` and `engine` are ids. `marks` say when each phase began (see `phases.Marks`).
    """
    from ray.experimental.internal_kv import _internal_kv_put

    known = _reported.setdefault(engine, f"{attempt}/{time.time():.0f}/{engine}")
    _internal_kv_put(known.encode(), json.dumps(dict(marks)).encode(), True, namespace=STARTS)


_reported: dict[str, str] = {}  # the key of each engine of this process


def reported_starts(attempt: str) -> list[dict[str, float]]:
    """Return {phase: when it began} for each engine of an attempt that reported its start.

    The values are in seconds since 1970 (see `phases.Marks`).
    """
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    keys = _internal_kv_list(f"{attempt}/".encode(), namespace=STARTS)
    found = (_internal_kv_get(key, namespace=STARTS) for key in keys)
    return [json.loads(value) for value in found if value]


def forget_starts(attempt: str) -> None:
    """Delete the reports of an attempt's engine starts, and all reports older than STARTS_KEPT."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_list

    _internal_kv_del(f"{attempt}/".encode(), del_by_prefix=True, namespace=STARTS)
    for key in _internal_kv_list(b"", namespace=STARTS):
        _, at, _ = key.split(b"/")
        if time.time() - float(at) > STARTS_KEPT:
            _internal_kv_del(key, namespace=STARTS)
