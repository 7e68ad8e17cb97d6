"""All variants of the model: by the explorer and, where Java is and TLA2TOOLS names
tla2tools.jar, by TLC as well. Status 1 where what should hold does not, or TLC disagrees.

TLA2TOOLS=/path/to/tla2tools.jar python -m model        (with tests/ on PYTHONPATH; or `make chaos`)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .explorer import Explored
from .variants import RETRIES, VARIANTS, Variant

HERE = Path(__file__).parent


def main() -> int:
    wrong = 0
    jar = os.environ.get("TLA2TOOLS", "")
    java = shutil.which("java") if Path(jar).is_file() else None
    for variant in (*VARIANTS, *RETRIES):
        found = variant.explored()
        wrong += set(found.faults) != set(variant.faults)
        print(f"{variant.name}: {found}", flush=True)
        if java is not None:
            wrong += not _tlc_agrees(java, jar, variant, found)
    if java is None:
        print("TLC did not look: there is no java, or TLA2TOOLS does not name tla2tools.jar")
    return 1 if wrong else 0


def _tlc_agrees(java: str, jar: str, variant: Variant, found: Explored) -> bool:
    """Whether TLC finds the module sound where the explorer does, and broken where it does."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(HERE / f"{variant.module}.tla", folder)
        text = (HERE / f"{variant.module}.cfg").read_text(encoding="utf-8")
        for name, value in variant.constants().items():
            lines = text.splitlines()
            text = "\n".join(f"  {name} = {value}" if f" {name} =" in ln else ln for ln in lines)
        Path(folder, f"{variant.module}.cfg").write_text(text + "\n", encoding="utf-8")
        command = [java, "-cp", jar, "tlc2.TLC", "-workers", "auto", variant.module]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    agrees = (done.returncode == 0) == (not found.faults)
    print(f"  TLC: status {done.returncode}{'' if agrees else ', and disagrees'}", flush=True)
    if not agrees:
        print(done.stdout[-2000:])
    return agrees


if __name__ == "__main__":
    sys.exit(main())
