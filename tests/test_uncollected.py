from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from prefect_raybatch.uncollected import import_all


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules; each notes whether garbage is collected."""
    for name in ("first_of_three", "second_of_three", "third_of_three"):
        fails = "\n1 / 0" if name.startswith("second") else ""
        (tmp_path / f"{name}.py").write_text(f"import gc\ncollects = gc.isenabled(){fails}")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


NAMES = ("first_of_three", "second_of_three", "third_of_three")


def imported() -> list[str]:
    return [name for name in NAMES if name in sys.modules]


def test_all_modules_but_those_that_fail_are_imported_without_collecting_garbage(
    modules: Path,
) -> None:
    frozen = gc.get_freeze_count()
    import_all(NAMES)
    assert gc.get_freeze_count() == frozen, "what a user of this process drops could not be freed"
    assert imported() == ["first_of_three", "third_of_three"]
    assert not sys.modules["third_of_three"].collects
    assert gc.isenabled()


def test_imports_stop_when_told(modules: Path) -> None:
    import_all(NAMES, stop=lambda: "first_of_three" in sys.modules)
    assert imported() == ["first_of_three"]
    assert gc.isenabled()
