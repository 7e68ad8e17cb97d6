"""`python -m notebooks`: run the notebooks and write their outputs anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat

from notebooks import NOTEBOOKS, executed, without_noise

FOLDER = Path("/tmp/raybatch-notebook")  # so that outputs name no folder of this machine

for path in NOTEBOOKS:
    FOLDER.mkdir()
    try:
        nbformat.write(without_noise(executed(path, FOLDER)), path)
    finally:
        shutil.rmtree(FOLDER)
    print(f"wrote {path}")
