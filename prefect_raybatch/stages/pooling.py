"""Pooling tasks (embed, classify, score): the engine's settings, requests of rows, and vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.job.vllm import fields as vllm_fields
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model import tasks
from prefect_raybatch.model.context import ModelConfig, own_context
from prefect_raybatch.spec.engine import EngineFields, ModelRequest
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.stages.block import Failure
from prefect_raybatch.stages.order import arrange

if TYPE_CHECKING:
    from prefect_raybatch.stages.vllm.stepper import Completion, Request

RowAnswer = tuple[int, Sequence[int], "Completion"]  # row that was sent, rows that get its answer


class Texts(Enum):
    """How a row's texts are sent to the model.

    - ONE: the row has one text.
    - PAIR: the row has two texts, which are sent in one prompt.
    - SEPARATE: the row has two texts, which are sent as two prompts. The answer is the similarity
      of their vectors.
    """

    ONE = "one"
    PAIR = "pair"
    SEPARATE = "separate"


@dataclass(frozen=True)
class Pooling:
    """A pooling task, such as embed or score: its request fields and its model's properties.

    `fields` go to vLLM with each row. `encodes`: the model is an encoder, which processes a prompt
    in one step. `longest`: a step of vLLM must have room for this number of tokens, 0 for no
    minimum. It is set if prompts must be processed in one step: for an encoder, or if the job
    switches chunked prefill off. `labels` are the model's labels, if it classifies.
    """

    task: str
    texts: Texts
    fields: SamplingFields
    encodes: bool = False
    longest: int = 0
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: RunSpec, pinned: models.PinnedModel) -> Pooling | None:
        """Return the pooling task of a run, from job and config.json; None for text generation."""
        model = spec.engine.model
        if not model.pools:
            return None
        if model.endpoint is not None:
            return cls(model.task, Texts.ONE, {**spec.sampling.pooling, "task": "embed"})
        config, _ = models.read_config(pinned)
        asked = tasks.vllm_task(model, config)
        texts = Texts.ONE
        if model.task == "score" and spec.prompt.paired:
            texts = Texts.PAIR if asked == "classify" else Texts.SEPARATE
        encodes = _encodes(model, config)
        longest = 0
        is_whole = encodes or spec.sizes.takes_whole_prompts
        if is_whole and not spec.sizes.max_num_batched_tokens:
            longest = model.context or own_context(config, model.vllm_arguments) or 0
        return cls(
            task=model.task,
            texts=texts,
            fields={**spec.sampling.pooling, "task": asked},
            encodes=encodes,
            longest=longest,
            labels=tuple(tasks.labels(model, config)) if asked == "classify" else (),
        )

    def engine_arguments(self, sized: EngineFields, given: Collection[str]) -> dict[str, Any]:
        """Return the engine arguments `sized`, changed for vLLM's pooling runner and this model.

        A step has room for `longest` tokens. An encoder does not cache prefixes, unless the job
        sets `enable_prefix_caching`. `given` are the names of the arguments that the job sets.
        """
        step = max(int(sized.get("max_num_batched_tokens") or 0), self.longest)
        made = {**sized, "runner": "pooling", "max_num_batched_tokens": step}
        if self.encodes and "enable_prefix_caching" not in given:
            # An encoder has no KV cache: vLLM 0.29 crashes if it is told to cache prefixes (tried).
            made.pop("enable_prefix_caching", None)
        return made


def _encodes(model: ModelRequest, config: ModelConfig) -> bool:
    """Return whether a model is an encoder, which processes a prompt in one step.

    A model is an encoder if vLLM cannot generate text with any architecture that its config names.
    The task in an architecture's name does not count: vLLM generates text with Qwen3ForCausalLM, so
    Qwen3ForSequenceClassification is no encoder.
    """
    names = tasks.architectures(tasks.overridden(model, config))
    decoders = vllm_fields.generating_models() or ()
    stems = {name.removesuffix("ForCausalLM") for name in decoders if "ForCausalLM" in name}
    return not any(name in decoders or _stem(name) in stems for name in names)


def _stem(name: str) -> str:
    """Return an architecture's name without its task: Qwen3 for Qwen3ForSequenceClassification."""
    return name.partition("For")[0].removesuffix("Model").removesuffix("Embedding")


def ask_pairs(
    run: Callable[[list[Request]], list[Completion]],
    request: Callable[[int, int], Request],
    keys: Sequence[Sequence[bytes]],
    params: Sequence[SamplingFields],
    valid: Sequence[int],
    sort: bool,
    merge: bool,
) -> list[RowAnswer]:
    """Send the two prompts of each valid row; return their cosine similarity as the row's answer.

    `run` sends requests to the engine; `request(row, side)` makes the request of side 0 or 1, and
    `keys[side]` are the prompts' keys (`order.token_keys`). `valid` are row indexes; `params` has
    the sampling fields of each row. `sort` is as in `order.arrange`. With `merge`, a text that
    several rows share, such as a query, is sent once.
    """
    rows = len(params)
    both = [*valid, *(rows + i for i in valid)]
    asked = arrange([*keys[0], *keys[1]], [*params, *params], both, sort, merge)
    done = run([request(i % rows, i // rows) for i in asked.rows])
    found: dict[int, Completion] = {}
    for i, completion in zip(asked.rows, done, strict=True):
        for j in asked.served(i):
            # A prompt that was computed for another row counts as cached.
            cached = completion.cached_tokens if i == j else completion.prompt_tokens
            found[j] = replace(completion, cached_tokens=cached)
    return [(i, [i], _cosine(found[i], found[rows + i])) for i in valid]


def failed_completion(failure: Failure) -> Completion:
    """Return `failure` as the answer to a request that was not sent."""
    from prefect_raybatch.stages.vllm.stepper import Completion

    return Completion([], error=(failure.kind, failure.message))


def _cosine(one: Completion, other: Completion) -> Completion:
    tokens = one.prompt_tokens + other.prompt_tokens
    for half in (one, other):
        if half.error is not None:
            return replace(half, prompt_tokens=tokens)
    a, b = np.asarray(one.vector, np.float64), np.asarray(other.vector, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = np.array([a @ b / (np.linalg.norm(a) * np.linalg.norm(b))], np.float32)
    cached = one.cached_tokens + other.cached_tokens
    return replace(one, prompt_tokens=tokens, cached_tokens=cached, vector=cosine)


def without_misfits(answers: Iterable[RowAnswer]) -> list[RowAnswer]:
    """Return all answers, those with an invalid vector changed to errors.

    A vector is invalid if its length differs from the first one's, or if it holds NaN or infinity.
    """
    made: list[RowAnswer] = []
    size: int | None = None
    for row, served, completion in answers:
        if completion.error is None:
            vector = np.asarray(completion.vector)
            size = len(vector) if size is None else size
            if len(vector) != size:
                what = f"the model returned {len(vector)} numbers, but {size} before"
                completion = replace(completion, error=("OddVector", what))
            elif not np.isfinite(vector).all():
                bad = int((~np.isfinite(vector)).sum())
                what = f"{bad} of {size} numbers are NaN or infinite. Try engine.dtype: float32"
                completion = replace(completion, error=("NotFinite", what))
        made.append((row, served, completion))
    return made


def column(rows: int, answers: Iterable[RowAnswer]) -> pa.Array:
    """Return a fixed_size_list<float32> array with the vector of each of `rows` rows.

    The vector is null for a row without an answer, and for an answer with an error.
    """
    good = [(served, c.vector) for _, served, c in answers if c.error is None]
    size = len(np.asarray(good[0][1])) if good else 1
    values, missing = np.zeros((rows, size), np.float32), np.ones(rows, bool)
    for served, vector in good:
        for i in served:
            values[i], missing[i] = vector, False
    return pa.FixedSizeListArray.from_arrays(
        pa.array(values.reshape(-1)), size, mask=pa.array(missing)
    )
