"""Prewarm: start a run's engines while its input is still being copied.

This is possible if the engines' arguments are certain before the rows are known. The engines wait
among the warm engines (see `warm`) until their run leases them. If the run does not lease them,
they end.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from prefect_raybatch import cpu_limit
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.cluster.engine_reuse import EngineShape, sizes_for_shape
from prefect_raybatch.cluster.sharing import END_SECONDS, Tenant
from prefect_raybatch.cluster.warm import IDLE_SECONDS, PrewarmedHosts, WarmKind
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.sizing import sizes as sizing
from prefect_raybatch.sizing.prices import gpu_price
from prefect_raybatch.sizing.sizes import Capacity, Sizing
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.source import Inventory
    from prefect_raybatch.stages.engine import EngineLaunch

log = logging.getLogger(__name__)

WORTH_BYTES = 64 << 20  # in memory; a smaller input is copied in about a second
COPY_LOOK = 1.0  # seconds between looks while the input is copied
# Row size is estimated from the first block of an input and may be off by this factor. Sizes are
# computed at several steps within it.
GUESS_OFF = 1.5
GUESS_STEPS = 5
ANY_ROW = tuple(4.0**power for power in range(11))  # bytes, if nothing is known about the rows
SHARDS_AN_ENGINE = 2  # at least, for several engines: with fewer, some might get none
_HOUR = 3600.0  # seconds
COPY_SHARE = 0.5  # of a cluster's CPUs that are left to a copy on the cluster


@dataclass(frozen=True)
class Guess:
    """Estimate of the input before it is copied.

    `rows` is the number of rows, `row_bytes` are possible sizes of a row in memory, and `whole` is
    the size of all rows in memory, in bytes. If nothing is known, `rows` and `whole` are 0.
    """

    rows: int
    row_bytes: tuple[float, ...]
    whole: float = 0.0

    @classmethod
    def of(cls, inventory: Inventory, images: bool) -> Guess:
        rows = sum(file.rows for file in inventory.files)
        if images:  # the size of a row depends on its images, which are not read yet
            return cls(rows, ANY_ROW, rows * inventory.row_bytes)
        steps = [GUESS_OFF ** (2 * n / (GUESS_STEPS - 1) - 1) for n in range(GUESS_STEPS)]
        sizes = tuple(inventory.row_bytes * step for step in steps)
        return cls(rows, sizes, rows * inventory.row_bytes)


@dataclass(frozen=True)
class PrewarmPlan:
    """The engines that a run will certainly need, whatever its rows are.

    There are `engines` of one `kind`, each started with `launch` on `gpus_an_engine` GPUs.
    """

    kind: WarmKind
    launch: EngineLaunch
    engines: int
    gpus_an_engine: float


@dataclass(frozen=True)
class PrewarmedEngines:
    """The prewarmed engines that a run has taken, and the cost of prewarming.

    `name` is the name under which they report their start, "" if the run took none. `gpu_seconds`
    is GPUs times the seconds for which prewarmed engines held them until now.
    """

    name: str = ""
    gpu_seconds: float = 0.0


# --- the decision -------------------------------------------------------------------------------


def why_no_prewarm(spec: RunSpec) -> str:
    """Return why a job's engines cannot be prewarmed, as a clause for the log; "" if they can."""
    if spec.cluster.access.remote:
        return "they run on a cluster that this process has not joined"
    if spec.first is not None:
        return "a cascade begins with its first model"
    if spec.engine.model.endpoint is not None:
        return "the model is hosted"
    if spec.engine.model.context_auto:
        return "engine.max_model_len: auto depends on the rows"
    if spec.engine.tries:
        return "a trial on sampled rows decides on fp8"
    if spec.reuse.keeps:
        return "with reuse, the number of requests depends on the existing answers"
    if spec.sizes.spans_nodes:
        return "they span nodes"
    if spec.sizes.replicas is not None and spec.sizes.replicas[0] != spec.sizes.replicas[1]:
        return "engine.replicas is a range, so their number depends on the waiting rows"
    return ""


def plan_prewarm(
    spec: RunSpec,
    model: PinnedModel,
    capacity: Capacity,
    guess: Guess,
    engine: type | None = None,
) -> PrewarmPlan | str:
    """Return the engines that a run will certainly need, or a text that says why that is uncertain.

    `guess` estimates the run's rows. Raises the `InsufficientResources` or `ConfigError` that the
    run would raise later. `engine` replaces the engine stage in tests.
    """
    from prefect_raybatch.cluster.pipeline import launch_of, warm_kind_of

    more = {"engine": engine} if engine else {}
    asked = spec.sizes
    known, unknown = sized.model_sizes(asked, model, capacity)
    rows = guess.rows or sizing.ASSUMED_GPUS

    def sizes_by(row_bytes: float, spec: SizeSpec = asked) -> Sizing:
        return sizing.sizes_of(spec, rows, row_bytes, capacity, known, unknown)

    def kind_of(size: Sizing) -> WarmKind | None:
        return warm_kind_of(spec, model, size, **more)

    own = {row_bytes: sizes_by(row_bytes) for row_bytes in guess.row_bytes}
    usual = list(own)[len(own) // 2]
    for shape in dict.fromkeys(map(EngineShape.of, (own[usual], *own.values()))):
        near = {
            b: sizes_for_shape(asked, partial(sizes_by, b), size, shape) for b, size in own.items()
        }
        sizes = [near[b] or size for b, size in own.items()]
        if len({kind_of(size) for size in sizes}) == len({s.pool.replicas for s in sizes}) == 1:
            break
    else:
        return f"their arguments depend on the length of rows{_differing(own)}"
    size, kind = sizes[0], kind_of(sizes[0])
    if kind is None:
        return "a logits processor, or an argument that is an object, cannot be shared by runs"
    fewest = min(its.shards for its in sizes)
    if size.pool.fewest > 1 and fewest < SHARDS_AN_ENGINE * size.pool.fewest:
        return "their number may depend on the number of shards"
    spare, cpus = spare_cpus(spec.cluster, capacity), _cpus(spec.cluster, capacity)
    wanted = size.pool.fewest * asked.cpus
    if wanted + spare > cpus:
        return f"they would take {wanted:g} of {cpus:g} CPUs, and the copy needs {spare:g}"
    cluster.check_fit(asked, capacity, size.pool)
    gpus = size.pool.gpus_a_replica / size.pool.engines_per_gpu
    return PrewarmPlan(kind, launch_of(spec, model, size), size.pool.fewest, gpus)


def _differing(own: Mapping[float, Sizing]) -> str:
    shapes = [asdict(EngineShape.of(size)) for size in own.values()]
    names = {name: {shape[name] for shape in shapes} for name in shapes[0]}
    texts = [f"engine.{name} {sorted(map(str, of))}" for name, of in names.items() if len(of) > 1]
    return f" (set {'; '.join(texts)})".replace("'", "") if texts else ""


def _cpus(where: ClusterSpec, capacity: Capacity) -> float:
    """Return the CPUs that prewarmed engines and the copy of the input may use together.

    On a local cluster, they are at most the CPUs of this process. Otherwise, they are all CPUs of
    the cluster.
    """
    local = cluster.address_of(where) is None
    return min(capacity.cpus, float(cpu_limit.usable_cpus())) if local else capacity.cpus


def spare_cpus(where: ClusterSpec, capacity: Capacity) -> float:
    """Return the CPUs that prewarmed engines must leave for the copy of the input.

    This is one CPU on a local cluster, where the driver copies; else a share of the cluster's CPUs.
    """
    if cluster.address_of(where) is None:
        return 1.0
    return max(1.0, math.floor(COPY_SHARE * capacity.cpus))


def guessed(read: ReadSpec, images: bool) -> Guess:
    """Estimate the rows of an input from its beginning.

    `images`: rows have images, so their size in memory is unknown. A database query is not run for
    the estimate, so nothing is known about its rows. Raises the errors of `source.peek`.
    """
    from prefect_raybatch import source

    if source.detect_format(read) == "sql":  # peeking would run the query once more
        return Guess(0, ANY_ROW)
    return Guess.of(source.peek(read), images)


# --- the start ----------------------------------------------------------------------------------


class Prewarming:
    """Prewarms the engines of one run: starts them during the copy and hands them over after it.

    A thread starts the engines and stays connected to the cluster for them. If they cannot be
    started, that is only logged, because the run then starts its own engines and reports the
    failure. `plan` and `hosts` are the started engines, None before the start. Once `closed`, no
    engines are started.
    """

    def __init__(self, engine: type | None = None, clock: Callable[[], float] = time.monotonic):
        self.engine, self.clock = engine, clock
        self.name = uuid.uuid4().hex  # under which the engines report their start
        self._lock = threading.Lock()
        self._user = Tenant("prewarmed engines", works=False)
        self.thread: threading.Thread | None = None
        self._over = threading.Event()
        self.closed = False
        self.plan: PrewarmPlan | None = None
        self.hosts: PrewarmedHosts | None = None
        self._copies = 0  # CPUs that the copy takes before the engines have started
        self._since = 0.0  # time until which the GPU-seconds are counted
        self._held = 0  # engines that hold GPUs
        self._spent = 0.0
        self._most = math.inf  # GPU-seconds that limits.max_cost allows

    def begin(self, spec: RunSpec, model: Callable[[], PinnedModel]) -> None:
        """Start the engines in a thread, if the job allows prewarming.

        `model` returns the pinned model. A second call, e.g. when planning is retried, does
        nothing.
        """
        if self.thread is not None or self.closed:
            return
        if why := why_no_prewarm(spec):
            log.info("engines start once the input is copied: %s", why)
            return
        cluster.end_by_sigterm()
        self.thread = threading.Thread(
            target=self._main, args=(spec, model), name="raybatch-engines", daemon=True
        )
        self.thread.start()

    def copy_room(self, cpus: int) -> int | None:
        """Return how many of the cluster's `cpus` the copy may use, so that the engines get theirs.

        None if there is no limit: the engines have their CPUs already, or are not prewarmed.
        """
        thread = self.thread
        with self._lock:
            if self.closed or self.hosts is not None or thread is None or not thread.is_alive():
                return None
            self._copies = max(1, math.floor(COPY_SHARE * cpus))
            return self._copies

    def settle(self, kind: WarmKind | None, most: int) -> PrewarmedEngines:
        """Hand at most `most` engines of this `kind` to the run, which has joined the cluster.

        All other prewarmed engines end, and no more are started. `kind` is None if the run needs no
        engines or cannot share them. The returned GPU-seconds count from the start of the engines,
        or from the last call if there was one.
        """
        with self._lock:
            self.closed, plan, hosts = True, self.plan, self.hosts
            self._over.set()
            spent, self._spent = self._spent + self._counted(), 0.0
            left, self._held = self._held, 0
        if plan is None or hosts is None or not left:
            return PrewarmedEngines("", spent)
        if plan.kind == kind:
            cluster.CLUSTER_SESSION.warm.end_prewarmed(hosts, but=most)
            log.info("%s started while the input was copied", counted(min(left, most), "engine"))
            return PrewarmedEngines(self.name, spent)
        cluster.CLUSTER_SESSION.warm.end_prewarmed(hosts)
        log.info("%s prewarmed and ended: the run needs different ones", counted(left, "engine"))
        return PrewarmedEngines("", spent)

    def end(self) -> None:
        """End the engines that no run has leased, and disconnect from the cluster."""
        with self._lock:
            self.closed = True
            self._end_hosts()
        self._over.set()
        if self.thread is not None:
            self.thread.join(END_SECONDS)

    def _main(self, spec: RunSpec, model: Callable[[], PinnedModel]) -> None:
        try:
            guess = guessed(spec.read, spec.prompt.images is not None)
            if guess.rows and guess.whole < WORTH_BYTES:
                log.debug("engines start once the input is copied: it is small")
                return
            pinned = model()
            if self.closed:
                return
            with cluster.connected(spec.cluster, self._user) as have:
                found = plan_prewarm(spec, pinned, have, guess, self.engine)
                why = found if isinstance(found, str) else self._started(spec, found, have)
                if why:
                    log.info("engines start once the input is copied: %s", why)
                    return
                self._hold()
        except (RayBatchError, OSError) as error:  # planning or inference reports it
            log.info("engines start once the input is copied: %s", error)
        except Exception as error:
            log.warning(
                "could not start engines during the copy: %s: %s", type(error).__name__, error
            )

    def _started(self, spec: RunSpec, plan: PrewarmPlan, capacity: Capacity) -> str:
        """Start the engines of `plan`; return "" if they were started, else why not."""
        from prefect_raybatch.stages.ray_internals import report_start

        launch = replace(
            plan.launch, untaken=True, attempt=self.name, tell=partial(report_start, self.name)
        )
        if (most := spec.limits.max_cost) is not None and plan.gpus_an_engine:
            price = gpu_price(spec.cluster, capacity).hour
            if price is None:
                return "limits.max_cost is set, but no GPU price is known"
            self._most = most / price * _HOUR
        total = {"CPU": _cpus(spec.cluster, capacity), "GPU": capacity.gpus}
        with self._lock:
            if self.closed:
                return "the copy has ended"
            # The CPUs that the copy already uses need not be free.
            spare = {"CPU": max(0.0, spare_cpus(spec.cluster, capacity) - self._copies)}
            hosts = cluster.CLUSTER_SESSION.prewarm_engines(
                plan.kind, launch, plan.engines, total, spare
            )
            if hosts is None:
                return "other engines or tasks use the resources, or such engines are running"
            self.plan, self.hosts = plan, hosts
            self._since, self._held = self.clock(), len(hosts.hosts)
        log.info("%s started while the input is copied", counted(plan.engines, "engine"))
        return ""

    def _hold(self) -> None:
        """Stay connected to the cluster until the run has joined it, or the engines have ended.

        Ends the engines when they reach limits.max_cost, or have been idle for too long.
        """
        up: float | None = None
        while not self._over.wait(COPY_LOOK):
            if up is None and self.hosts is not None and self.hosts.begun():
                up = self.clock()
            waited = 0.0 if up is None else self.clock() - up
            if self._spent + self._since_then(self.clock()) >= self._most:
                with self._lock:
                    ended = self._end_hosts()
                if ended:
                    log.warning(
                        "%s ended: they reached limits.max_cost before the input was copied. The "
                        "run stops after the copy; raise limits.max_cost to continue it",
                        counted(ended, "engine"),
                    )
                return
            if self._user.stopped.is_set() or waited > IDLE_SECONDS:
                with self._lock:
                    ended = self._end_hosts()
                if ended and waited > IDLE_SECONDS:
                    log.info(
                        "%s ended: the input is still being copied after %g s; they start again "
                        "after the copy",
                        *(counted(ended, "idle engine"), IDLE_SECONDS),
                    )
                return

    def _end_hosts(self) -> int:
        if self.hosts is None:
            return 0
        self._spent += self._counted()
        self._held = 0
        return cluster.CLUSTER_SESSION.warm.end_prewarmed(self.hosts)

    def _counted(self) -> float:
        """Return the GPU-seconds that prewarmed engines have used since the last call.

        The first call counts from the start of the engines.
        """
        now = self.clock()
        seconds, self._since = self._since_then(now), now
        return seconds

    def _since_then(self, now: float) -> float:
        each = self.plan.gpus_an_engine if self.plan else 0.0
        return self._held * each * (now - self._since)


_PREWARMING: ContextVar[Prewarming | None] = ContextVar("early", default=None)


@contextmanager
def prewarm_allowed(engine: type | None = None) -> Iterator[Prewarming]:
    """Allow a run within the block to prewarm engines: start them while its input is copied.

    The end of the block ends engines that the run has not leased. `engine` replaces the engine
    stage in tests.
    """
    early = Prewarming(engine)
    token = _PREWARMING.set(early)
    try:
        yield early
    finally:
        _PREWARMING.reset(token)
        early.end()


def current_prewarming() -> Prewarming | None:
    """Return the `Prewarming` of the enclosing `prewarm_allowed` block; None outside of one."""
    return _PREWARMING.get()


def begin_prewarming(spec: RunSpec, model: Callable[[], PinnedModel]) -> None:
    """Start a run's engines while its input is copied; no effect outside of `prewarm_allowed`."""
    if (early := current_prewarming()) is not None:
        early.begin(spec, model)


def hand_over_prewarmed(kind: WarmKind | None, most: int) -> PrewarmedEngines:
    """Hand the prewarmed engines to the run, which has joined the cluster; return them.

    `kind` is the kind of engines that the run needs; None if it needs none or cannot share them.
    `most` is how many it can use at most. All other prewarmed engines end; see `Prewarming.settle`.
    """
    early = current_prewarming()
    return PrewarmedEngines() if early is None else early.settle(kind, most)
