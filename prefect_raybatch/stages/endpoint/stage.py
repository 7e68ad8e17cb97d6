"""The engine stage for a hosted model: takes and returns blocks, as the stage for vLLM does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import pyarrow as pa

from prefect_raybatch.errors import EndpointRefused, EndpointUnavailable, StoreError
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.block import failures_of, lost_block_like
from prefect_raybatch.stages.columns import CHAT, PARAMS, POSITION, SHARD
from prefect_raybatch.stages.endpoint.answers import HostedAnswer, as_utf8
from prefect_raybatch.stages.endpoint.body import answer_text, body_of, reserved_tokens
from prefect_raybatch.stages.endpoint.client import (
    EndpointEngine,
    HostedRequest,
    SharedLimiter,
)
from prefect_raybatch.stages.endpoint.journal import Journal, read_journal
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage, fields_of
from prefect_raybatch.stages.order import arrange
from prefect_raybatch.stages.pooling import without_misfits
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.stages.pooling import RowAnswer
    from prefect_raybatch.stages.vllm.stepper import Completion, SteppedEngine


@dataclass(frozen=True)
class EndpointLaunch(EngineLaunch):
    """Everything that an actor needs to send requests to a hosted model.

    `key` is the API key, "" for none; `store` is rooted at the run directory; `run` identifies the
    run in idempotency keys.
    """

    endpoint: EndpointSpec = field(kw_only=True)
    key: str = field(kw_only=True, repr=False)
    limiter: SharedLimiter = field(kw_only=True)
    store: Store = field(kw_only=True)
    run: str = field(kw_only=True)


class EndpointStage(EngineStage):
    """The engine stage of a run with `engine.endpoint`."""

    launch: EndpointLaunch
    engine_class: ClassVar[type[EndpointEngine]] = EndpointEngine
    _journal: Journal | None = None

    def _prepare_process(self, launch: EngineLaunch) -> None:
        """Do nothing: no process of vLLM is started."""

    def start(self) -> None:
        """Connect to the server, and check the model; if that fails, `_refused` has the reason."""
        spec = self.launch
        try:
            engine = self.engine_class(spec.endpoint, spec.key, spec.limiter)
        except (EndpointRefused, EndpointUnavailable) as error:
            self._refused = Loss(type(error).__name__, str(error), fatal=True)
            return
        if self._journal is None:
            self._journal = Journal(spec.store)
        self.engine, self._refused = cast("SteppedEngine", engine), None

    def _prove(self, cause: str, first: int = 1) -> None:
        """Send no test prompt: no row can kill the server, and `start` has checked the model."""
        self._suspect = None

    def close(self) -> None:
        super().close()
        if self._journal is not None:
            self._journal.close()

    def __call__(self, table: pa.Table) -> pa.Table:
        """Answer the valid rows of a block, as `EngineStage` does."""
        try:
            return super().__call__(table)
        except (EndpointRefused, EndpointUnavailable) as error:
            why = Loss(type(error).__name__, str(error), fatal=True)
            self._refused = why
            with self._lock:
                engine, self.engine = self.engine, None
            if self._teller is not None:
                self._teller.end()
            if engine is not None:  # so that later blocks are returned as lost at once
                engine.close()
            return lost_block_like(table, why)
        except StoreError as error:  # nothing paid is lost: journal and batches are recorded
            return lost_block_like(table, Loss(type(error).__name__, str(error)))
        except CancelledError:  # another block met the error that ended the engine
            if self._refused is None:
                raise
            return lost_block_like(table, self._refused)

    def _ask(self, engine: SteppedEngine, table: pa.Table) -> list[RowAnswer]:
        params = [fields_of(self.launch.sampling, own) for own in table[PARAMS].to_pylist()]
        texts = table[CHAT].to_pylist()
        well = [i for i, failure in enumerate(failures_of(table)) if failure is None]
        keys = [(text or "").encode() for text in texts]
        asked = arrange(keys, params, well, sort=False, merge=self.launch.merge)
        shards, positions = (table[name].to_pylist() for name in (SHARD, POSITION))
        kept = read_journal(self.launch.store, set(shards))
        answers: dict[int, HostedAnswer] = {}
        requests: dict[int, HostedRequest] = {}
        for i in asked.rows:
            try:
                messages = json.loads(texts[i])
                body = body_of(self.launch.endpoint, messages, params[i])
                key = _key(self.launch.run, shards[i], positions[i], body)
            except (ValueError, RecursionError) as error:
                answers[i] = HostedAnswer(error=(type(error).__name__, str(error)))
                continue
            if key in kept:
                answers[i] = kept[key]
                continue
            tokens = sum(reserved_tokens(messages, body))
            keep = partial(self._keep, shards[i], key)
            requests[i] = HostedRequest(body, tokens, key, keep)
        hosted = cast("EndpointEngine", engine)
        try:
            found = self._ask_server(hosted, shards, list(requests.values()))
        finally:
            # Write now: after the commit, the journals are removed. And if an error ends the run,
            # its actors may be killed at once, but the paid answers must be kept.
            if self._journal is not None:
                self._journal.write()
        answers.update(zip(requests, found, strict=True))
        pools = self.launch.endpoint.path == "embeddings"
        complete = _vector if pools else _completion
        made: list[RowAnswer] = [
            (i, asked.served(i), complete(answers[i], params[i])) for i in asked.rows
        ]
        return without_misfits(made) if pools else made

    def _ask_server(
        self, engine: EndpointEngine, shards: Sequence[int], requests: Sequence[HostedRequest]
    ) -> Sequence[HostedAnswer]:
        """Return the answers in order of the requests. `shards`: the shard of each block row."""
        return engine.ask(requests)

    def _keep(self, shard: int, key: str, answer: HostedAnswer) -> None:
        if self._journal is not None:
            self._journal.add(shard, key, answer)


def _completion(answer: HostedAnswer, params: SamplingFields) -> Completion:
    """Convert a hosted model's answer to a `Completion`, the form in which vLLM's engine answers.

    The server reports only the total number of output tokens. So the token ids are zeros, as many
    as were reported, distributed evenly over the choices.
    """
    from prefect_raybatch.stages.vllm.stepper import Completion

    error = answer.error or _lacking(answer, params)
    if error is not None:
        return Completion([], error=error)
    choices = answer.choices
    share, over = divmod(answer.output_tokens, len(choices))
    finishes: list[str | None] = [choice.finish for choice in choices]
    return Completion(
        [[0] * (share + (number < over)) for number in range(len(choices))],
        [as_utf8(answer_text(choice.text, params)) for choice in choices],
        next((one for one in finishes if one != "stop"), "stop"),
        prompt_tokens=answer.prompt_tokens,
        finish_reasons=finishes if len(choices) > 1 else None,
        named_steps=[choice.steps or [] for choice in choices] if _asks_logprobs(params) else None,
    )


def _lacking(answer: HostedAnswer, params: SamplingFields) -> tuple[str, str] | None:
    """Return an error (class, message) if choices or log probabilities are missing; else None."""
    asked = params.get("n") or 1
    if len(answer.choices) != asked:
        return "AnswersMissing", (
            f"the server returned {counted(len(answer.choices), 'answer')}, and sampling.n asks "
            f"for {asked}. Use a server that supports n, or remove sampling.n"
        )
    if _asks_logprobs(params) and any(choice.steps is None for choice in answer.choices):
        return "LogprobsMissing", (
            "the server returned no log probabilities. Use a server and model that support "
            "logprobs, or remove sampling.logprobs"
        )
    return None


def _asks_logprobs(params: SamplingFields) -> bool:
    return params.get("logprobs") is not None


def _vector(answer: HostedAnswer, params: SamplingFields) -> Completion:
    """Convert an embedding to a `Completion`, scaled to length 1 unless use_activation is false."""
    from prefect_raybatch.stages.vllm.stepper import Completion

    if answer.error is not None:
        return Completion([], error=answer.error)
    vector = np.asarray(json.loads(answer.choices[0].text), np.float32)
    length = float(np.linalg.norm(vector))
    if params.get("use_activation", True) and 0.0 < length < float("inf"):
        vector = vector / length
    return Completion([], vector=vector, prompt_tokens=answer.prompt_tokens)


def _key(run: str, shard: int, position: int, body: dict[str, Any]) -> str:
    """Return the idempotency key of a row's request; it is the same in each attempt at the run.

    Raises ValueError if the body cannot be sent as JSON in UTF-8, such as NaN or a lone surrogate.
    """
    json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # as it is sent
    parts: Sequence[object] = (run, shard, position, body)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
