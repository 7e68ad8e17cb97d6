"""What our plugin does in vLLM's processes: it asks for AMX, where there is any."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_raybatch.stages.vllm import plugin as vllm_plugin

ROOT = Path(__file__).parents[2]
GROUP = "vllm.general_plugins"


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch for CPUs on a CPU with AMX; `asked` counts who asked for it."""
    fake = SimpleNamespace(
        asked=0,
        granted=True,
        version=SimpleNamespace(cuda=None, hip=None),
        cpu=SimpleNamespace(_is_amx_tile_supported=lambda: True),
    )

    def ask() -> bool:
        fake.asked += 1
        return fake.granted

    fake.cpu._init_amx = ask
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_amx_is_asked_for_where_torch_says_that_the_cpu_has_it(torch: SimpleNamespace) -> None:
    vllm_plugin.register()
    vllm_plugin.register()  # vLLM may call it again
    assert torch.asked == 2


@pytest.mark.parametrize(
    "other",
    [
        {"cpu": SimpleNamespace(_is_amx_tile_supported=lambda: False)},
        {"version": SimpleNamespace(cuda="12.9", hip=None)},
        {"version": SimpleNamespace(cuda=None, hip="6.3")},
    ],
    ids=["no AMX", "CUDA", "ROCm"],
)
def test_elsewhere_nothing_is_asked(
    other: dict[str, Any], torch: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in other.items():
        vars(getattr(torch, name)).update(vars(value))
    vllm_plugin.register()
    assert torch.asked == 0 and not caplog.records


@pytest.mark.parametrize("missing", ["_is_amx_tile_supported", "_init_amx"])
def test_a_torch_that_cannot_ask_is_left_alone(torch: SimpleNamespace, missing: str) -> None:
    delattr(torch.cpu, missing)
    vllm_plugin.register()
    assert torch.asked == 0


def test_where_torch_is_not_loaded_it_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    vllm_plugin.register()
    assert "torch" not in sys.modules


def test_a_kernel_that_refuses_is_told(
    torch: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    torch.granted = False
    vllm_plugin.register()
    assert "engine.dtype: float32" in caplog.text


def test_the_torch_that_is_installed_has_what_is_called() -> None:
    torch = pytest.importorskip("torch")
    assert torch.cpu._is_amx_tile_supported() in (True, False)
    assert callable(torch.cpu._init_amx)


def test_the_entry_point_is_registered_and_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = project["entry-points"][GROUP]
    assert list(ours) == [vllm_plugin.PLUGIN]
    (installed,) = entry_points(group=GROUP, name=vllm_plugin.PLUGIN)
    assert installed.value == ours[vllm_plugin.PLUGIN]
    assert installed.load() is vllm_plugin.register


@pytest.mark.parametrize("allowed", [None, "another"])
def test_vllm_calls_it(allowed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a list allows others only, once ours is put into it."""
    plugins = pytest.importorskip("vllm.plugins")
    called: list[str] = []
    monkeypatch.delenv(vllm_plugin.ALLOWED, raising=False)
    if allowed is not None:
        monkeypatch.setenv(vllm_plugin.ALLOWED, allowed)
        vllm_plugin.allow(os.environ)
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.setattr(vllm_plugin, "register", lambda: called.append("us"))
    plugins.load_general_plugins()
    assert called == ["us"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({"VLLM_PLUGINS": ""}, {"VLLM_PLUGINS": "prefect_raybatch"}),
        ({"VLLM_PLUGINS": "a,b"}, {"VLLM_PLUGINS": "a,b,prefect_raybatch"}),
        ({"VLLM_PLUGINS": "prefect_raybatch,a"}, {"VLLM_PLUGINS": "prefect_raybatch,a"}),
    ],
)
def test_a_list_of_allowed_plugins_gets_ours(before: dict[str, str], after: dict[str, str]) -> None:
    vllm_plugin.allow(before)
    assert before == after


def test_importing_it_is_cheap() -> None:
    code = (
        "import sys; import prefect_raybatch.stages.vllm.plugin\n"
        "print([m for m in ('torch', 'vllm', 'pyarrow', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
