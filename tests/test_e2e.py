"""The whole of it: real vLLM on the CPU, real Ray, a real Prefect server, real S3, real kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from e2e_functions import GATE, OPEN, ROWS_A_SHARD
from helpers.prefect_server import ROOT, Prefect
from helpers.processes import below, running, running_but_agents, title, until
from s3server import S3Server

from prefect_raybatch.demo import LABELS
from prefect_raybatch.demo.customers import companies
from prefect_raybatch.storage import Store, open_store

# The run that many tests look at is worked within the time of the first of them.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

SEED = int(os.environ.get("RAYBATCH_SEED", random.SystemRandom().randrange(10**6)))
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def env(prefect_process: Prefect) -> dict[str, str]:
    """What makes commands use the shared Prefect server, and lets workers find user functions."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**prefect_process.env, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def call(*args: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "raybatch"), *args],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=540,
    )


# --- one run: killed, and whole in the end --------------------------------------------------------

SHARDS = 30
ROWS = SHARDS * ROWS_A_SHARD
TOO_LONG, RAISE, REFUSED, LEFT_OUT = {7, 500}, {20, 320, 321, 1199}, {100}, {40, 41}
FAILED = {
    **{i: ("prepare", "PromptTooLong") for i in TOO_LONG},
    **{i: ("prepare", "ValueError") for i in RAISE},
    **{i: ("postprocess", "RuntimeError") for i in REFUSED},
}
NAMES = [name for name, _ in companies(ROWS, 5, "all")]
HANG = 15
TRIGGER = """
import json, sys
from prefect_raybatch import BatchJob
from prefect_raybatch.blocks import BatchInferenceJob
BatchInferenceJob(job=BatchJob.from_yaml(sys.argv[1])).save("e2e")
run = BatchInferenceJob.load("e2e").trigger("k")
run.wait_for_completion()
report = run.fetch_result()
print(json.dumps([run.run_key, report.state, report.rows, report.good, report.run]))
"""


def input_table() -> pa.Table:
    """Rows of which a few fail, in each stage."""
    note = [
        "word " * 400 if i in TOO_LONG else "raise" if i in RAISE else None for i in range(ROWS)
    ]
    return pa.table({"id": pa.array(range(ROWS), pa.int16()), "Company": NAMES, "note": note})


CORE_APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # a process of its own, to be stopped


def job_dict(folder: str) -> dict[str, Any]:
    return {
        "name": "industries",
        "source": {"uri": f"{folder}/in", "rows_per_shard": ROWS_A_SHARD},
        "prompt": {"function": "e2e_functions:ask"},
        "sampling": {"temperature": 0, "max_tokens": 16, "choice": list(LABELS)},
        "engine": {"model": "demo", "max_model_len": 256, "env": CORE_APART},
        "output": {
            "uri": f"{folder}/out",
            "column": "industry",
            "postprocess": "e2e_functions:shape",
            "columns": ["id", "Company"],
        },
        "limits": {"hang_seconds": HANG, "max_failed_fraction": 0.02},
    }


@dataclass
class Story:
    """What was seen of the run, attempt by attempt."""

    folder: Path
    env: dict[str, str]
    store: Store
    commits: list[dict[str, bytes]] = field(default_factory=list)  # before and after each attempt
    outlived: list[psutil.Process] = field(default_factory=list)
    succeeded: list[bool] = field(default_factory=list)  # before the last attempt
    status: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    def call(self, *args: str) -> subprocess.CompletedProcess[str]:
        return call(*args, env=self.env, cwd=self.folder)

    def at_work(self, process: subprocess.Popen[bytes]) -> None:
        log = (self.folder / "log.txt").read_text()
        assert process.poll() is None, f"the run ended before it was disturbed:\n{log[-3000:]}"

    def ended(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for a process that is to end well."""
        code = process.wait(500)
        self.log = (self.folder / "log.txt").read_text()
        assert code == 0, self.log[-3000:]

    def note(self) -> None:
        self.commits.append(commits(self.store))
        self.succeeded.append(any(info.path == "_SUCCESS" for info in self.store.list("")))

    def report(self) -> dict[str, Any]:
        """The report as `raybatch run --json` prints it."""
        report = json.loads(self.store.read("_raybatch/report.json"))
        return {name: value for name, value in report.items() if name != "checksum"}

    def table(self, kind: str = "data", key: str = "k") -> pa.Table:
        store = open_store(f"s3://e2e/out/{key}", self.store_options)
        report = json.loads(store.read("_raybatch/report.json"))
        tables, folder = [], {"data": "data", "quarantine": "_quarantine"}[kind]
        for part in report["parts"]:
            if part["path"].startswith(f"{folder}/"):
                with store.open(part["path"]) as stream:
                    tables.append(pq.read_table(stream))
        return pa.concat_tables(tables)

    store_options: dict[str, str] = field(default_factory=dict)


def commits(store: Store) -> dict[str, bytes]:
    return {info.path: store.read(info.path) for info in store.list("_raybatch/commits")}


def start(command: list[str], env: dict[str, str], cwd: Path) -> subprocess.Popen[bytes]:
    with (cwd / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, env=env, cwd=cwd, stdout=log, stderr=log, start_new_session=True
        )


@contextmanager
def started(story: Story, command: list[str], **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """As `start`; whatever happens, nothing of it is left after the block."""
    process = start(command, {**story.env, **env}, story.folder)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def committed(story: Story) -> int:
    return len(list(story.store.list("_raybatch/commits")))


def more_commits(story: Story, process: subprocess.Popen[bytes], more: int) -> None:
    """Waits until so many shards more are committed than before this attempt."""
    before = len(story.commits[-1])

    def there() -> bool:
        story.at_work(process)
        return committed(story) >= before + more

    until(there, 300, "a commit")


def engines_of(story: Story, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes of a run's engine, as soon as its core is there."""

    def there() -> list[psutil.Process]:
        story.at_work(process)
        return below(process.pid, "VLLM::EngineCore") and below(process.pid, "VLLM::")

    return list(until(there, 300, "an engine"))


def gate_of(story: Story, name: str, most: int) -> Path:
    """A gate that an attempt goes through with so many shards, on a machine of any speed."""
    gate = story.folder / name
    gate.mkdir()
    (gate / "most").write_text(str(most))
    return gate


def killed(story: Story, draw: random.Random) -> None:
    """SIGKILL to the driver and its group at a random moment after a few more commits."""
    command = [str(BIN / "raybatch"), "run", "job.yaml", "--run-key", "k", "--prefect"]
    gate = gate_of(story, "killed", 10)
    process = start(command, {**story.env, GATE: str(gate)}, story.folder)
    engines = engines_of(story, process)
    more_commits(story, process, 1 + draw.randint(0, 5))
    time.sleep(draw.random() * 2)
    story.at_work(process)
    everything = below(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 120
    # What is left may still commit.
    while running_but_agents(everything) and time.monotonic() < deadline:
        time.sleep(0.5)
    story.outlived = running(engines)


def triggered(story: Story) -> None:
    """The rest of the run, triggered by a block."""
    command = [sys.executable, "-c", TRIGGER, "job.yaml"]
    with started(story, command) as process:
        story.ended(process)


@pytest.fixture(scope="module")
def story(s3: S3Server, env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A run on S3 whose first attempt is killed, and whose second is triggered by a saved block."""
    print(f"RAYBATCH_SEED={SEED}")
    folder = tmp_path_factory.mktemp("story")
    pq.write_table(input_table(), folder / "in.parquet", row_group_size=100)
    upload = open_store("s3://e2e/in", s3.options)
    upload.put("in.parquet", (folder / "in.parquet").read_bytes())
    (folder / "job.yaml").write_text(yaml.safe_dump(job_dict("s3://e2e")))
    env, store = {**env, **s3.env}, open_store("s3://e2e/out/k", s3.options)
    found = Story(folder, env, store, store_options=s3.options)
    found.note()
    killed(found, random.Random(SEED))
    found.note()
    found.status = json.loads(found.call("status", store.uri, "--json").stdout)
    triggered(found)
    found.commits.append(commits(store))
    return found


def test_engines_do_not_outlive_a_killed_driver(story: Story) -> None:
    assert story.outlived == []


def test_no_attempt_changes_or_loses_a_commit(story: Story) -> None:
    for earlier, later in zip(story.commits, story.commits[1:], strict=False):
        assert earlier.items() <= later.items(), "a commit was changed or lost"
    assert [len(seen) for seen in story.commits] == sorted(len(seen) for seen in story.commits)
    assert story.succeeded == [False, False]  # the run was not said to be whole


def test_the_status_counts_what_the_killed_run_committed(story: Story) -> None:
    done = len(story.commits[1])
    assert (story.status["committed"], story.status["pending"]) == (done, SHARDS - done)


def test_only_what_was_not_committed_ran_again(story: Story) -> None:
    assert story.report()["resumed_shards"] == len(story.commits[1])


def test_every_row_is_there_once_and_answered_right(story: Story) -> None:
    report, table = story.report(), story.table()
    counts = (ROWS - len(FAILED) - len(LEFT_OUT), len(FAILED), len(LEFT_OUT))
    assert (report["good"], report["failed"], report["skipped"]) == counts
    assert set(table.column_names) == {"id", "Company", "industry", "length", "_row"}
    numbers = [i for i in range(ROWS) if i not in FAILED and i not in LEFT_OUT]
    assert table["_row"].to_pylist() == table["id"].to_pylist() == numbers
    assert table["Company"].to_pylist() == [NAMES[i] for i in numbers]
    truth = [label for _, label in companies(ROWS, 5, "all")]
    answers = zip(table["industry"].to_pylist(), numbers, strict=True)
    assert sum(answer == truth[i] for answer, i in answers) >= 0.95 * len(numbers)


def test_failed_rows_go_to_quarantine_with_their_input(story: Story) -> None:
    rows = story.table("quarantine").to_pylist()
    assert {row["_row"]: (row["stage"], row["error"]) for row in rows} == FAILED
    (row,) = (row for row in rows if row["_row"] == 20)
    assert row["input"] == {"id": 20, "Company": NAMES[20], "note": "raise"}


def test_the_run_is_proved(story: Story) -> None:
    proof = story.call("verify", story.store.uri, "--json")
    assert proof.returncode == 0, proof.stdout
    assert json.loads(proof.stdout)["data"] == ROWS - len(FAILED) - len(LEFT_OUT)


def test_the_block_that_was_triggered_fetches_the_report(story: Story) -> None:
    (told,) = (line for line in story.log.splitlines() if line.startswith('["k", '))
    good = ROWS - len(FAILED) - len(LEFT_OUT)
    assert json.loads(told) == ["k", "completed", ROWS, good, story.store.uri]


def test_each_attempt_says_how_long_its_engines_took_to_start(story: Story) -> None:
    starts = story.report()["starts"]
    told = {"cluster", "workers", "imports", "weights", "graphs"}
    assert starts and all(told <= set(one["seconds"]) for one in starts)


def test_a_finished_run_is_told_and_not_run_again(story: Story) -> None:
    again = story.call("run", "job.yaml", "--run-key", "k", "--no-prefect", "--json")
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads(again.stdout.splitlines()[-1]) == story.report()
    assert "starting" not in again.stderr


def test_another_job_is_refused_with_the_difference(story: Story) -> None:
    other = story.call("run", "job.yaml", "--run-key", "k", "--set", "sampling.max_tokens=99")
    assert other.returncode == 2
    assert "sampling.max_tokens: 16 -> 99" in other.stderr
    assert "starting engines" not in other.stderr


@pytest.mark.nightly
def test_a_core_that_is_stopped_for_ever_is_ended_and_its_rows_run_again(
    tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(input_table(), tmp_path / "in/in.parquet")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_dict(str(tmp_path))))
    found = Story(tmp_path, env, open_store(f"{tmp_path}/out/k"))
    found.note()
    gate = gate_of(found, "gate", 1)
    command = [str(BIN / "raybatch"), "run", "job.yaml", "--run-key", "k", "--no-prefect"]
    with started(found, command, **{GATE: str(gate)}) as process:
        titled = [p for p in engines_of(found, process) if "VLLM::EngineCore" in title(p)]
        (core,) = (p for p in titled if p.ppid() not in {other.pid for other in titled})
        assert "multiprocessing.forkserver" in " ".join(core.parent().cmdline())  # imported vLLM
        more_commits(found, process, 1)
        core.suspend()
        (gate / OPEN).touch()
        found.ended(process)
    assert not running([core])
    assert f"EngineDied: hung: no step returned for {HANG} s" in found.log
    assert found.report()["engine_deaths"] >= 1
    assert found.report()["good"] == ROWS - len(FAILED) - len(LEFT_OUT)


# --- in flows -------------------------------------------------------------------------------------


@pytest.mark.whole
def test_tasks_compose_into_a_flow_of_your_own(tmp_path: Path, env: dict[str, str]) -> None:
    """Through a real Prefect server: the example flow, its artifacts and its logs; and once more,
    with the engine that is up."""
    code = (
        "import json, sys, time; sys.path.insert(0, 'flows')\n"
        "from extract_infer_load import extract_infer_load\n"
        "from prefect.client.orchestration import get_client\n"
        "from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter\n"
        "from prefect.client.schemas.filters import LogFilterFlowRunId\n"
        "from prefect_raybatch import warm_engines\n"
        "with warm_engines():\n"
        f"    state = extract_infer_load({str(tmp_path / 'one')!r}, 300, return_state=True)\n"
        f"    again = extract_infer_load({str(tmp_path / 'two')!r}, 40)\n"
        # This run alone: the server also knows runs of other tests, killed ones among them.
        "key = state.state_details.flow_run_id\n"
        "mine = FlowRunFilter(id=FlowRunFilterId(any_=[key]))\n"
        "of_mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[key]))\n"
        "with get_client(sync_client=True) as client:\n"
        # The server records states and logs after it has answered.
        "    until = time.time() + 120\n"
        "    while time.time() < until:\n"
        "        run = client.read_flow_run(key)\n"
        "        tasks = client.read_task_runs(flow_run_filter=mine)\n"
        "        logs = [l.message for l in client.read_logs(of_mine)]\n"
        "        whole = {t.state_name for t in [run, *tasks]} == {'Completed'}\n"
        "        if whole and any('300 rows' in text for text in logs):\n"
        "            break\n"
        "        time.sleep(1)\n"
        "print(json.dumps({'counts': state.result(), 'again': again, 'state': run.state_name,\n"
        "    'tasks': {t.name.split('-')[0]: t.state_name for t in tasks}, 'logs': logs}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["state"] == "Completed"
    assert sum(found["counts"].values()) == 300 and set(found["counts"]) <= set(LABELS)
    assert set(found["tasks"].values()) == {"Completed"}
    assert any("300 rows" in text for text in found["logs"])
    assert any("starting engines: cluster" in text for text in found["logs"])
    assert sum(found["again"].values()) == 40 and set(found["again"]) <= set(LABELS)
    (start,), (second,) = (
        json.loads(report.read_text())["starts"]
        for name in ("one", "two")
        for report in (tmp_path / name).rglob("report.json")
    )
    assert second["engines"] == 1 and not {"imports", "weights"} & set(second["seconds"])
    told = {"cluster", "workers", "imports", "weights", "graphs", "first step"}
    assert start["engines"] == 1 and told <= set(start["seconds"])
    assert start["seconds"]["imports"] > 0.5
