"""`python -m notebooks [NAME ...]`: run notebooks, by default all; write their outputs anew."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nbformat

from notebooks import NOTEBOOKS, executed, without_noise

FOLDER = Path("/tmp/raybatch-notebook")  # so that outputs name no folder of this machine

for path in NOTEBOOKS:
    if path.stem not in (sys.argv[1:] or [path.stem]):
        continue
    FOLDER.mkdir()
    try:
        nbformat.write(without_noise(executed(path, FOLDER)), path)
    finally:
        shutil.rmtree(FOLDER)
    print(f"wrote {path}")
