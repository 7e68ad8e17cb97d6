"""Install the system programs that the tests need, or say which command does.

    python tests/programs.py [--tier test] [--without browser,ceph]

`make test` and `make test-all` run this before anything else, with the Python of the machine: it
imports nothing from outside the standard library. Installing needs apt-get and root, or sudo
without a password. Where that is not possible it exits with 1 and prints the command for somebody
who may.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

WITHOUT = "RAYBATCH_TEST_WITHOUT"  # names of PROGRAMS, with commas: their tests are skipped


@dataclass(frozen=True, kw_only=True)
class Program:
    """One thing the tests need: `names` are looked up on PATH, `packages` are Debian's.

    `any_name` says that one of the names is enough. `libraries` are shared libraries that it needs
    and that a minimal system lacks. `npm` is the package of npm that brings it, once Debian's are
    there.
    """

    title: str
    names: tuple[str, ...]
    packages: tuple[str, ...]
    any_name: bool = False
    libraries: tuple[str, ...] = ()
    npm: str = ""

    def missing_packages(self) -> tuple[str, ...]:
        """Return Debian's packages to install; npm from elsewhere conflicts with Debian's."""
        return () if self.npm and shutil.which("npm") else self.packages

    def is_installed(self) -> bool:
        paths = [shutil.which(name) for name in self.names]
        found = any(paths) if self.any_name else all(paths)
        return found and all(map(_can_load, self.libraries)) and not self._is_outdated()

    def _is_outdated(self) -> bool:
        """Return whether the program is of an older version than `npm` names."""
        name, _, wanted = self.npm.rpartition("@")
        for folder in Path(os.path.realpath(shutil.which(self.names[0]) or "/")).parents:
            if name and (folder.name, folder.parent.name) == (name, "node_modules"):
                version = json.loads((folder / "package.json").read_text())["version"]
                return _numbers(version) < _numbers(wanted)
        return False


PROGRAMS: Mapping[str, Program] = {
    "browser": Program(
        title="Chromium, for the tests of pages",
        names=("chromium", "chromium-browser", "google-chrome"),
        packages=("chromium", "libatomic1"),
        any_name=True,
        libraries=("libatomic.so.1",),  # of the Node.js that comes with Playwright
    ),
    "ceph": Program(
        title="Ceph's radosgw, the S3 server of the tests",
        names=("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "setpriv"),
        packages=("radosgw", "ceph-mon", "ceph-osd", "util-linux"),
    ),
    "azurite": Program(
        title="Azurite, the Azure server of the tests",
        names=("azurite-blob",),
        packages=("npm",),
        npm="azurite@3.37.0",
    ),
}

TIERS = {"test": ("ceph",), "all": tuple(PROGRAMS)}  # what the tests of `make test` and -all need


def left_out() -> list[str]:
    """Return the programs whose tests are to be skipped, by the environment. SystemExit if one of
    them is unknown."""
    return _parse(os.environ.get(WITHOUT, ""))


def require(name: str) -> None:
    """Skip the calling test if `name` is left out, and fail it if `name` is not installed."""
    import pytest

    if name in left_out():
        pytest.skip(f"left out by WITHOUT={name}")
    if not PROGRAMS[name].is_installed():
        pytest.fail(
            f"{PROGRAMS[name].title}: not installed, or too old. Run: python tests/programs.py"
        )


def install(without: Iterable[str] = (), tier: str = "all") -> int:
    """Install what the tier needs and is missing; return 0 if all is there then, 1 if not."""
    wanted = [name for name in TIERS[tier] if name not in without]
    missing = [name for name in wanted if not PROGRAMS[name].is_installed()]
    if not missing:
        return 0
    titles = "; ".join(PROGRAMS[name].title for name in missing)
    packages = [package for name in missing for package in PROGRAMS[name].missing_packages()]
    apt = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    prefix = _privilege()
    if prefix is None or not shutil.which("apt-get"):
        print(f"Missing: {titles}.")
        if shutil.which("apt-get"):
            if packages:
                print(f"Run: sudo apt-get update && sudo {' '.join(apt)}")
            for package in filter(None, (PROGRAMS[name].npm for name in missing)):
                print(f"Run: sudo {' '.join(_npm(package))}")
        else:
            commands = ", ".join(name for key in missing for name in PROGRAMS[key].names)
            print(f"Install the packages of your system that have these programs: {commands}")
        command = "make test" if tier == "test" else "make test-all"
        print(f"Or leave these tests out: {command} WITHOUT={','.join(missing)}")
        return 1
    names = [*packages, *filter(None, (PROGRAMS[name].npm for name in missing))]
    print(f"Installing {titles} ({' '.join(names)})", flush=True)
    for command in (["apt-get", "update", "-q"], apt) if packages else ():
        ended = subprocess.run(
            [*prefix, "/usr/bin/env", "DEBIAN_FRONTEND=noninteractive", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if ended.returncode and command is apt:
            print(f"{ended.stdout[-2000:]}\n{' '.join(command)} failed, see above.")
            return 1
    for name in missing:
        if (package := PROGRAMS[name].npm) and shutil.which("npm"):
            subprocess.run([*prefix, *_npm(package)])
    if missing := [name for name in wanted if not PROGRAMS[name].is_installed()]:
        print(f"Still missing after the installation: {', '.join(missing)}")
        return 1
    return 0


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.partition("-")[0].split(".")]


def _npm(package: str) -> list[str]:
    return ["npm", "install", "--global", "--no-audit", "--no-fund", package]


def _privilege() -> list[str] | None:
    """Return what to put before a command that needs root, or None if root is not to be had."""
    if os.geteuid() == 0:
        return []
    if not shutil.which("sudo"):
        return None
    asked = subprocess.run(["sudo", "-n", "true"], capture_output=True)
    return ["sudo", "-n"] if asked.returncode == 0 else None


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _parse(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PROGRAMS]:
        known = ", ".join(PROGRAMS)
        raise SystemExit(f"WITHOUT: {', '.join(unknown)} is not known. Choose from: {known}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without", default="", metavar="NAMES", help=", ".join(PROGRAMS))
    parser.add_argument("--tier", default="all", choices=TIERS, help="of which tests")
    given = parser.parse_args()
    without = _parse(given.without)
    if without and os.environ.get("CI", "").lower() in ("1", "true"):
        print("CI=true: no tests can be left out. Remove WITHOUT.")
        return 1
    return install(without, given.tier)


if __name__ == "__main__":
    sys.exit(main())
