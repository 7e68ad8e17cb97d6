"""Settings that may change answers: which of them `raybatch tune` tries.

Also how well their answers agree with those of the unchanged job.
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
    InsufficientResources,
)
from prefect_raybatch.ledger.precision import PrecisionTry
from prefect_raybatch.sizing.agreement import confidence_of_each, sample_size
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec

if TYPE_CHECKING:
    from prefect_raybatch.runs.precision import SampleBench
    from prefect_raybatch.sizing.sizes import Capacity

log = logging.getLogger(__name__)

Changes = Mapping[str, Any]  # of a job: {field: value}
Changed = Callable[[Changes], RunSpec]  # what the run does with fields of its job changed
LEAST_ANSWER = 16  # tokens out: guessing ahead in shorter answers saves no steps worth a start
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
SUFFIX_PACKAGE = "arctic_inference"  # that vLLM takes its suffix trees from


def alterations(spec: RunSpec, have: Capacity, experts: int) -> list[Changes]:
    """Return changes to try one by one, each {field: value}.

    `experts` is the number in a layer of the model, 0 for a dense one.
    """
    given, sizes = spec.engine.model.given, spec.sizes
    if spec.engine.model.pools:
        return []
    found: list[Changes] = []
    on_gpu = sizes.device_for(have.gpus) == "gpu"
    decided = "quantization" in given or any("quantization" in t for t in spec.engine.tries)
    if on_gpu and not decided:
        found.append({"engine.quantization": "fp8"})
    longer = spec.sampling.max_tokens >= LEAST_ANSWER and not spec.sampling.choices
    if longer and "speculative_config" not in given and spec.prompt.images is None:
        found.append({"engine.speculative_config": NGRAM})
        if importlib.util.find_spec(SUFFIX_PACKAGE) is not None:
            found.append({"engine.speculative_config": SUFFIX})
    if on_gpu and experts:
        most = int(max(have.gpus_by_node, default=have.gpus))
        for times in (2, 4):
            size = times * sizes.tensor
            if size <= most and size * sizes.pipeline <= have.gpus:
                found.append(_wider(sizes, times))
    return found


def _wider(sizes: SizeSpec, times: int) -> Changes:
    """Return the changes for engines over `times` as many GPUs.

    Fewer copies by that factor if the job sets their number, at least one, and one engine per GPU,
    because the best so far may be several.
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
    """Return how many of `rows` rows are asked both ways to show an agreement of `least`.

    `tries` changes are compared.
    """
    return min(rows, sample_size(least, confidence_of_each(tries)))


def agreements(
    bench: SampleBench,
    tried: Sequence[Changes],
    changed: Changed,
) -> Iterator[PrecisionTry]:
    """Yield how well the sampled answers of each change agree with the unchanged job's.

    If it cannot be compared, its `error` says why.
    """
    try:
        with bench.asking(bench.spec, "how far answers agree") as ask:
            plain = ask(False)
    except (ConfigError, EngineStartError, EngineFailure, InsufficientResources) as error:
        log.warning("the unchanged job failed, so nothing can be compared with it: %s", error)
        for changes in tried:
            yield PrecisionTry(_texts(changes), 0, 0, 0.0, 0.0, (), f"as the job is: {error}")
        return
    confidence = confidence_of_each(len(tried))
    for changes in tried:
        yield bench.tried(changed(changes), _texts(changes), plain, confidence)


def _texts(changes: Changes) -> dict[str, str]:
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in changes.items()}
