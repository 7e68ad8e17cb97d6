"""Try mutants of a room for some minutes, then list the survivors and say how many were killed. The
same command goes on where the last one stopped."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from math import sqrt
from pathlib import Path

import yaml

from .generated import NO_TEST, TIMED_OUT, Mutant, mutants

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
WORK = ROOT / ".mutants"  # git ignores it
# Which tests are asked: those of the room and those of its nearest users. Of these, each mutant
# meets the ones that call its function.
READERS_OF_RECORDS = (
    *("increments", "listing", "next_step", "partial", "precision", "repair", "retry"),
    "reuse_of_rows",
)
USERS_OF_STORES = (
    "doctor/test_stores.py",
    "job/test_clouds_of_jobs.py",
    "publish/test_publish_clouds.py",
    "result/test_reap.py",
    "runs/test_listing.py",
    "security/test_node_cache.py",
    "security/test_private_files.py",
    "security/test_redirects.py",
    "stages/test_image_fetch.py",
)
USERS_OF_THE_DRIVER = (
    "attempts",
    "attempts_seconds",
    "code_version",
    "drain",
    "next_step",
    "repair",
)
# Four minutes on a shared core. Left out are tests with servers of models or killed processes, and
# the largest files.
QUICK_RUNS = (
    *("arrangement", "attempts", "attempts_seconds", "cascade", "code_version", "drain"),
    *("increments", "increments_of_images", "listing", "min_rows", "next_step", "open_run"),
    *("partial", "precision", "repair", "resolved", "reuse_of_rows", "run_words"),
    "typed_answers_runs",
)
TESTS = {
    "ledger": [
        *("tests/ledger", "tests/plan", "tests/result", "tests/publish"),
        "tests/flow/test_completion.py",
        *(f"tests/runs/test_{name}.py" for name in READERS_OF_RECORDS),
    ],
    "storage": ["tests/storage", "tests/source", *(f"tests/{name}" for name in USERS_OF_STORES)],
    "driver": [
        *("tests/driver", "tests/ledger", "tests/remote/test_follower.py"),
        *(f"tests/runs/test_{name}.py" for name in USERS_OF_THE_DRIVER),
    ],
    "publish": ["tests/publish"],
    "runs": [f"tests/runs/test_{name}.py" for name in QUICK_RUNS],
}
# Beside the project's own settings. A mutant that loops is ended by its time, not by pytest's.
SETTINGS = """
[tool.mutmut]
source_paths = ["prefect_raybatch"]
only_mutate = ["prefect_raybatch/{room}/*"]
also_copy = {also_copy}
process_isolation = "forkserver"
timeout_constant = 10.0
timeout_multiplier = 5.0
track_dependencies = false
use_git_change_detection = false
on_dependency_change = "ignore"
pytest_add_cli_args = ["-m", "not e2e and not whole", "-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("room", choices=sorted(TESTS))
    parser.add_argument("--sample", type=sample_size, help="this many mutants; default: all")
    parser.add_argument("--seed", default="0", help="which ones")
    parser.add_argument("--minutes", type=float, default=20, help="of this chunk")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="try the survivors once more")
    args = parser.parse_args()
    copy = copied(args.room)
    inside(copy)
    chosen = sample(mutants(copy, args.room), args.sample, args.seed)
    known = equivalent()
    names = [
        mutant.name
        for mutant in chosen
        if mutant.exit_code is None or (args.again and mutant.survived and mutant.key not in known)
    ]
    if names:
        inside(copy, str(args.minutes), str(args.processes), *names)
    print(described(sample(mutants(copy, args.room), args.sample, args.seed), known))
    return 0


def sample_size(text: str) -> int | None:
    return None if text == "all" else int(text)


def copied(room: str) -> Path:
    """Return the room's copy of the project, brought up to date; what did not change keeps its
    time, by which mutmut knows which verdicts still hold."""
    copy = WORK / room
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
    files = {name for name in names if name and (ROOT / name).is_file()}
    for name in files - {"pyproject.toml"}:
        _write(copy / name, (ROOT / name).read_bytes())
    top = sorted({name.split("/")[0] for name in files} - {"prefect_raybatch", "tests"})
    settings = SETTINGS.format(room=room, also_copy=[*top, "tests"], tests=TESTS[room])
    _write(copy / "pyproject.toml", (ROOT / "pyproject.toml").read_bytes() + settings.encode())
    for folder in (copy, copy / "mutants"):  # what the project has no more
        for path in [*folder.glob("prefect_raybatch/**/*.py"), *folder.glob("tests/**/*.py")]:
            if str(path.relative_to(folder)) not in files:
                path.unlink()
                Path(f"{path}.meta").unlink(missing_ok=True)
    return copy


def _write(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def sample(candidates: Sequence[Mutant], size: int | None, seed: str) -> list[Mutant]:
    """Return the mutants that count, or that many of them. An edit of one function leaves the
    choice in the others as it is."""

    def turn(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    counting = (mutant for mutant in sorted(candidates, key=turn) if mutant.change.rule is None)
    return list(islice(counting, size))


def inside(copy: Path, *arguments: str) -> None:
    """Run mutmut's steps in the room's copy, its output in a file."""
    # Of killed tests. Jobs of the tests may write here: see `write` in tests/data/policy.yaml.
    temporary = copy / "mutants/tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # The tests import the copy, and so do the processes that they start.
    path = os.pathsep.join(map(str, [copy / "mutants", WORK / "tools"]))
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}
    command = [sys.executable, str(Path(__file__).with_name("inside.py")), *arguments]
    log = copy / "mutmut.log"
    with log.open("w") as output:
        done = subprocess.run(command, cwd=copy, env=environment, stdout=output, stderr=output)
    shutil.rmtree(temporary, ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"mutmut ended with {done.returncode}; its output: {log}")


def equivalent() -> dict[tuple[str, str, str, str], str]:
    """Return the mutants that behave as the code does, each with the reason."""
    entries = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    return {
        (entry["file"], entry["function"], entry["before"], entry["after"]): entry["reason"]
        for entry in entries
    }


def interval(killed: int, tried: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the share that is killed."""
    if not tried:
        return 0.0, 1.0
    share, z = killed / tried, 1.96
    middle = share + z * z / (2 * tried)
    half = z * sqrt(share * (1 - share) / tried + (z / (2 * tried)) ** 2)
    return (middle - half) / (1 + z * z / tried), (middle + half) / (1 + z * z / tried)


def described(chosen: Sequence[Mutant], known: dict[tuple[str, str, str, str], str]) -> str:
    """Return the score and a paragraph for each survivor."""
    same = [mutant for mutant in chosen if mutant.survived and mutant.key in known]
    survivors = [mutant for mutant in chosen if mutant.survived and mutant.key not in known]
    killed = sum(mutant.killed for mutant in chosen)
    tried = killed + len(survivors)
    share, (low, high) = killed / max(tried, 1), interval(killed, tried)
    listed = [
        f"{m.path}:{m.line} {m.function}{' (no test)' if m.exit_code == NO_TEST else ''}\n"
        f"  - {m.change.texts[0]}\n  + {m.change.texts[1]}"
        for m in sorted(survivors, key=lambda m: (m.path, m.line))
    ]
    timed_out = sum(m.exit_code in TIMED_OUT for m in chosen)
    score = (
        f"killed {killed} of {tried} ({share:.1%}; 95 % interval {low:.1%} to {high:.1%}), "
        f"{timed_out} of them by the time limit; "
        f"equivalent {len(same)}; not tried yet {sum(m.exit_code is None for m in chosen)}"
    )
    return "\n".join([*listed, score])
