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
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.environ import clean
from s3server import S3Server, start_s3

from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import companies, write_customers
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import Store, open_store

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent
SEED = int(os.environ.get("RAYBATCH_SEED", random.SystemRandom().randrange(10**6)))
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose Prefect has a database of its own."""
    home = tmp_path_factory.mktemp("prefect")
    return {
        **clean(),
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # This package, and the user functions below, on driver and workers.
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with start_s3(tmp_path_factory.mktemp("s3")) as server:
        print(f"S3 server: {server.kind}")
        server.create_bucket("raybatch")
        yield server


def call(*args: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "raybatch"), *args],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=540,
    )


def job_file(folder: Path, name: str = "job.yaml", **groups: dict) -> str:
    job = {
        "name": "industries",
        "source": {"uri": "customers.csv", "rows_per_shard": 150},
        "prompt": {"system": SYSTEM, "template": TEMPLATE},
        "sampling": {"temperature": 0, "max_tokens": 16, "choice": list(LABELS)},
        "engine": {"model": "demo", "max_model_len": 256},
        "output": {"uri": "out", "column": "industry"},
    }
    for group, fields in groups.items():
        merged = {**job.get(group, {}), **fields}
        job[group] = {k: v for k, v in merged.items() if v is not None}
    (folder / name).write_text(yaml.safe_dump(job))
    return name


def engines() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name", "cmdline", "status"]):
        text = " ".join(process.info["cmdline"] or []) + (process.info["name"] or "")
        if "VLLM::" in text and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_demo_runs_and_is_done_the_second_time(tmp_path: Path, env: dict[str, str]) -> None:
    first = call("demo", "--rows", "600", env=env, cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "600 = 600 answered" in first.stdout
    assert "First rows" in first.stdout and "prefect server start" in first.stdout
    assert "rows/s" in first.stderr and "left" in first.stderr
    run = tmp_path / "raybatch-demo/out/demo-600-7"
    table = pq.read_table(run / "data")
    truth = companies(600, 7, "all")
    assert table["_row"].to_pylist() == list(range(600))
    assert table["Company"].to_pylist() == [name for name, _ in truth]
    assert table.column_names[:3] == ["Index", "Customer Id", "First Name"]
    right = sum(a == b for a, (_, b) in zip(table["industry"].to_pylist(), truth, strict=True))
    assert right >= 0.95 * 600
    assert (run / "_SUCCESS").exists() and not list((run / "_raybatch").glob("pieces/*"))

    artifacts = subprocess.run(
        [str(BIN / "prefect"), "artifact", "ls"],
        env={**env, "COLUMNS": "300"},
        capture_output=True,
        text=True,
    ).stdout
    for kind in ("progress", "stages", "report"):
        assert f"raybatch-demo-600-7-{kind}" in artifacts

    sessions = set(Path("/tmp/ray").glob("session_2*"))
    plain = call("demo", "--rows", "600", "--json", env=env, cwd=tmp_path)
    assert json.loads(plain.stdout)["good"] == 600
    again = call("demo", "--rows", "600", env=env, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "finished already" in again.stdout
    assert "starting" not in again.stderr
    assert set(Path("/tmp/ray").glob("session_2*")) <= sessions


def start(args: list[str], env: dict[str, str], cwd: Path) -> subprocess.Popen[bytes]:
    log = (cwd / "log.txt").open("ab")
    return subprocess.Popen(
        [str(BIN / "raybatch"), *args],
        env=env,
        cwd=cwd,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def commits(store: Store) -> dict[str, bytes]:
    return {info.path: store.read(info.path) for info in store.list("_raybatch/commits")}


def kill_after(process: subprocess.Popen[bytes], store: Store, more: int, wait: float) -> int:
    """SIGKILLs the process group once `more` further shards are committed and `wait` s passed."""
    before = len(list(store.list("_raybatch/commits")))
    deadline = time.time() + 300
    while len(list(store.list("_raybatch/commits"))) < before + more:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.time() < deadline, "no commit came"
        time.sleep(0.1)
    time.sleep(wait)
    assert process.poll() is None, "the run ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return len(list(store.list("_raybatch/commits")))


def gone(seconds: float = 30) -> list[psutil.Process]:
    deadline = time.time() + seconds
    while engines() and time.time() < deadline:
        time.sleep(0.5)
    return engines()


@pytest.mark.parametrize("place", ["local", "s3"])
def test_killed_twice_and_resumed(
    place: str, tmp_path: Path, env: dict[str, str], request: pytest.FixtureRequest
) -> None:
    rows, draw = 4500, random.Random(f"{SEED}-{place}")
    print(f"RAYBATCH_SEED={SEED}")
    write_customers(tmp_path / "customers.csv", rows, 3)
    prefect = ["--prefect"] if place == "local" else ["--no-prefect"]
    if place == "s3":
        server: S3Server = request.getfixturevalue("s3")
        env = {**env, **server.env}
        os_env = server.env
        out = "s3://raybatch/out"
        upload = open_store("s3://raybatch/in", server.options)
        upload.put("customers.csv", (tmp_path / "customers.csv").read_bytes())
        job = job_file(tmp_path, source={"uri": "s3://raybatch/in"}, output={"uri": out})
        store = open_store(f"{out}/k", server.options)
    else:
        os_env, out = {}, str(tmp_path / "out")
        job = job_file(tmp_path)
        store = open_store(f"{out}/k")
    args = ["run", job, "--run-key", "k", *prefect]

    seen: dict[str, bytes] = {}
    for _ in range(2):
        process = start(args, env, tmp_path)
        kill_after(process, store, draw.randint(1, 8), draw.random() * 2)
        assert gone() == [], "engine processes outlived their driver"
        now = commits(store)
        assert {path: now[path] for path in seen} == seen, "a commit was changed or lost"
        assert not (tmp_path / "out/k/_SUCCESS").exists()
        seen = now
    assert 0 < len(seen) < 30

    status = json.loads(call("status", store.uri, "--json", env=env, cwd=tmp_path).stdout)
    assert status["committed"] == len(seen) and status["pending"] == 30 - len(seen)

    last = call(*args, "--json", env=env, cwd=tmp_path)
    assert last.returncode == 0, last.stdout + last.stderr
    report = json.loads(last.stdout.splitlines()[-1])
    assert report["resumed_shards"] == len(seen)  # only what was not committed ran again
    assert (report["good"], report["failed"], report["skipped"]) == (rows, 0, 0)
    assert {path: commits(store)[path] for path in seen} == seen

    proof = call("verify", store.uri, "--json", env={**env, **os_env}, cwd=tmp_path)
    assert proof.returncode == 0, proof.stdout
    assert json.loads(proof.stdout)["data"] == rows
    table = read_all(store, report)
    assert table["_row"].to_pylist() == list(range(rows))
    truth = companies(rows, 3, "all")
    assert table["Company"].to_pylist() == [name for name, _ in truth]
    right = sum(a == b for a, (_, b) in zip(table["industry"].to_pylist(), truth, strict=True))
    assert right >= 0.95 * rows


def test_a_core_that_is_stopped_for_ever_is_ended_and_its_rows_run_again(
    tmp_path: Path, env: dict[str, str]
) -> None:
    rows = 4500
    write_customers(tmp_path / "customers.csv", rows, 3)
    job = job_file(
        tmp_path,
        engine={"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
        limits={"hang_seconds": 30, "max_failed": 0},
    )
    store = open_store(str(tmp_path / "out/k"))
    process = start(["run", job, "--run-key", "k", "--no-prefect"], env, tmp_path)
    try:
        deadline = time.time() + 300
        while not (before := commits(store)):
            assert process.poll() is None and time.time() < deadline
            time.sleep(0.1)
        below = psutil.Process(process.pid).children(recursive=True)
        titled = [p for p in below if "VLLM::EngineCore" in " ".join(p.cmdline()) + p.name()]
        (core,) = (p for p in titled if p.ppid() not in {other.pid for other in titled})
        core.suspend()
        stopped = time.time()
        assert process.wait(500) == 0, (tmp_path / "log.txt").read_text()[-3000:]
        print(
            f"stopped at {len(before)} commits, the run went on for {time.time() - stopped:.0f} s"
        )
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not core.is_running()
    assert "EngineDied: hung: no step returned for 30 s" in (tmp_path / "log.txt").read_text()
    report = json.loads(store.read("_raybatch/report.json"))
    assert report["engine_deaths"] >= 1 and (report["good"], report["failed"]) == (rows, 0)
    table = read_all(store, report)
    assert table["_row"].to_pylist() == list(range(rows))
    truth = companies(rows, 3, "all")
    assert table["Company"].to_pylist() == [name for name, _ in truth]
    assert (
        json.loads(call("verify", store.uri, "--json", env=env, cwd=tmp_path).stdout)["data"]
        == rows
    )


def read_all(store: Store, report: dict) -> pa.Table:
    tables = []
    for part in report["parts"]:
        with store.open(part["path"]) as stream:
            tables.append(pq.read_table(stream))
    return pa.concat_tables(tables)


def test_failed_rows_go_to_quarantine_and_the_budget_holds(
    tmp_path: Path, env: dict[str, str]
) -> None:
    names = [name for name, _ in companies(600, 5, "all")]
    long, template, post = {7, 300}, {20, 21, 599}, {100}
    table = pa.table({"id": list(range(600)), "Company": names})
    table = table.append_column(
        "note",
        pa.array(
            ["word " * 400 if i in long else "raise" if i in template else None for i in range(600)]
        ),
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=100)
    job = job_file(
        tmp_path,
        source={"uri": "in.parquet"},
        prompt={"function": "e2e_functions:ask", "template": None, "system": None},
        output={"postprocess": "e2e_functions:shape", "columns": ["id"]},
        limits={"max_failed": 2},
    )
    first = call("run", job, "--run-key", "q", "--no-prefect", env=env, cwd=tmp_path)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "ErrorBudgetExceeded" in first.stderr and "limits.max_failed 2" in first.stderr
    assert "Traceback" not in first.stderr
    store = open_store(str(tmp_path / "out/q"))
    kept = commits(store)
    assert not (tmp_path / "out/q/_SUCCESS").exists()

    more = call(
        "run",
        job,
        "--run-key",
        "q",
        "--set",
        "limits.max_failed=0.02",
        "--no-prefect",
        "--json",
        env=env,
        cwd=tmp_path,
    )
    assert more.returncode == 0, more.stdout + more.stderr
    report = json.loads(more.stdout.splitlines()[-1])
    assert (report["good"], report["failed"], report["skipped"]) == (592, 6, 2)
    assert {path: commits(store)[path] for path in kept} == kept
    failed = pq.read_table(tmp_path / "out/q/quarantine").to_pylist()
    assert {row["_row"]: (row["stage"], row["error"]) for row in failed} == {
        **{i: ("prepare", "PromptTooLong") for i in long},
        **{i: ("prepare", "ValueError") for i in template},
        **{i: ("postprocess", "RuntimeError") for i in post},
    }
    by_row = {row["_row"]: row["input"] for row in failed}
    assert by_row[20] == {"id": 20, "Company": names[20], "note": "raise"}
    data = pq.read_table(tmp_path / "out/q/data")
    assert set(data.column_names) == {"id", "industry", "length", "_row"}
    assert sorted(set(range(600)) - set(data["id"].to_pylist())) == sorted(
        long | template | post | {40, 41}
    )
    proof = call("verify", "out/q", env=env, cwd=tmp_path)
    assert proof.returncode == 0, proof.stdout


def test_the_stage_of_ray_data_llm_keeps_the_contract(tmp_path: Path, env: dict[str, str]) -> None:
    names = [name for name, _ in companies(500, 5, "all")]
    note = ["word " * 400 if i == 7 else "raise" if i in {20, 499} else None for i in range(500)]
    table = pa.table({"id": pa.array(range(500), pa.int16()), "Company": names, "note": note})
    pq.write_table(table, tmp_path / "in.parquet")
    job = job_file(
        tmp_path,
        source={"uri": "in.parquet"},  # four shards, the last one smaller
        prompt={"function": "e2e_functions:ask", "template": None, "system": None},
        limits={"max_failed": 3},
    )
    ray_llm = ["--set", "engine.stage=ray.data.llm"]
    done = call(
        "run", job, "--run-key", "r", *ray_llm, "--no-prefect", "--json", env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    own = call("run", job, "--run-key", "own", "--no-prefect", env=env, cwd=tmp_path)
    assert own.returncode == 0, own.stdout + own.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["good"], report["failed"], report["shards"]) == (497, 3, 4)
    tokens = report["tokens"]
    assert tokens["prompt_tokens"] > 0 and tokens["output_tokens"] > 0
    for part in ("data", "quarantine"):
        ours, theirs = (pq.read_table(tmp_path / f"out/{key}/{part}") for key in ("own", "r"))
        assert ours.equals(theirs), part
    assert call("verify", "out/r", env=env, cwd=tmp_path).returncode == 0


def test_another_job_is_refused_with_the_difference(tmp_path: Path, env: dict[str, str]) -> None:
    write_customers(tmp_path / "customers.csv", 50, 3)
    job = job_file(tmp_path)
    from prefect_raybatch.job.batch_job import BatchJob
    from prefect_raybatch.runs.plan_run import plan_run

    loaded = BatchJob.from_dict(
        {
            **yaml.safe_load((tmp_path / job).read_text()),
            "source": {"uri": str(tmp_path / "customers.csv")},
            "output": {"uri": str(tmp_path / "out"), "column": "industry"},
        }
    )
    plan_run(loaded, "k")
    other = job_file(
        tmp_path,
        source={"uri": str(tmp_path / "customers.csv")},
        sampling={"max_tokens": 99},
    )
    found = call("run", other, "--run-key", "k", env=env, cwd=tmp_path)
    assert found.returncode == 2
    assert "sampling.max_tokens: 16 -> 99" in found.stderr
    assert "starting engines" not in found.stderr


def test_tasks_compose_into_a_flow_of_your_own(tmp_path: Path, env: dict[str, str]) -> None:
    """Through a real Prefect server: the example flow, its artifacts and its logs."""
    code = (
        "import json, sys, time; sys.path.insert(0, 'flows')\n"
        "from extract_infer_load import extract_infer_load\n"
        "from prefect.client.orchestration import get_client\n"
        "from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter\n"
        "from prefect.client.schemas.filters import LogFilterFlowRunId\n"
        f"state = extract_infer_load({str(tmp_path)!r}, 300, return_state=True)\n"
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
        "print(json.dumps({'counts': state.result(), 'state': run.state_name,\n"
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


def test_a_saved_block_is_triggered_waited_for_and_fetched(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """A block in the server, its flow run in a process of its own, the real engine."""
    write_customers(tmp_path / "customers.csv", 200)
    path = tmp_path / job_file(
        tmp_path,
        source={"uri": str(tmp_path / "customers.csv")},
        output={"uri": str(tmp_path / "out")},
    )
    code = (
        "import json\n"
        "from prefect_raybatch import BatchJob\n"
        "from prefect_raybatch.blocks import BatchInferenceJob\n"
        f"BatchInferenceJob(job=BatchJob.from_yaml({str(path)!r})).save('nightly')\n"
        "run = BatchInferenceJob.load('nightly').trigger('monday')\n"
        "run.wait_for_completion()\n"
        "report = run.fetch_result()\n"
        "print(json.dumps([run.run_key, report.state, report.rows, report.good, report.run]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    key, state, rows, good, run = json.loads(done.stdout.splitlines()[-1])
    assert (key, state, rows, good) == ("monday", "completed", 200, 200)
    assert verify(open_store(run)).ok
