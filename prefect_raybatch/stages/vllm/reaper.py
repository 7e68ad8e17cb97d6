"""Ensures that no engine process outlives the process that started it, not even after `kill -9`.

vLLM runs its core and its workers as subprocesses (`VLLM::EngineCore`, `VLLM::Worker...`). When
their parent is killed they are left with parent 1 and keep their memory for hours. So every process
that starts an engine calls `watch_children()` first. That starts one tiny detached helper (this
same file run as a script, standard library only, about 8 MB), which notes the engine's processes
and ends them as soon as the watched process is gone. While engines start, it looks for them twice a
second, which takes 1 to 3 % of a core; otherwise seldom.

The helper watches by process id and start time, through a pidfd if the kernel has one, and holds
nothing of its parent: no pipe (a forked engine would inherit the other end and keep it open
forever), no standard streams, no folder. Linux only; elsewhere `watch_children()` does nothing.

A vLLM plugin cannot replace the helper: vLLM calls plugins in a core about 15 s after the core's
start and after a handshake with the parent. In 3 of 3 trials with the parent killed before that,
the core still existed after 60 s.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

POLL_S = 0.5
"""Seconds between two searches for child processes while engines start.

A child that was started less than this before its parent died may be missed.
"""

SELDOM_S = 5.0
"""Seconds between two searches for child processes while no engine starts."""

START_S = 300.0
"""Seconds for which engines count as starting, from the last `watch_children()` call or the first
sight of the newest engine process, whichever is later.
"""

GRACE_S = 3.0
"""Seconds an engine process gets between SIGTERM, at which vLLM frees its memory, and SIGKILL."""

ENGINE_MARKS = (
    b"VLLM::",
    b"multiprocessing.spawn",
    b"multiprocessing.forkserver",
    b"multiprocessing.popen_spawn",
)
"""Parts of the command lines of engine processes: their title or, before they set one, the name of
the multiprocessing method that started them.
"""

TRACKER = b"multiprocessing.resource_tracker"
"""Part of the command line of multiprocessing's resource tracker.

The tracker removes what the processes that it serves leave in /dev/shm, once all of them are gone;
then it ends by itself.
"""

Process = tuple[int, int]
"""A process id and its start time in clock ticks since boot: never the same for two processes."""

EngineProcesses = dict[Process, bool]
"""{process: whether it is surely an engine's}; False if it looks like a fork of the parent."""

_watched_pid: int | None = None  # the process that `_helper` watches; in a forked child, its parent
_helper: Process | None = None


def watch_children() -> bool:
    """Ensure that engine processes started from now on die with this process.

    Call it before each engine start.

    Returns True if the helper runs (also if an earlier call started it), False without /proc. The
    helper ends only child processes that look like vLLM's, multiprocessing's or forks of this
    process, with all their descendants, also those started before the call. It leaves other
    programs alone. Costs one short-lived subprocess, about 0.05 s, on the first call.

    Raises OSError or subprocess.CalledProcessError if the helper cannot be started.
    """
    global _watched_pid, _helper
    if _watched_pid == os.getpid() and _helper is not None and _alive(_helper):
        _send(_helper, signal.SIGUSR1)
        return True
    me = _read(os.getpid())
    if me is None:
        return False
    import subprocess

    # A minimal environment: LD_PRELOAD (vLLM sets it on a CPU) has no place in the helper.
    kept = {k: os.environ[k] for k in ("PATH", "LD_LIBRARY_PATH") if k in os.environ}
    # -I and -S: neither the environment nor site packages cost start-up time or change behaviour.
    # The first process only forks the helper and ends, so that the helper is nobody's child: Ray
    # kills a worker's children when the worker ends, and would kill the helper before its work.
    made = subprocess.run(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), str(me.started)],
        check=True,
        env=kept,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # the id of the helper
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        timeout=60,
    )
    pid = int(made.stdout)
    helper = _read(pid)
    _watched_pid, _helper = os.getpid(), (pid, helper.started) if helper else None
    return True


class _Stat:
    """A process as in /proc/PID/stat: `parent` id, `started` (ticks since boot), `state` letter."""

    __slots__ = ("parent", "started", "state")

    def __init__(self, line: bytes) -> None:
        # The name in parentheses may hold spaces and parentheses itself.
        fields = line[line.rindex(b")") + 2 :].split()
        self.state = fields[0]
        self.parent = int(fields[1])
        self.started = int(fields[19])


def _read(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return _Stat(file.read())
    except (OSError, ValueError, IndexError):
        return None


def _alive(process: Process) -> bool:
    stat = _read(process[0])
    return stat is not None and stat.started == process[1] and stat.state not in (b"Z", b"X")


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _children(pid: int) -> list[int]:
    """Return the ids of a process's direct children; empty if it has gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(int(child) for child in file.read().split())
        return found
    except FileNotFoundError:
        if not os.path.exists(f"/proc/{pid}") or os.path.exists("/proc/self/task/self/children"):
            return found
    except OSError:
        return found
    # A kernel without the `children` files: look at every process instead.
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _read(int(name))) is not None and stat.parent == pid:
            found.append(int(name))
    return found


def _look(root: int, root_command: bytes, seen: EngineProcesses) -> None:
    """Update `seen`, the engine processes found so far.

    Drop ended processes. Add engine processes among the descendants of `root` and of processes in
    `seen`. `root` is the id of the watched process, `root_command` its command line.

    The value of a process is whether it is certainly an engine process. It is False for a child
    with the same command line as `root`: it may be a fork that will become an engine process.
    """
    for process in [process for process in seen if not _alive(process)]:
        del seen[process]
    certain = {pid for (pid, _), known in seen.items() if known}
    todo = [(pid, 0) for pid in _children(root)] + [(pid, 0) for pid, _ in seen]
    done: dict[int, int] = {}
    while todo:
        pid, above = todo.pop()
        if done.get(pid, -1) >= above:
            continue
        stat = _read(pid)
        if stat is None:
            continue
        command = _command(pid)
        # A forked engine process has its parent's command line until it sets its title. So does
        # any other child for a moment, between fork and exec.
        likely = command != b"" and command == root_command
        marked = not likely and any(mark in command for mark in (*ENGINE_MARKS, TRACKER))
        known = pid in certain or marked
        engine = max(above, 2 if known else 1 if likely else 0)
        done[pid] = above
        if engine:
            seen[(pid, stat.started)] = engine == 2
        else:
            seen.pop((pid, stat.started), None)
        todo.extend((child, engine) for child in _children(pid))


def _send(process: Process, number: int) -> None:
    """Send signal `number` to this process, never to another that has reused its id."""
    pid = process[0]
    try:
        if not hasattr(os, "pidfd_open"):
            raise NotImplementedError
        handle = os.pidfd_open(pid)
    except (OSError, NotImplementedError):
        if _alive(process):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        return
    try:
        # The handle stays with one process: if the start time matches now, it is the right one.
        if _alive(process):
            signal.pidfd_send_signal(handle, number)
    except OSError:
        pass
    finally:
        os.close(handle)


def _wait_for_end(root: Process, root_command: bytes, seen: EngineProcesses) -> None:
    """Wait until `root` has ended, and keep `seen` up to date until then."""
    told, tells = os.pipe()
    os.set_blocking(told, False)
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)  # SIGUSR1 of `watch_children()`
    waits = [told]
    with contextlib.suppress(AttributeError, OSError):
        waits.append(os.pidfd_open(root[0]))
    starts_until, next_look = time.monotonic() + START_S, 0.0
    while _alive(root):
        now = time.monotonic()
        if now >= next_look:
            before = set(seen)
            _look(root[0], root_command, seen)
            if seen.keys() - before:
                starts_until = now + START_S
            next_look = now + (POLL_S if now < starts_until else SELDOM_S)
        # Without a pidfd nothing reports the end, so look for it often.
        most = next_look - now if len(waits) > 1 else POLL_S
        if told in select.select(waits, [], [], most)[0]:
            os.read(told, 4096)
            starts_until, next_look = time.monotonic() + START_S, 0.0


def _end(root_command: bytes, seen: EngineProcesses) -> None:
    """Send SIGTERM, then after `GRACE_S` SIGKILL, to all seen processes and their later children.

    Resource trackers of multiprocessing are killed last. Killed earlier, they would leave behind
    the shared memory segments of the engine processes (some 200 MB per engine).
    """
    _look(0, root_command, seen)
    trackers = {process for process in seen if TRACKER in _command(process[0])}
    for process in seen.keys() - trackers:
        _send(process, signal.SIGTERM)
    _wait(root_command, seen, trackers)
    for process in seen.keys() - trackers:
        _send(process, signal.SIGKILL)
    _wait(root_command, seen, set())
    for process in trackers:
        _send(process, signal.SIGKILL)


def _wait(root_command: bytes, seen: EngineProcesses, besides: set[Process]) -> None:
    """Wait up to `GRACE_S` until all processes in `seen`, except `besides`, have ended.

    Meanwhile drops ended processes from `seen`, and adds new engine processes below those in it.
    `root_command` is the command line of the watched process, by which its forks are recognized.
    """
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(_alive(process) for process in seen.keys() - besides):
        _look(0, root_command, seen)
        time.sleep(0.1)


def kill_all(pids: list[int]) -> None:
    """Send SIGKILL to these processes and all their descendants; wait for their end.

    Waits up to `GRACE_S` seconds. SIGKILL also ends a suspended process.
    """
    seen = {(pid, stat.started): True for pid in pids if (stat := _read(pid)) is not None}
    _look(0, b"", seen)
    for process in seen:
        _send(process, signal.SIGKILL)
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(_alive(process) for process in seen):
        time.sleep(0.05)


def main(pid: int, started: int) -> None:
    """Run the helper: detach, wait until the process (`pid`, `started`) ends, end its engines."""
    signal.signal(signal.SIGUSR1, lambda *_: None)  # before any process knows the helper's id
    helper = os.fork()
    if helper:
        os.write(1, b"%d" % helper)
        os._exit(0)
    os.dup2(0, 1)  # closes the pipe: the reader of the id waits for that
    seen: EngineProcesses = {}
    root_command = _command(pid)
    _wait_for_end((pid, started), root_command, seen)
    _end(root_command, seen)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
