"""Functions and pydantic classes of notebook cells, in a real kernel and on Ray's workers."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pyarrow as pa
import pytest
from helpers.engines import FineEngine
from helpers.environ import python_path
from notebooks import executed, results

from prefect_raybatch.model.pinned import tokenizer_place
from prefect_raybatch.stages.block import load_tokenizer
from prefect_raybatch.stages.columns import TOKENS

SETUP = f"""\
import os, sys
os.environ["PYTHONPATH"] = {python_path()!r}
sys.path[:0] = os.environ["PYTHONPATH"].split(":")
import json
from prefect_raybatch import BatchJob, ask_run, open_run
from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.errors import PlanMismatch
from pydantic import BaseModel
from test_kernel import EchoEngine

with open("in.jsonl", "w") as file:
    file.write(json.dumps({{"Company": "Acme"}}))"""
FUNCTION = """\
WORD = "industry"

def helper(text):
    return f"{WORD} of {text}?"

def prompt_of(row):
    return helper(row["Company"])"""
CLASS = """\
class Answer(BaseModel):
    prompt: str"""
JOB = """\
job = BatchJob.from_dict({
    "name": "kernel",
    "source": {"uri": "in.jsonl"},
    "prompt": {"function": prompt_of},
    "engine": {"model": "demo"},
    "output": {"uri": "out", "schema_model": Answer},
})
try:
    run = plan_run(job, "monday")
    report = finalize_run(job, run, infer_run(job, run, engine=EchoEngine))
    print(open_run(report.run).to_pandas()["prompt"][0])
except PlanMismatch as error:
    print(error)"""
ASK = """\
done = ask_run(["Acme"], "Say {text}", model="demo", schema=Answer, engine=EchoEngine)
print(done.run, done.data)"""


class EchoEngine(FineEngine):
    """Answers with the text of the prompt, as a record."""

    def numbers(self, table: pa.Table) -> list[int]:
        self.tokens = table[TOKENS].to_pylist()
        return list(range(table.num_rows))

    def text(self, number: int) -> str:
        text = load_tokenizer(*tokenizer_place(self.spec.model)).decode(self.tokens[number] or [])
        return json.dumps({"prompt": text})


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_functions_and_classes_of_cells_run_on_workers_and_count(tmp_path: Path) -> None:
    other_class = f"{CLASS}\n    size: int = 0"
    cells = [
        *(SETUP, FUNCTION, CLASS, JOB, ASK),
        *('WORD = "country"', JOB),  # the run belongs to the function before
        *('WORD = "industry"', JOB),
        *(ASK, other_class, ASK, JOB),
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = tmp_path / "book.ipynb"
    nbformat.write(book, path)
    first, asked, changed, again, same, other, refused = (
        "".join(texts) for texts in results(executed(path, tmp_path)) if texts
    )
    assert "industry of Acme?" in first and first == again
    assert "prompt.function.source: the code of prompt_of in the notebook" in changed
    assert "--accept" in changed and "country" not in changed
    assert asked == same and "'prompt': " in asked and "Say Acme" in asked
    assert "'size': " in other and other.split()[0] != asked.split()[0]
    assert "output.schema" in refused
