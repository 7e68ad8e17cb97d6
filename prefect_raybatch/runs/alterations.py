"""Settings that may change answers: which of them `raybatch tune` tries, and how far the answers
agree with those of the job as it is."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import (
    ConfigError,
    EngineFailure,
    EngineStartError,
    InsufficientResources,
)
from prefect_raybatch.job import tasks
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.early_stop import choice_of
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.size_spec import size_spec
from prefect_raybatch.ledger.precision import PrecisionTry
from prefect_raybatch.sizing.agreement import confidence_of_each, sample_size

if TYPE_CHECKING:
    from prefect_raybatch.runs.precision import SampleBench
    from prefect_raybatch.sizing.sizes import Capacity

log = logging.getLogger(__name__)

LEAST_ANSWER = 16  # tokens out: guessing ahead in shorter answers saves no steps worth a start
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
SUFFIX_PACKAGE = "arctic_inference"  # that vLLM takes its suffix trees from


def alterations(job: BatchJob, have: Capacity, experts: int) -> list[dict[str, Any]]:
    """Changes to try one by one, each {field: value}. `experts`: of a layer of the model, 0 of a
    dense one."""
    engine = job.engine
    extra = engine.model_extra or {}
    if tasks.pools(engine.task):
        return []
    found: list[dict[str, Any]] = []
    on_gpu = size_spec(job).device_for(have.gpus) == "gpu"
    if on_gpu and "quantization" not in extra:
        found.append({"engine.quantization": "fp8"})
    longer = job.drawn.max_tokens >= LEAST_ANSWER and not choice_of(job.sampling.given())
    if longer and "speculative_config" not in extra and not job.prompt.images.used:
        found.append({"engine.speculative_config": NGRAM})
        if importlib.util.find_spec(SUFFIX_PACKAGE) is not None:
            found.append({"engine.speculative_config": SUFFIX})
    if on_gpu and experts:
        most = int(max(have.gpus_by_node, default=have.gpus))
        for times in (2, 4):
            size = times * engine.tensor_parallel_size
            if size <= most and size * engine.pipeline_parallel_size <= have.gpus:
                found.append(_wider(engine, times))
    return found


def _wider(engine: Engine, times: int) -> dict[str, Any]:
    """Engines over `times` as many GPUs: so many fewer copies where the job says how many, at least
    one, and one on a GPU, since the best so far may be several."""
    copies = engine.replicas
    changes: dict[str, Any] = {
        "engine.tensor_parallel_size": times * engine.tensor_parallel_size,
        "engine.engines_per_gpu": 1,
    }
    if isinstance(copies, list):
        changes["engine.replicas"] = [max(1, number // times) for number in copies]
    elif copies != "auto":
        changes["engine.replicas"] = max(1, copies // times)
    return changes


def sampled_rows(job: BatchJob, rows: int, tries: int) -> int:
    """How many of `rows` rows are asked both ways where so many changes are compared."""
    return min(rows, sample_size(job.limits.min_agreement, confidence_of_each(tries)))


def agreements(
    bench: SampleBench,
    tried: Sequence[Mapping[str, Any]],
    changed: Callable[[BatchJob, Mapping[str, Any]], BatchJob],
) -> Iterator[PrecisionTry]:
    """What each of `tried` changes in the sampled answers, against the job without them. Of what
    cannot be compared the `error` says why."""
    try:
        with bench.asking(bench.job, "how far answers agree") as ask:
            plain = ask(False)
    except (ConfigError, EngineStartError, EngineFailure, InsufficientResources) as error:
        log.warning("the job as it is cannot be compared with: %s", error)
        for changes in tried:
            yield PrecisionTry(_texts(changes), 0, 0, 0.0, 0.0, (), f"as the job is: {error}")
        return
    confidence = confidence_of_each(len(tried))
    for changes in tried:
        job = changed(bench.job, changes)
        yield bench.tried(job, _texts(changes), plain, confidence)


def _texts(changes: Mapping[str, Any]) -> dict[str, str]:
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in changes.items()}
