"""Ctrl-C in a call of `ask` with real Ray: the same call continues, in this process or another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from helpers.engines import FakeEngine
from helpers.environ import clean, python_path
from helpers.processes import until

from prefect_raybatch import ask_run

TEXTS = ["a", "b", "c", "d", "e", "wait"]
SCRIPT = """
import os, sys
from pathlib import Path
from test_interrupt import answers

folder, again = Path(sys.argv[1]), sys.argv[2] == "here"
try:
    found = answers(folder)
except KeyboardInterrupt as stopped:
    print("interrupted", stopped, flush=True)
    if not again:
        raise
    os.unlink(folder / "gate")
    found = answers(folder)
print(found, flush=True)
"""


class GateEngine(FakeEngine):
    """Answers with the prompt's text, notes it, and waits at the last one while there is a gate."""

    def __call__(self, table: pa.Table) -> pa.Table:
        folder = Path(self.spec.env["GATE"])
        texts = table["text"].to_pylist() if "text" in table.column_names else []
        if "wait" in texts and (folder / "gate").exists():
            (folder / "waits").touch()
            (folder / "gate").read_text()  # a pipe that nobody writes to
        with (folder / "notes").open("a") as file:
            file.write("".join(f"{json.dumps(text)}\n" for text in texts))
        self.texts = texts
        return super().__call__(table)

    def numbers(self, table: pa.Table) -> list[int]:
        return list(range(table.num_rows))

    def text(self, number: int) -> str:
        return f"answer {self.texts[number]}"


def answers(folder: Path) -> list[str]:
    done = ask_run(
        TEXTS,
        "Say {text}",
        model="demo",
        cache=folder / "cache",
        engine=GateEngine,
        settings={
            "source.rows_per_shard": 1,
            "engine.env": {"GATE": str(folder)},
            "cluster.prepare.concurrency": 1,  # each process of Ray imports for itself
        },
    )
    return [row["answer"] for row in done.data]


@pytest.mark.timeout(900)  # a start of Ray, or two
@pytest.mark.whole
@pytest.mark.parametrize(
    "where", [pytest.param("here", marks=pytest.mark.nightly), "another process"]
)
def test_the_same_call_continues_after_ctrl_c(where: str, local_ray: None, tmp_path: Path) -> None:
    """The other process is this one, which has joined a cluster."""
    os.mkfifo(tmp_path / "gate")
    env = {**clean(), "PYTHONPATH": python_path()}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), where]

    def committed() -> int:
        return len(list((tmp_path / "cache").glob("runs/*/*/_raybatch/asks/_raybatch/commits/*")))

    process = subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        until(
            lambda: process.poll() is not None or ((tmp_path / "waits").exists() and committed()),
            180, "a commit before the gate",
        )  # fmt: skip
        before = {json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()}
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert out.startswith("interrupted ask() was stopped. The same call continues"), errors[-3000:]
    if where != "here":
        assert process.returncode, errors[-3000:]
        last = errors.splitlines()[-1]
        assert last.startswith("KeyboardInterrupt: ask() was stopped."), errors[-3000:]
        assert "site-packages" not in errors, errors
        os.unlink(tmp_path / "gate")
        out += str(answers(tmp_path))
    assert out.splitlines()[-1] == str([f"answer {text}" for text in TEXTS]), errors[-3000:]
    asked = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert before and set(asked) == set(TEXTS)
    assert len(asked) < 2 * len(TEXTS) - 1, "committed answers were asked for again"
