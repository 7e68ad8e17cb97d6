"""`python -m prefect_raybatch.cli` is `raybatch`."""

from __future__ import annotations

from prefect_raybatch.cli.commands import main

if __name__ == "__main__":
    main()
