"""Compare the golden corpus with what the package makes of its jobs now, or make it anew.

With tests/ on PYTHONPATH:

python -m golden           show the differences; status 1 if there are any
python -m golden --write   make the files anew
"""

from __future__ import annotations

import argparse
import sys

from .corpus import REWRITE, difference, differences, texts_now, write_corpus


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the files anew")
    write = parser.parse_args().write
    texts = texts_now()
    if write:
        changed = write_corpus(texts)
        print(*changed, f"{len(changed)} of {len(texts)} files changed", sep="\n")
        return 0
    changed_paths = differences(texts)
    for path in changed_paths:
        print(difference(path, texts[path]), end="\n\n")
    print(f"If that is as meant, run\n  {REWRITE}" if changed_paths else "no difference")
    return 1 if changed_paths else 0


if __name__ == "__main__":
    sys.exit(main())
