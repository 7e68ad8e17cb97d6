"""All variants of the model, by the explorer and by TLC. Status 1 where what should hold does not,
or where the two differ in a verdict, in the number of states or in the steps to a fault.

python -m model        (with tests/ on PYTHONPATH; or `make chaos`)
"""

from __future__ import annotations

import sys

from . import tlc
from .variants import RETRIES, VARIANTS


def main() -> int:
    wrong = 0
    for variant in (*VARIANTS, *RETRIES):
        found = variant.explored()
        print(f"{variant.name}: {found}, {found.depth} steps deep", flush=True)
        wrong += set(found.faults) != set(variant.faults)
        told: list[tlc.Told] = []
        for difference in tlc.differences(variant, found, told):
            wrong += 1
            print(f"  {difference}", flush=True)
        print(f"  TLC: {_words(told)}", flush=True)
    return 1 if wrong else 0


def _words(told: list[tlc.Told]) -> str:
    """The first is of what should hold, in all states; the others of what should not."""
    whole = told[0]
    texts = [f"{whole.states:,} states, {whole.steps} steps deep, {whole.seconds} s"]
    return "; ".join(
        texts + [f"{one.violated} violated in {one.steps} steps" for one in told if one.violated]
    )


if __name__ == "__main__":
    sys.exit(main())
