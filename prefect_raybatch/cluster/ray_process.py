"""Starts, joins and leaves Ray clusters from this process, on behalf of `sharing`."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from prefect_raybatch.bounded import BoundedCalls
from prefect_raybatch.cluster.reach import check_reachable, check_temp_folder, unreachable_reason
from prefect_raybatch.cluster.sharing import END_SECONDS
from prefect_raybatch.cluster.tokens import check_token_file, keep_token_private, token_sent
from prefect_raybatch.errors import ClusterUnavailable, ConfigError, InsufficientResources
from prefect_raybatch.job.cluster import ClusterAccess

log = logging.getLogger(__name__)
WORKER_PYTHON = "RAYBATCH_WORKER_PYTHON"  # environment variable: the Python of Ray's workers
START_TRIES = 3  # of a local cluster
REGISTER_SECONDS = 180  # that a local cluster gives a worker to report itself; Ray's default is 60
LEVEL_LINE = b"Set ray log level from environment variable"


class RayProcess:
    """Starts, joins and leaves Ray clusters; implements the protocol `sharing.RayAccess`."""

    def __init__(self) -> None:
        self._over = threading.Event()  # ends the thread that started Ray
        self._leaving = BoundedCalls(END_SECONDS)  # a head that hangs would block ray.shutdown
        self._auth: dict[str, str | None] = {}  # Ray's token variables before the start
        # Address of a cluster to join instead of starting a local one; None to start one.
        self.standing: Callable[[], str | None] = lambda: None
        self.is_standing = False  # whether the latest start joined one

    def joined(self) -> bool:
        # While another thread imports Ray, its module has no `is_initialized` yet.
        is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
        return is_initialized is not None and not self._leaving.under_way and bool(is_initialized())

    def start(self, address: str | None, cpus: int, access: ClusterAccess) -> None:
        if self._leaving.under_way:
            raise ClusterUnavailable(
                "this process cannot leave the Ray cluster of an earlier run, because its head "
                "does not answer, and so cannot join another. Run it again in a new process"
            )
        if access.address != address:  # RAY_ADDRESS names the cluster, and the job no token for it
            access = ClusterAccess(address)
        if address:
            check_reachable(address, access)
        else:
            check_temp_folder()
        head = None if address else self.standing()
        if head is not None and (trouble := unreachable_reason(head)):
            log.warning("the engines of earlier commands cannot be reached: %s", trouble)
            head = None
        self.is_standing = head is not None

        # Ray Data sets the levels of its loggers when it is imported, so set ours afterwards.
        from prefect_raybatch.stages.ray_internals import (
            PROGRESS_LOG,
            log_deaths,
            put_back_auth,
            use_token,
        )

        log_deaths()
        self._auth = use_token(token_sent(access) if head else access.token)
        logging.getLogger("ray.data").setLevel(logging.WARNING)  # no plans and timings
        PROGRESS_LOG.setLevel(logging.ERROR)
        # Ray's C++ code logs an error for each actor that may be restarted, as engines may.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        quiet: dict[str, object] = {"logging_level": "error", "log_to_driver": False}
        quiet |= _worker_python(local=not address)
        if not (address or head):
            # An engine's actor may wait for the imports of the process that it is forked from.
            os.environ.setdefault("RAY_worker_register_timeout_seconds", str(REGISTER_SECONDS))
            quiet |= {"num_cpus": cpus, "include_dashboard": False}
            if access.token is None:
                keep_token_private()
        if access.token is None:
            check_token_file()
        try:
            with _sigterm_kept(), _quiet_start(not address):
                self._lasting(lambda: _init(address or head, quiet))
        except BaseException:
            put_back_auth(self._auth)
            raise

    def end(self) -> None:
        import ray

        from prefect_raybatch.stages.ray_internals import put_back_auth

        try:
            self._leaving(ray.shutdown)
        except TimeoutError as error:
            log.warning("could not disconnect from Ray's head; continuing: %s", error)
            atexit.unregister(ray.shutdown)  # would hang again
        finally:
            put_back_auth(self._auth)
            self._over.set()

    def _lasting(self, start: Callable[[], object]) -> None:
        """Call `start`, which starts or joins Ray, in a thread that lives as long as the cluster.

        Linux kills the processes that Ray starts when the thread that started them ends
        (PR_SET_PDEATHSIG), and a run's thread may end while other runs are in the cluster. In the
        main thread, calls `start` directly.
        """
        if threading.current_thread() is threading.main_thread():
            start()
            return
        outcome: Future[None] = Future()
        self._over = over = threading.Event()

        def work() -> None:
            try:
                start()
            except BaseException as error:  # raised in the caller
                outcome.set_exception(error)
                return
            outcome.set_result(None)
            over.wait()

        run = copy_context().run
        threading.Thread(target=run, args=(work,), name="raybatch-ray", daemon=True).start()
        outcome.result()

    def address(self) -> str:
        """Return the address at which other processes join this cluster."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def free(self) -> dict[str, float]:
        import ray

        return dict(ray.available_resources())


def _worker_python(local: bool) -> dict[str, object]:
    """Return the option of `ray.init` that makes workers use another Python; {} without one.

    The environment variable RAYBATCH_WORKER_PYTHON has its path. So workers can use an environment
    with vLLM while this process has a Prefect that conflicts with it. Raises `ConfigError` if the
    path is not absolute or, for a `local` cluster, not a program.
    """
    python = os.environ.get(WORKER_PYTHON)
    if not python:
        return {}
    if not os.path.isabs(python) or (local and not shutil.which(python)):
        raise ConfigError(
            f"{WORKER_PYTHON}={python} is not the absolute path of a program. Set it to the Python "
            "of the environment that has vLLM, such as /opt/engines/bin/python, or unset it"
        )
    return {"runtime_env": {"py_executable": shlex.quote(python)}}


def _init(address: str | None, options: Mapping[str, Any]) -> None:
    """Call `ray.init`; try again if a new local cluster is not up within Ray's limit of 30 s.

    Raises `ClusterUnavailable` if it is not up after START_TRIES attempts, and
    `InsufficientResources` if Ray cannot start or join a cluster for another reason.
    """
    import ray

    for tries_left in reversed(range(START_TRIES)):
        try:
            ray.init(address=address or "local", **options)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InsufficientResources(
                f"no Ray cluster answers at {address or 'this machine'}: {error}"
            ) from None
        except Exception as error:
            if address or type(error) is not Exception:  # Ray has no class for this one
                raise
            if not tries_left:
                raise ClusterUnavailable(
                    f"Ray did not start on this machine in {START_TRIES} attempts ({error}). "
                    "Reduce the load of the machine, or see the logs in /tmp/ray"
                ) from None
            log.warning("Ray did not start in time; starting it again (%s)", error)
            ray.shutdown()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the previous SIGTERM handler after the block; if there was none, keep Ray's.

    Ray replaces Prefect's handler, so that Prefect would report a cancellation as a crash. Ray's
    C++ code also sets a handler that Python does not see, which calls Python's handler and ends the
    process by SIGABRT if that takes over 3 s (ray#64830). In the main thread, setting Python's
    handler again replaces the C++ one; in any other thread, the C handler is restored.
    """
    before = signal.getsignal(signal.SIGTERM)
    libc, below = ctypes.CDLL(None), ctypes.create_string_buffer(1024)  # a `struct sigaction`
    libc.sigaction(signal.SIGTERM, None, below)
    try:
        yield
    finally:
        if callable(before):
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
            else:
                libc.sigaction(signal.SIGTERM, below, None)


@contextmanager
def _quiet_start(local: bool) -> Iterator[None]:
    """Drop the line in which Ray's C++ code reports that it has read RAY_BACKEND_LOG_LEVEL.

    It would break a progress bar, and no setting silences it. Other output is printed after the
    block. Does nothing for a remote cluster, which may take minutes to join.
    """
    if not (local and sys.stderr and _is_open(2)):  # a service may have no stderr
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        terminal = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            caught.seek(0)
            for line in caught:
                if LEVEL_LINE not in line:
                    os.write(2, line)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
