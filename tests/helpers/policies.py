"""Policies that tests put in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml


def set_policy(monkeypatch: pytest.MonkeyPatch, folder: Path, **fields: Any) -> Path:
    """Write a policy file into the folder and name it in the environment."""
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    monkeypatch.setenv("RAYBATCH_POLICY", str(path))
    return path
