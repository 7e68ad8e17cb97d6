"""try-fp8: what is decided by a sample of the rows, who takes the decision, and what is told."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
from helpers.engines import Fp8Engine, Fp8Vectors
from helpers.nights import Nights
from helpers.small import input_rows, job_dict, make_job

from prefect_raybatch import errors
from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.cluster import connect, trial_actor
from prefect_raybatch.cluster.sharing import Tenant
from prefect_raybatch.compile.job import compile_job, compile_planned
from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.driver.cost import CostMeter
from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    EngineFailure,
    IncompleteRun,
    PlanMismatch,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.failures import ENGINE_DIED, Loss
from prefect_raybatch.ledger.increments import requests_ledger
from prefect_raybatch.ledger.layout import PRECISION
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.precision import read_precision, record_precision
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.report.html import html
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import markdown
from prefect_raybatch.runs.alterations import agreements
from prefect_raybatch.runs.precision import decided_precision, decision_text, drawn_rows
from prefect_raybatch.runs.run import load_run
from prefect_raybatch.sizing.sizes import Capacity
from prefect_raybatch.stages.block import lost_block_like
from prefect_raybatch.stages.trial import TrialEngine, compared, pooled_answers
from prefect_raybatch.storage import Store, open_store

CPUS = Capacity(cpus=4, gpus=0, nodes=1, address="here")
ROWS = 400


@dataclass
class Small:
    """A planned run of 400 rows whose engines are told what to do by the environment."""

    folder: Path
    job: BatchJob
    plan: Plan
    shards: Shards
    ledger: Ledger
    said: list[str] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return self.ledger.store

    def decide(self, engine_stage: type = Fp8Engine, **env: str) -> dict[str, str]:
        """The engine arguments that are decided on."""
        engine = self.job.engine.model_copy(update={"env": {**self.job.engine.env, **env}})
        job = self.job.model_copy(update={"engine": engine})
        user = Tenant("trial", self.said.append)
        found = decided_precision(
            compile_planned(job, self.plan),
            self.plan,
            self.shards,
            self.ledger,
            CPUS,
            user,
            "attempt",
            engine_stage,
        )
        return dict(found)

    @property
    def engines(self) -> list[str]:
        notes = self.folder / "notes"
        return notes.read_text().split("\n")[:-1] if notes.exists() else []


def job_of(folder: Path, engine: dict[str, Any], **groups: Any) -> BatchJob:
    return make_job(
        source={"uri": str(folder / "in.parquet"), "rows_per_shard": 50},
        output={"uri": str(folder / "out")},
        engine={"device": "cpu", "env": {Fp8Engine.NOTES: str(folder / "notes")}, **engine},
        **{"prompt": {"template": "What is {Company}?"}, **groups},
    )


@contextmanager
def here(engine: type, stages: Any, *_: Any) -> Iterator[Any]:
    trial = TrialEngine(engine, stages)
    yield trial.outcomes
    with mock.patch.object(trial.engine, "close", wraps=trial.engine.close) as closed:
        trial.close()
    closed.assert_called_once_with()


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Small]:
    """A run whose trials are made in this process."""
    monkeypatch.setattr(trial_actor, "trial_on_worker", here)
    monkeypatch.setattr(connect, "admitted", lambda *_: nullcontext())

    def make(rows: int = ROWS, **groups: Any) -> Small:
        engine = groups.pop("engine", {"quantization": "try-fp8"})
        pq.write_table(input_rows(0, rows), tmp_path / "in.parquet")
        job = job_of(tmp_path, engine, **groups)
        run = plan_run(job, "k")
        ledger = Ledger(open_store(run.uri))
        return Small(tmp_path, job, *load_run(ledger, run), ledger)

    return make


def test_answers_that_agree_are_asked_in_fp8(planned):
    run = planned()
    job = run.decide()
    assert job == {"quantization": "fp8"}
    assert run.engines == ["- -", "fp8 -"]
    about = "asking a sample of the rows first, to decide on the precision ({})".format
    as_stored = about("stored precision")
    assert run.said == [as_stored, "", about("quantization: fp8"), ""]
    note = read_precision(run.store)
    assert note is not None and note.decided == {"quantization": "fp8"}
    (one,) = note.tries
    assert (one.rows, one.agreed, one.agreement, note.itself) == (ROWS, ROWS, 1.0, 1.0)
    assert 0.99 < one.bound < 0.993 and one.disagreeing == ()
    assert "quantization: fp8; quantization: fp8 agreed in 400 of 400 rows" in decision_text(note)


def test_answers_that_differ_are_asked_as_the_model_is_stored(planned):
    run = planned()
    job = run.decide(**{Fp8Engine.EVERY: "50"})
    assert job == {}
    note = read_precision(run.store)
    assert note is not None and note.decided == {}
    (one,) = note.tries
    assert (one.rows, one.agreed) == (ROWS, ROWS - 8) and one.bound < 0.98
    assert [(d.row, d.stored, d.tried) for d in one.disagreeing][:2] == [
        (0, "answer 0", "other 0"),
        (50, "answer 50", "other 50"),
    ]


def test_less_may_be_asked_for(planned):
    run = planned(limits={"min_agreement": 0.95})
    # of a sample at most one answer differs: too many for the default
    assert run.decide(**{Fp8Engine.EVERY: str(ROWS)}) == {"quantization": "fp8"}


def test_what_does_not_start_is_not_taken_and_told(planned):
    run = planned()
    assert run.decide(**{Fp8Engine.REFUSES: "RuntimeError"}) == {}
    note = read_precision(run.store)
    assert note is not None and "no kernel for fp8" in note.tries[0].error
    text = "did not work: EngineStartError: the engine cannot work: RuntimeError: no kernel for fp8"
    assert text in decision_text(note)


@pytest.mark.parametrize("kind", ["AccessDenied", "CredentialsUnusable"])
def test_an_error_that_says_nothing_of_the_precision_ends_the_run(planned, kind):
    """It keeps its class, and no decision against fp8 is recorded, which later runs would take."""
    run = planned()
    with pytest.raises(getattr(errors, kind), match="no kernel for fp8"):
        run.decide(**{Fp8Engine.REFUSES: kind})
    assert read_precision(run.store) is None


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (Loss("NodeLeaves", "its node is being drained"), IncompleteRun),
        (Loss("OSError", "no space left on device"), IncompleteRun),
        (Loss("StoreUnavailable", "no answer"), errors.StoreUnavailable),
    ],
)
def test_a_trial_that_is_interrupted_is_repeated_and_says_nothing_of_the_precision(
    planned, loss, error
):
    class Interrupted(Fp8Engine):
        def __call__(self, table: Any) -> Any:
            return lost_block_like(table, loss) if self.fp8 else super().__call__(table)

    run = planned()
    with pytest.raises(error, match=loss.message) as caught:
        run.decide(Interrupted)
    assert caught.value.transient and read_precision(run.store) is None
    assert run.decide() == {"quantization": "fp8"}


def test_tuning_goes_on_after_an_interrupted_trial_and_says_why():
    class Bench:
        spec = None

        @contextmanager
        def sample_engine(self, spec: Any, why: str) -> Iterator[Any]:
            yield lambda again: {}

        def tried(self, *_: Any) -> Any:
            raise IncompleteRun("its node was lost")

    changes = [{"engine.quantization": "fp8"}, {"engine.kv_cache_dtype": "fp8"}]
    found = list(agreements(Bench(), changes, lambda changes: None))
    assert [(one.tried, one.error) for one in found] == [(c, "its node was lost") for c in changes]


def test_an_engine_that_dies_in_fp8_is_recorded(planned):
    class Dies(Fp8Engine):
        def __call__(self, table: Any) -> Any:
            dead = Loss(ENGINE_DIED, "illegal memory access")
            return lost_block_like(table, dead) if self.fp8 else super().__call__(table)

    run = planned()
    assert run.decide(Dies) == {}
    note = read_precision(run.store)
    assert note is not None and "illegal memory access" in note.tries[0].error


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("The actor died because its node has died. Node Id: 3f", IncompleteRun),
        ("Worker exit detail: the process was killed by SIGSEGV", EngineFailure),
    ],
)
def test_a_worker_that_is_lost_with_its_node_is_told_from_one_whose_process_dies(
    monkeypatch, message, error
):
    import ray
    from ray.exceptions import ActorDiedError

    died = ActorDiedError()
    died.error_msg = message
    monkeypatch.setattr(ray, "remote", mock.MagicMock())
    monkeypatch.setattr(ray, "wait", lambda references, timeout: (references, []))
    monkeypatch.setattr(ray, "get", mock.Mock(side_effect=died))
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    worker = trial_actor.trial_on_worker(Fp8Engine, mock.Mock(), {})
    with worker as ask, pytest.raises(error, match=message):
        ask(False)


def test_what_fails_together_is_tried_apart(planned):
    run = planned(
        engine={"quantization": "try-fp8", "kv_cache_dtype": "try-fp8"},
        limits={"min_agreement": 0.98},
    )
    job = run.decide(**{Fp8Engine.EVERY: "20"})  # the weights are to blame
    assert job == {"kv_cache_dtype": "fp8"}
    assert run.engines == ["- -", "fp8 fp8", "fp8 -", "- fp8"]
    note = read_precision(run.store)
    assert note is not None and {one.confidence for one in note.tries} == {0.983333}


def test_a_decision_is_made_once_and_taken_by_all_who_come_later(planned):
    run = planned()
    run.decide()
    made = run.engines
    # fp8 would not agree any more, and no engine is asked
    assert run.decide(**{Fp8Engine.EVERY: "2"}) == {"quantization": "fp8"}
    assert run.engines == made
    first = read_precision(run.store)
    assert first is not None
    assert record_precision(run.store, replace(first, decided={}, by="late")) == first


def test_commits_without_a_decision_are_a_fault(planned):
    run = planned()
    run.store.put("_raybatch/commits/00000000.json", b"{}")
    with pytest.raises(CorruptRun, match=r"precision\.json.* is missing"):
        run.decide()
    run.store.put(PRECISION, b'{"decided":{"quantization":3}}')
    with pytest.raises(CorruptRun, match=r"precision\.json"):
        run.decide()


def test_a_retry_takes_its_parents_decision(planned):
    run = planned()
    run.decide()
    made = run.engines
    child = Ledger(open_store(str(run.folder / "out")).sub("k.r1"))
    plan = replace(run.plan, run_key="k.r1", parent="k", rows=2, numbers_table="n.parquet")
    retry = replace(run, plan=plan, ledger=child)
    assert retry.decide(**{Fp8Engine.EVERY: "2"}) == {"quantization": "fp8"}
    note = read_precision(child.store)
    assert run.engines == made and note is not None and note.by == "k"
    assert decision_text(note) == "quantization: fp8, as decided in run k"


def test_a_retry_takes_the_decision_of_its_parents_requests_phase(planned):
    run = planned()
    run.decide()
    note = read_precision(run.store)
    assert note is not None
    record_precision(requests_ledger(run.store).store, note)
    (run.folder / "out/k" / PRECISION).unlink()
    child = Ledger(open_store(str(run.folder / "out")).sub("k.r1"))
    plan = replace(run.plan, run_key="k.r1", parent="k", rows=2, numbers_table="n.parquet")
    retry = replace(run, plan=plan, ledger=child)
    assert retry.decide(**{Fp8Engine.EVERY: "2"}) == {"quantization": "fp8"}
    note = read_precision(child.store)
    assert note is not None and (note.by, note.tries) == ("k", ())


def test_a_run_is_not_resumed_in_another_precision(planned):
    run = planned()
    for other in ({"quantization": "fp8"}, {}):
        with pytest.raises(PlanMismatch, match=r"engine\.quantization: 'try-fp8' ->"):
            plan_run(job_of(run.folder, other), "k")
    same = job_of(run.folder, {"quantization": "try-fp8"}, limits={"min_agreement": 0.9})
    assert fingerprint(same).fingerprint == fingerprint(run.job).fingerprint


def test_too_few_rows_fail_the_plan_and_the_dry_run(planned, tmp_path):
    with pytest.raises(ConfigError, match=r"20 rows cannot show 0\.99"):
        planned(rows=20)
    (problem,) = dry_run(job_of(tmp_path, {"quantization": "try-fp8"})).problems
    assert "20 rows cannot show" in problem


def test_the_plan_says_what_will_be_tried(planned):
    run = planned()
    found = {figure.name: figure for figure in dry_run(run.job).figures}
    assert found["precision"].value == "fp8 quantization, or as stored"
    assert "1,200 sampled rows" in found["precision"].why


def test_rows_that_set_their_own_sampling_are_asked_greedily(planned):
    run = planned(sampling={"temperature": 0.8, "n": 3, "max_tokens": 8})
    asked: list[Any] = []

    class Noting(Fp8Engine):
        def __init__(self, spec: Any):
            super().__init__(spec)
            asked.append(spec.sampling)

    spec = compile_planned(run.job, run.plan)
    decided_precision(spec, run.plan, run.shards, run.ledger, CPUS, Tenant("t"), "a", Noting)
    assert asked[0] == {"temperature": 0.0, "max_tokens": 8} == asked[1]
    assert run.job.sampling.temperature == 0.8  # and the run draws as it says


def test_rows_are_drawn_from_all_over_the_input_and_the_same_each_time():
    import numpy as np

    shards = Shards(np.arange(0, 100_001, 100))
    found = drawn_rows(shards, 500, "seed")
    assert found == drawn_rows(shards, 500, "seed") != drawn_rows(shards, 500, "")
    assert sum(map(len, found.values())) == 500 and len(found) <= 64
    assert min(found) < 200 and max(found) > 800
    assert all(at == sorted(set(at)) for at in found.values())


def test_failed_rows_agree_where_they_fail_alike():
    good, other = ("good", {"a": 1, "b": [1.0]}), ("good", {"a": 1.0, "b": [1]})
    failed, again = ("failed", "AnswerCutOff: 5"), ("failed", "AnswerCutOff: 6")
    one = {(0, 0): good, (0, 1): failed, (0, 2): good, (0, 3): good}
    two = {(0, 0): other, (0, 1): again, (0, 2): failed, (0, 4): good}
    assert compared(one, two) == (3, 2, [(0, 2)])


@pytest.mark.parametrize("task", ["embed", "score"])
def test_vectors_and_scores_agree_where_they_are_near(planned, task):
    prompt = {"template": "{Company} {id}", "second": "{id}" if task == "score" else None}
    engine = {"quantization": "try-fp8", "task": task, "max_model_len": 128}
    run = planned(240, engine=engine, limits={"min_agreement": 0.95}, prompt=prompt)  # all of them
    assert run.decide(Fp8Vectors, **{Fp8Vectors.EVERY: "9"}) == {}
    note = read_precision(run.store)
    assert note is not None and note.itself == 1.0
    (one,) = note.tries
    assert one.rows == 240 and 0.7 < one.agreement < 0.95 and len(one.disagreeing) == 20
    if task == "embed":
        turned = ("a vector of 2 numbers", "a vector of 2 numbers, cosine 0.9553")
        assert (one.disagreeing[0].stored, one.disagreeing[0].tried) == turned


def test_vectors_of_which_few_are_turned_are_asked_in_fp8(planned):
    run = planned(engine={"quantization": "try-fp8", "task": "embed", "max_model_len": 128})
    assert run.decide(Fp8Vectors) == {"quantization": "fp8"}


def test_raw_answers_of_tasks_that_pool_are_compared_as_finished_ones_are():
    """By cosine, label and score; the asks of a run that reuses write them raw."""
    import numpy as np
    import pyarrow as pa

    vectors = [[0.1, 0.9], [0.8, 0.2], [0.5, 0.5]]
    raw = pa.table({"key": [b"a", b"b", b"c"], "vector": pa.array(vectors, pa.list_(pa.float32()))})
    found = {
        task: list(pooled_answers(raw, task, "response")) for task in ("embed", "classify", "score")
    }
    assert found["classify"] == ["label 1", "label 0", "label 0"]
    assert found["score"] == pytest.approx([0.1, 0.8, 0.5])
    assert np.allclose(found["embed"], vectors)
    finished = pa.table({"response": ["x", "y"], "response_probabilities": [0.5, 0.6]})
    assert list(pooled_answers(finished, "classify", "response")) == ["x", "y"]
    scores = {(0, i): ("good", score) for i, score in enumerate(found["score"])}
    moved = {(0, 0): ("good", 0.12), (0, 1): ("good", 0.84), (0, 2): ("failed", "ValueError: x")}
    assert compared(scores, moved) == (3, 1, [(0, 1), (0, 2)])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"engine": {"kv_cache_dtype": "try-fp8", "quantization": "try-fp8", "task": "embed"}},
            "applies only to engine.task generate, not to embed",
        ),
        (
            {
                "engine": {
                    "quantization": "try-fp8",
                    "tensor_parallel_size": 2,
                    "distributed_executor_backend": "ray",
                }
            },
            "one node",
        ),
    ],
)
def test_jobs_that_cannot_be_compared_are_refused(change, told):
    with pytest.raises(ConfigError, match=told):
        BatchJob.from_dict({**job_dict(engine={"quantization": "try-fp8"}), **change})


def test_a_job_without_it_is_as_before():
    job = make_job(engine={"quantization": "fp8"})
    spec = compile_job(job)
    assert spec.engine.tries == () and spec.engine.model.vllm_arguments == {"quantization": "fp8"}


@pytest.mark.whole
def test_with_ray_the_run_is_asked_as_was_decided(local_ray, tmp_path):
    from prefect_raybatch.api import finalize_run, infer_run

    pq.write_table(input_rows(0, ROWS), tmp_path / "in.parquet")
    env = {Fp8Engine.NOTES: str(tmp_path / "notes"), Fp8Engine.EVERY: "4"}
    asked = {"quantization": "try-fp8", "replicas": 1, "env": env}
    job = job_of(tmp_path, asked, limits={"min_agreement": 0.5})
    run = plan_run(job, "k")
    report = finalize_run(job, run, infer_run(job, run, engine=Fp8Engine))
    assert (tmp_path / "notes").read_text().split("\n")[:-1] == ["- -", "fp8 -", "fp8 -"]
    answers = report.to_pandas()["response"]
    assert answers.str.startswith("other").sum() == ROWS / 4  # all of them from fp8
    assert RunReport.from_bytes(report.to_bytes()) == report and report.precision is not None
    (one,) = report.precision.tries
    assert one.rows == 200 and 100 < one.agreed < 200
    for page in (markdown(report), html(report)):
        assert "The run used quantization: fp8; limits.min_agreement is 0.5" in page
        assert f"{one.agreed:,} ({one.agreement:.2%})" in page
        assert one.disagreeing[0].tried in page


def test_a_trial_counts_as_cost_while_its_engines_hold_gpus(planned, monkeypatch):
    held: list[float] = []

    class Meter(CostMeter):
        @contextmanager
        def holding(self, gpus: float) -> Iterator[None]:
            with super().holding(gpus):
                self.see(0.0, {})
                self.see(10.0, {})
                held.append(self.gpus)
                yield

    gpus = Capacity(cpus=4, gpus=1, nodes=1, address="here", gpus_by_node=(1,))
    run = planned()
    job = run.job.model_copy(update={"engine": run.job.engine.model_copy(update={"device": "gpu"})})
    monkeypatch.setattr(connect, "check_fit", lambda *_: None)
    meter = Meter(3600.0)
    user = Tenant("trial", run.said.append)
    known = (run.plan, run.shards, run.ledger, gpus, user, "attempt", Fp8Engine)
    assert decided_precision(compile_planned(job, run.plan), *known, meter) == {
        "quantization": "fp8"
    }
    assert held == [1.0, 1.0] and meter.gpu_seconds >= 20.0
    meter.see(99.0, {})
    assert meter.gpus == 0.0
    later = CostMeter(3600.0, 1.0, 1).continue_from(meter)
    assert later.total_cost == meter.cost and later.total_cost >= 20.0


def test_nights_that_take_answers_over_stay_in_one_precision(tmp_path, monkeypatch):
    """Also where a night asked nothing, and the night that decided is gone; a retry too."""
    trials: list[str] = []

    def trial(engine: type, stages: Any, *more: Any) -> Any:
        trials.append("trial")
        return here(Fp8Engine, stages)

    monkeypatch.setattr(trial_actor, "trial_on_worker", trial)
    monkeypatch.setattr(connect, "admitted", lambda *_: nullcontext())
    nights = Nights(tmp_path)
    nights.refuses = lambda prompt: "bad" in prompt
    env = {Fp8Engine.NOTES: str(tmp_path / "notes")}
    job = nights.job(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 100},
        prompt={"template": "Say {text}\n{id}"},
        engine={"quantization": "try-fp8", "env": env},
        limits={"min_agreement": 0.5, "max_failed_fraction": 1.0},
    )
    texts = [f"row {i}" for i in range(210)]
    for key, more in (("n1", ["bad"]), ("n2", []), ("n3", ["new"])):
        nights.write(*texts, *more, id=list(range(210 + len(more))))
        report = nights.night(key, job)
        assert report.precision is not None
        assert report.precision.decided == {"quantization": "fp8"}
        if key == "n1":
            assert report.precision.tries and trials == ["trial"] * 2
            retried = plan_retry(str(tmp_path / "out" / "n1"))
            assert isinstance(retried, Retry)
            child = nights.drive(retried.job, retried.run)
            assert child.precision is not None and child.precision.by == "n1"
        else:
            assert not report.precision.tries and report.precision.by in ("n1", "n1.r1", "n2")
            for gone in (tmp_path / "out").glob("n1*"):
                shutil.rmtree(gone)
    assert trials == ["trial"] * 2


def test_only_answers_of_the_runs_precision_are_reused(tmp_path, monkeypatch):
    monkeypatch.setattr(connect, "admitted", lambda *_: nullcontext())
    monkeypatch.setattr(
        trial_actor, "trial_on_worker", lambda engine, stages, *_: here(Fp8Engine, stages)
    )
    nights = Nights(tmp_path)

    def night(key: str, *texts: str, every: str = "", **groups: Any) -> RunReport:
        env = {Fp8Engine.NOTES: str(tmp_path / "notes"), Fp8Engine.EVERY: every}
        job = nights.job(
            source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 100},
            prompt={"template": "Say {text}\n{id}"},
            engine={"quantization": "try-fp8", "env": env},
            limits={"min_agreement": 0.5, "max_failed_fraction": 1.0},
            **groups,
        )
        nights.write(*texts, id=list(range(len(texts))))
        return nights.night(key, job)

    one = [f"one {i}" for i in range(210)]
    two = [f"two {i}" for i in range(210)]
    keep = {"output": {"uri": str(tmp_path / "out"), "columns": ["text"], "keep_answers": 30}}
    first = night("n1", *one, reuse=None, **keep)
    second = night("n2", *two, every="1", reuse=None, **keep)
    assert first.precision is not None and first.precision.decided == {"quantization": "fp8"}
    assert second.precision is not None and second.precision.decided == {}
    nights.asked.clear()
    third = night("n3", *one[:100], *two[100:], every="1", reuse="all", **keep)
    assert third.precision is not None and third.precision.by == "n2"
    assert len(nights.asked) == 100 and all("one" in prompt for prompt in nights.asked)
