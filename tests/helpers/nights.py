"""Whole runs in this process, of jobs that reuse answers too: the pipeline's own stages, without
Ray, and an engine whose answer follows from the prompt's text alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.cluster import connect, pipeline
from prefect_raybatch.cluster.sharing import ClusterSession
from prefect_raybatch.cluster.warm import WarmEngines
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.model import pinned as models
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.run import Run
from prefect_raybatch.sizing.sizes import Capacity
from prefect_raybatch.stages.block import Failure, Messages, is_passthrough, load_tokenizer
from prefect_raybatch.stages.columns import ERROR, TOKENS
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.vllm.stepper import Completion, Request

from .engines import Stepped, with_answers
from .hosts import FakeHosts
from .small import receipts

CPU = Capacity(2.0, 0.0, 1, "local")


@dataclass
class Nights:
    """Drives runs of a job; `asked` are the prompts that the engine was asked, in order.

    `refuses` says of a prompt whether the engine fails it; `stop_after` ends a night after so many
    receipts, as a kill would. `alive` engines are what Ray says to have. `pipeline` is the class
    of the pipeline, by default `InThisProcess`.
    """

    folder: Path
    refuses: Callable[[str], bool] = lambda prompt: False
    asked: list[str] = field(default_factory=list)
    stop_after: int | None = None
    alive: int = 0
    capacity: Capacity | None = None  # of the cluster, by default CPU
    pipeline: type[InThisProcess] | None = None

    def write(self, *texts: str | None, **columns: list[Any]) -> None:
        """The table as it is tonight."""
        path = self.folder / "in.parquet"
        pq.write_table(pa.table({"text": pa.array(texts, pa.string()), **columns}), path)

    def job(self, **groups: Any) -> BatchJob:
        value = {
            "name": "nightly",
            "source": {"uri": str(self.folder / "in.parquet"), "rows_per_shard": 4},
            "prompt": {"template": "Say {text}"},
            "output": {"uri": str(self.folder / "out"), "columns": ["text"]},
            "limits": {"max_failed_fraction": 1.0},
            "reuse": "latest",
        }
        return BatchJob.from_dict({**value, **groups})

    def night(self, key: str, job: BatchJob | None = None) -> RunReport:
        job = job or self.job()
        return self.drive(job, plan_run(job, key))

    def drive(self, job: BatchJob, run: Run) -> RunReport:
        """What `infer_run` and `finalize_run` do."""
        return finalize_run(job, run, self.infer(job, run))

    def infer(self, job: BatchJob, run: Run, observe: Any = None) -> Progress:
        """`infer_run` with Ray taken out: the door to the cluster is the real one."""
        have = self.capacity or CPU
        shared = ClusterSession(_NoRay(have), WarmEngines(FakeHosts()))
        told = observe or (lambda progress: None)
        with (
            mock.patch.object(connect, "CLUSTER_SESSION", shared),
            mock.patch.object(connect, "capacity", lambda: have),
            mock.patch.object(connect, "dashboard_url", lambda: ""),
            mock.patch.object(
                pipeline, "Pipeline", partial(self.pipeline or InThisProcess, nights=self)
            ),
        ):
            return infer_run(job, run, told)

    def heard(self, table: pa.Table) -> Iterator[Receipt]:
        """The receipts, until the night is killed."""
        for receipt in receipts(table):
            if self.stop_after is not None:
                self.stop_after -= 1
                if self.stop_after < 0:
                    raise Killed
            yield receipt

    def answer(self, prompt: str) -> str:
        return f"answer to {words(prompt)}"

    def result(self, key: str) -> list[dict[str, Any]]:
        return rows_in(self.folder / "out" / key / "data")

    def quarantined(self, key: str) -> list[dict[str, Any]]:
        return rows_in(self.folder / "out" / key / "_quarantine")


class _NoRay:
    """Ray as the door asks for it."""

    def __init__(self, capacity: Capacity) -> None:
        self.inside, self.capacity = False, capacity

    def joined(self) -> bool:
        return self.inside

    def start(self, address: str | None, cpus: int, access: ClusterAccess) -> None:
        self.inside = True

    def end(self) -> None:
        self.inside = False

    def free(self) -> dict[str, float]:
        return {"CPU": self.capacity.cpus, "GPU": self.capacity.gpus}


class InThisProcess(pipeline.Pipeline):
    """The pipeline with its stages called one after the other."""

    def __init__(self, *args: Any, nights: Nights, **more: Any) -> None:
        super().__init__(*args, **more)
        self.nights = nights

    def __call__(self, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
        # As they travel to Ray's workers.
        first, spec, finish = pickle.loads(pickle.dumps(self.stages(isolated)))
        for task in self.read_tasks(units, isolated):
            for table in self.reader.read(task):
                table = first(table)
                if spec is not None:
                    table = self.asked(table) if "task" not in spec.sampling else self.pooled(table)
                yield from self.nights.heard(finish(table))

    def engines(self) -> dict[str, int]:
        return {"ALIVE": self.nights.alive} if self.nights.alive else {}

    def asked(self, table: pa.Table) -> pa.Table:
        if is_passthrough(table):
            return table
        tokenizer = load_tokenizer(*models.tokenizer_place(self.plan.model))
        errors = table[ERROR].to_pylist()
        prompts = tokenizer.batch_decode(table[TOKENS].to_pylist(), skip_special_tokens=True)
        for i, prompt in enumerate(prompts):
            if errors[i] is None:
                self.nights.asked.append(prompt)
                if self.nights.refuses(prompt):
                    errors[i] = Failure("engine", "ValueError", "refused").to_dict()
        return with_answers(table, errors, list(map(self.nights.answer, prompts)))

    def pooled(self, table: pa.Table) -> pa.Table:
        """Vectors of two numbers, the length and the first letter of each text."""
        assert self.task is not None
        tokenizer = load_tokenizer(*models.tokenizer_place(self.plan.model))

        def answer(requests: Sequence[Request]) -> list[Completion]:
            made = []
            for request in requests:
                text = tokenizer.decode(list(request.prompt_token_ids))
                self.nights.asked.append(text)
                numbers = np.array([len(text), ord(text[0])], np.float32)
                made.append(Completion([], prompt_tokens=3, vector=numbers))
            return made

        return _Pooling(Stepped(answer), dict(self.task.fields))(table)


class _Pooling(EngineStage):
    def __init__(self, engine: Stepped, fields: dict[str, Any]) -> None:
        self.launch, self.engine = EngineLaunch({}, fields, {}), engine

    def ready(self) -> Any:
        return self.engine


class ToldApart:
    """Takes the place of a model's renderer: a prompt's text and the grey of its images."""

    def __init__(self, path: str, revision: str | None, arguments: Mapping[str, Any]) -> None:
        self.tokenizer = load_tokenizer(path, revision)

    def rows(
        self, conversations: Sequence[Messages | Failure]
    ) -> tuple[list[list[int] | Failure], list[dict[str, Any] | None]]:
        return list(map(self._tokens, conversations)), [None] * len(conversations)

    def _tokens(self, messages: Messages | Failure) -> list[int] | Failure:
        if isinstance(messages, Failure):
            return messages
        parts = [part for message in messages for part in message["content"]]
        shown = [part.get("text") or _grey(part["image_pil"]) for part in parts]
        ids = self.tokenizer(" ".join(shown), add_special_tokens=False)["input_ids"]
        return list(ids)


def _grey(image: Any) -> str:
    return str(image.getpixel((0, 0))[0])


class Killed(Exception):
    """The process that drove a night is gone."""


def words(prompt: str) -> str:
    """What a prompt asks about: the words after `Say`."""
    return prompt.partition("Say ")[2].split("\n")[0].strip()


def rows_in(folder: Path) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.parquet")):
        made += pq.read_table(path, use_threads=False).to_pylist()
    return made
