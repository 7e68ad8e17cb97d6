"""Where a job comes from, as real flow runs of Prefect tell it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.context import FlowRunContext, TaskRunContext

from prefect_raybatch.flow import origin
from prefect_raybatch.policy import in_force


def in_context(monkeypatch: pytest.MonkeyPatch, flow_run: Any, task_run: Any = None) -> None:
    def given(value: Any, name: str) -> Any:
        return None if value is None else SimpleNamespace(**{name: value})

    of_flow, of_task = given(flow_run, "flow_run"), given(task_run, "task_run")
    monkeypatch.setattr(FlowRunContext, "get", lambda: of_flow)
    monkeypatch.setattr(TaskRunContext, "get", lambda: of_task)


def run(**fields: Any) -> SimpleNamespace:
    plain = {"deployment_id": None, "work_queue_id": None, "parent_task_run_id": None}
    return SimpleNamespace(**{"id": uuid4(), **plain, **fields})


@pytest.mark.parametrize(
    ("flow_run", "task_run", "root", "limited"),
    [
        (None, None, None, False),  # no flow: a script
        (run(), None, None, False),  # called in the owner's process
        (run(deployment_id=uuid4()), None, None, True),
        (run(work_queue_id=uuid4()), None, None, True),
        (run(parent_task_run_id=uuid4()), None, False, False),  # a subflow of the owner's flow
        (run(parent_task_run_id=uuid4()), None, True, True),  # of a deployment's
        (run(parent_task_run_id=uuid4()), None, OSError("away"), True),  # nobody can say
        (None, run(flow_run_id=None), None, False),  # a task called in a script
        (None, run(flow_run_id=uuid4()), True, True),  # a task of a deployment on another machine
    ],
)
def test_flow_and_task_runs(
    monkeypatch: pytest.MonkeyPatch, flow_run: Any, task_run: Any, root: Any, limited: bool
) -> None:
    in_context(monkeypatch, flow_run, task_run)
    id = str(uuid4())

    class Client:
        def __enter__(self) -> Client:
            if isinstance(root, OSError):
                raise root
            return self

        def __exit__(self, *_: object) -> None: ...

        def read_flow_run(self, _: object) -> Any:
            return run(deployment_id=uuid4() if root else None)

    monkeypatch.setattr(origin, "get_client", lambda sync_client: Client())
    monkeypatch.setattr(origin.flow_run, "get_root_flow_run_id", lambda: id)
    assert origin.comes_through_api() is limited
    assert in_force.policy_in_force().limited is limited


def test_prefect_is_asked_once_for_each_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of a job asks for the origin, and each answer takes some requests."""
    asked: list[str] = []

    def root() -> str:
        asked.append("root")
        if len(asked) == 1:
            raise OSError("away")
        return str(uuid4())

    monkeypatch.setattr(origin.flow_run, "get_root_flow_run_id", root)
    client = nullcontext(SimpleNamespace(read_flow_run=lambda root: run()))
    monkeypatch.setattr(origin, "get_client", lambda sync_client: client)
    for subflow in (run(parent_task_run_id=uuid4()), run(parent_task_run_id=uuid4())):
        in_context(monkeypatch, subflow)
        answers = [origin.comes_through_api() for _ in range(3)]
        assert answers[1:] == [False, False]
    assert asked.count("root") == 3  # an answer that did not come is asked for again


def test_a_task_worker_serves_tasks_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    in_context(monkeypatch, None, run(flow_run_id=None))
    monkeypatch.setitem(sys.modules, "prefect.task_worker", SimpleNamespace())
    assert origin.comes_through_api()


@pytest.mark.parametrize("name", ["prefect.engine", "prefect.flow_engine", "prefect.task_worker"])
def test_a_process_that_prefect_starts_is_limited(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name=name))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert in_force.policy_in_force().limited


def test_a_limited_process_is_limited_in_all_its_threads() -> None:
    code = """
import threading
from prefect_raybatch.policy.in_force import limit_process, policy_in_force
seen = []
limit_process()
thread = threading.Thread(target=lambda: seen.append(policy_in_force().limited))
thread.start(); thread.join()
raise SystemExit(0 if seen == [True] else 1)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
