"""Run the command line with `python -m prefect_raybatch.cli`."""

from __future__ import annotations

from prefect_raybatch.cli.commands import main

if __name__ == "__main__":
    main()
