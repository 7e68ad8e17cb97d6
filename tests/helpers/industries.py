"""An engine in this process that answers as the bundled model does: the industry of the company
that a prompt asks about. `stand_in` puts it in the place of Ray and vLLM, in runs and previews."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from tour import TOUR_PAGE

from prefect_raybatch import api
from prefect_raybatch.cli import drive
from prefect_raybatch.cli.commands import main
from prefect_raybatch.demo.customers import companies, write_customers
from prefect_raybatch.ledger.records import Receipt
from prefect_raybatch.model.pinned import tokenizer_place
from prefect_raybatch.stages.block import load_tokenizer
from prefect_raybatch.stages.columns import ERROR, TOKENS
from prefect_raybatch.stages.engine import EngineLaunch

from .engines import with_answers
from .nights import Nights
from .pages import ROOT as PAGES_ROOT
from .pages import blocks
from .without_ray import outside_ray

ROWS = 900  # three shards


class PowerCut(BaseException):
    """What nothing catches."""


TRUTH = dict(companies(ROWS, 7, "all"))


def answer(prompt: str) -> str:
    name = prompt.partition("company in: ")[2].split("\n")[0].strip()
    return TRUTH.get(name, "Other")


class Industries(Nights):
    """Answers with the industry of the company that is asked about; dies when it is told to."""

    def answer(self, prompt: str) -> str:
        return answer(prompt)

    def heard(self, table: pa.Table) -> Iterator[Receipt]:
        try:
            yield from super().heard(table)
        except Exception as cut:
            raise PowerCut from cut


class Shown:
    """Takes the engine stage's place in a preview."""

    def __init__(self, launch: EngineLaunch) -> None:
        self.tokenizer = load_tokenizer(*tokenizer_place(launch.model))

    def __call__(self, table: pa.Table) -> pa.Table:
        prompts = self.tokenizer.batch_decode(table[TOKENS].to_pylist(), skip_special_tokens=True)
        return with_answers(table, table[ERROR].to_pylist(), list(map(answer, prompts)))

    def close(self) -> None:
        """Nothing is held."""


def stand_in(folder: Path, patch: pytest.MonkeyPatch) -> Industries:
    made = Industries(folder)
    outside_ray(patch)
    patch.setattr("prefect_raybatch.api.submission.infer_run", made.infer)
    patch.setattr(ray, "init", lambda **options: None)
    patch.setattr(ray, "shutdown", lambda: None)
    patch.setattr(drive, "quiet_engine", lambda: None)
    # Commands about waiting engines leave those of this machine's user alone.
    patch.setattr("prefect_raybatch.standby.claim.KEEPER_FOLDER", "raybatch-no-engines")
    patch.setattr(api, "preview_rows", partial(api.preview_rows, engine=Shown))
    return made


def finished_night(folder: Path) -> Path:
    """Make a folder with a table, the job of the first tutorial and a finished run of it with one
    failed row; return the folder."""
    write_customers(folder / "customers.csv", 40, 7)
    with (folder / "customers.csv").open("a") as file:
        file.write("41,,,," + "word " * 400 + ",,,,,,\n")
    tour = TOUR_PAGE.read_text(encoding="utf-8")
    job = next(block.text for block in blocks(tour) if block.language == "yaml")
    for name in ("job.yaml", "companies.yaml"):  # the README's name for it
        (folder / name).write_text(job)
    (folder / "flows").symlink_to(PAGES_ROOT / "flows")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(folder, patch)
        patch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main(["run", "job.yaml", "--run-key", "monday", "--no-prefect", "--json"])
        assert not ended.value.code
    return folder
