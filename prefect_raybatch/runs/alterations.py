"""Lists changes of a job that may change its answers, for `raybatch tune` to try.

Then measures how many answers of a changed job equal those of the unchanged one.
"""

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
    IncompleteRun,
    InsufficientResources,
)
from prefect_raybatch.ledger.precision import PrecisionTry
from prefect_raybatch.sizing.agreement import bonferroni_confidence, sample_size
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec

if TYPE_CHECKING:
    from prefect_raybatch.runs.precision import SampleBench
    from prefect_raybatch.sizing.sizes import Capacity

log = logging.getLogger(__name__)

Changes = Mapping[str, Any]  # changes of a job: {field: value}
Changed = Callable[[Changes], RunSpec]  # returns the spec of the changed job
LEAST_ANSWER = 16  # output tokens; speculation in shorter answers saves too little to be tried
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
SUFFIX_PACKAGE = "arctic_inference"  # vLLM's `suffix` method imports it


def alterations(spec: RunSpec, capacity: Capacity, experts: int) -> list[Changes]:
    """Return changes of the job that `raybatch tune` tries one by one, each {job field: value}.

    Only changes that may alter answers are returned; none for a pooling task. `capacity` is the
    cluster's capacity. `experts` is the number of experts in a layer of the model, 0 for a dense
    model.
    """
    given, sizes = spec.engine.model.vllm_arguments, spec.sizes
    if spec.engine.model.pools:
        return []
    found: list[Changes] = []
    on_gpu = sizes.device_for(capacity.gpus) == "gpu"
    decided = "quantization" in given or any("quantization" in t for t in spec.engine.tries)
    if on_gpu and not decided:
        found.append({"engine.quantization": "fp8"})
    longer = spec.sampling.max_tokens >= LEAST_ANSWER and not spec.sampling.choices
    if longer and "speculative_config" not in given and spec.prompt.images is None:
        found.append({"engine.speculative_config": NGRAM})
        if importlib.util.find_spec(SUFFIX_PACKAGE) is not None:
            found.append({"engine.speculative_config": SUFFIX})
    if on_gpu and experts:
        most = int(max(capacity.gpus_by_node, default=capacity.gpus))
        for times in (2, 4):
            size = times * sizes.tensor
            if size <= most and size * sizes.pipeline <= capacity.gpus:
                found.append(_wider(sizes, times))
    return found


def _wider(sizes: SizeSpec, times: int) -> Changes:
    """Return the changes that give each engine `times` as many GPUs (tensor parallelism).

    If the job sets the number of replicas, it is divided by `times` (to at least 1). The changes
    also set one engine per GPU, because tuning may have chosen several.
    """
    changes: dict[str, object] = {
        "engine.tensor_parallel_size": times * sizes.tensor,
        "engine.engines_per_gpu": 1,
    }
    if sizes.replicas is not None:
        fewest, most = (max(1, number // times) for number in sizes.replicas)
        fixed = sizes.replicas[0] == sizes.replicas[1]
        changes["engine.replicas"] = fewest if fixed else [fewest, most]
    return changes


def sampled_rows(least: float, rows: int, tries: int) -> int:
    """Return how many of the input's `rows` rows to sample for a trial of `tries` changed jobs.

    `least` (0 to 1) is the share of all answers that has to stay equal. The sample is large enough
    to show that a job reaches it, with 95 % confidence for all jobs together, if at most the share
    (1 - `least`) / 2 of the sampled answers changes. A smaller input is sampled whole.
    """
    return min(rows, sample_size(least, bonferroni_confidence(tries)))


def agreements(
    bench: SampleBench,
    tried: Sequence[Changes],
    changed: Changed,
) -> Iterator[PrecisionTry]:
    """Answer a sample with the unchanged and each changed job; yield a comparison per change.

    `tried` are the changes; `changed(changes)` returns the run's spec with them. A comparison says
    how many answers equal those of the unchanged job, or in `error` why none could be made (the
    engine did not start, for example).
    """
    try:
        with bench.sample_engine(bench.spec, "how far answers agree") as ask:
            plain = ask(False)
    except (
        ConfigError,
        EngineStartError,
        EngineFailure,
        IncompleteRun,
        InsufficientResources,
    ) as error:
        log.warning("the unchanged job failed, so nothing can be compared with it: %s", error)
        for changes in tried:
            yield PrecisionTry(_texts(changes), 0, 0, 0.0, 0.0, (), f"as the job is: {error}")
        return
    confidence = bonferroni_confidence(len(tried))
    for changes in tried:
        try:
            found = bench.tried(changed(changes), _texts(changes), plain, confidence)
        except IncompleteRun as error:  # a node was lost, for example
            found = PrecisionTry(_texts(changes), 0, 0, 0.0, confidence, (), str(error))
        yield found


def _texts(changes: Changes) -> dict[str, str]:
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in changes.items()}
