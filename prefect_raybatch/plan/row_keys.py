"""Computes the request keys of all input rows, in this process or on the job's cluster.

A key also depends on a context (model, sampling and more, see `keying_of`), so an answer is never
reused for a request under another context.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError, StoreUnavailable
from prefect_raybatch.job.counted_fields import FREE_ENGINE_ARGUMENTS, counted_env
from prefect_raybatch.job.engine import TRY_FP8
from prefect_raybatch.job.secrets import hide_argument
from prefect_raybatch.ledger.records import JsonObject, Unit
from prefect_raybatch.model import adapters
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.plan.joining import PACKED_KEY, Join
from prefect_raybatch.plan.prefix_order import RANK, compared_text, sort_text, sorted_by_rank
from prefect_raybatch.source import Inventory
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.stages.block import Failure, input_columns, is_lost, losses
from prefect_raybatch.stages.calls.calling import Calls
from prefect_raybatch.stages.calls.isolated import NoChild
from prefect_raybatch.stages.columns import DIGESTS_TYPE, KEY, KEY_BYTES, KEY_TYPE
from prefect_raybatch.stages.images.rows import TOO_MANY_AWAY, Digests, TooManyAway, row_images
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.pooling import Pooling
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.request_key import Keying, context_of
from prefect_raybatch.stages.texts import prepare_of
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.stages.read import ShardReader

log = logging.getLogger(__name__)
ROWS_A_TASK = 1 << 16  # rows whose keys a task makes
ROWS_A_TASK_IMAGES = 1 << 12  # ... where it fetches their images
FIRST_ROWS = 64  # rows among which the reference for sorting prompts is searched
KEYED_AT_ONCE = 8192  # rows that are in memory together, fewer where they are wide
BYTES_AT_ONCE = 64 << 20
KEY_TASKS_A_CPU = 2  # so that no CPU waits for its next task
# Effort of a key, and of fetching its images, in equivalent bytes of result: decides on a cluster.
KEYED_ROW, FETCHED_IMAGE = 512, 16 << 10
NO_KEY = bytes(KEY_BYTES)
KEY_VERSION = 1  # raise it if keys are computed from other values


@dataclass(frozen=True)
class Keyed:
    """Request keys (`PACKED_KEY`) of consecutive rows, the first of which is row `start`.

    `row_is_valid` (bool): the row makes a request; `exact` (bool): equal requests share one answer.
    `digests` are hashes of the rows' images, an empty list if prompts have no images. `texts` are
    the rows' sort keys (`compared_text`), an empty list if requests are not ordered by their
    prompts.
    """

    start: int
    keys: np.ndarray
    row_is_valid: np.ndarray
    exact: np.ndarray
    digests: list[pa.Array]
    texts: list[pa.Array]


@dataclass(frozen=True)
class RowKeys:
    """Computes the request keys of a range of input rows, on any worker.

    Created on the driver and called with a row number, it computes the keys of `rows_a_task` rows
    from that row on, with `chunk` rows in memory at once. `pools` is true for a pooling task, whose
    answers are vectors. `reference` is the prompt with which `compared_text` compares every prompt;
    None if requests are not ordered by their prompts.

    It is sent to workers, so it holds only what they need; its only storage credentials are those
    for reading the input.
    """

    reader: ShardReader
    prepare: Prepare
    keying: Keying
    chunk: int
    rows_a_task: int
    pools: bool
    reference: bytes | None = None  # prompt that all are compared with

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        model: models.PinnedModel,
        inventory: Inventory,
        store: Store | None,
        keying: Keying,
        ordered: bool = False,
        too_many_away: float = TOO_MANY_AWAY,
    ) -> RowKeys:
        """Create the object that computes the keys of the rows of the input `inventory`.

        `model` is the pinned model, `keying` computes a row's key. `store` is the run's store if
        the files are a snapshot in it, else None. `ordered`: requests are ordered by their prompts.
        `too_many_away` is `RowImages.too_many`.
        """
        from prefect_raybatch.stages.read import ShardReader

        schema, prompt = inventory.schema, spec.prompt
        if not prompt.function:  # no other columns are needed
            wanted = {*prompt.columns, *prompt.image_columns} or {schema.names[0]}
            schema = pa.schema([field for field in schema if field.name in wanted])
        limits = spec.limits
        # In a child process: a function that ends its process would end the driver at each attempt.
        calls = Calls(limits.function_seconds or None, in_child=True, deaths=limits.engine_deaths)
        told = models.with_arguments(model, spec.engine.model)
        keys = dict(spec.read.options)
        prepare = prepare_of(
            Pooling.of(spec, told),
            prompt,
            spec.sampling,
            told,
            spec.engine.model.context,
            calls=calls,
            images=row_images(prompt, {}, keys, digests_alone=True, too_many=too_many_away),
            hosted=spec.engine.model.endpoint is not None,
        )
        reader = ShardReader(inventory.files, schema, store, keys if store is None else {})
        chunk = max(1, min(KEYED_AT_ONCE, int(BYTES_AT_ONCE / max(1.0, inventory.row_bytes))))
        rows = ROWS_A_TASK if prompt.images is None else ROWS_A_TASK_IMAGES
        made = cls(reader, prepare, keying, chunk, rows, spec.engine.model.pools)
        return replace(made, reference=made.first_text()) if ordered else made

    @property
    def rows(self) -> int:
        return self.reader.rows

    def add_to(self, join: Join, cluster: ClusterSpec, alone: bool = False) -> None:
        """Compute all keys and add them to `join`.

        Workers of `cluster` compute them if the input has enough rows to gain from it. With
        `alone`, this process computes them, because no other has the files.

        Raises `SourceError` for unreadable rows, `ConfigError` for a function that cannot be called
        and `StoreUnavailable` if many images cannot be fetched at the moment.
        """
        from prefect_raybatch.cluster.side_by_side import run_in_parallel, workers_for

        starts = range(0, self.rows, self.rows_a_task)
        effort = KEYED_ROW + (FETCHED_IMAGE if self.prepare.images is not None else 0)
        at_work = workers_for(cluster, self.rows * effort, "plan of what is reused")
        with nullcontext(0) if alone else at_work as workers:
            if workers > 1 and len(starts) > 1:
                log.info("Computing request keys on %s", counted(workers, "CPU"))
                made = run_in_parallel(self, iter(starts), KEY_TASKS_A_CPU * workers)
            else:
                made = map(self, starts)
            for keyed in made:
                join.add_rows(keyed.start, keyed.keys, keyed.row_is_valid, keyed.exact)
                if keyed.digests:
                    join.keep_digests(keyed.start, pa.concat_arrays(keyed.digests))
                if keyed.texts and join.prompts is not None:
                    join.prompts.add(keyed.start, pa.concat_arrays(keyed.texts))

    def __call__(self, start: int) -> Keyed:
        stop = min(self.rows, start + self.rows_a_task)
        keys: list[bytes | None] = []
        exact: list[bool] = []
        digests: list[pa.Array] = []
        texts: list[pa.Array] = []
        for at, table in self._tables(_chunks(start, stop, self.chunk)):
            requests, seen = self._requests(at, table)
            keys += self.keying.keys(requests, table)
            exact += [not isinstance(r, Failure) and self.keying.exact(r) for r in requests]
            digests += [pa.array(seen, DIGESTS_TYPE)] if self.prepare.images is not None else []
            if self.reference is not None:
                found = (compared_text(t, self.reference) for t in self._texts(requests, table))
                texts.append(pa.array(found, pa.binary()))
        packed = np.frombuffer(b"".join(key or NO_KEY for key in keys), PACKED_KEY)
        well = np.array([key is not None for key in keys], bool)
        return Keyed(start, packed, well, np.array(exact, bool), digests, texts)

    def first_text(self) -> bytes:
        """Return the first `sort_text` that is not empty in the first 64 rows; b"" if none is."""
        for _, table in self._tables([(0, min(self.rows, FIRST_ROWS))] if self.rows else []):
            return next(filter(None, self._texts(self.prepare.requests(table), table)), b"")
        return b""

    def _texts(self, requests: Sequence[ChatRequest | Failure], table: pa.Table) -> list[bytes]:
        adapters = self.keying.adapters_of(table)
        return [sort_text(*pair) for pair in zip(requests, adapters, strict=True)]

    def rows_to_ask(self, join: Join) -> Iterator[tuple[str, pa.Table]]:
        """Yield (description, table) of the rows that make a new request, with request keys.

        Rows that take another row's answer are left out. The rows are in the order of their ask
        numbers (see `Join`).
        """
        tables = self._rows_to_ask(join)
        if join.prompts is None:
            return ((what, table.drop_columns([RANK])) for what, table in tables)
        return sorted_by_rank(tables, join.asked, join.folder)

    def _rows_to_ask(self, join: Join) -> Iterator[tuple[str, pa.Table]]:
        """Yield (description, table) of the rows that make a new request, with request keys.

        The rows are in input order. Column RANK has the number of each row's new request (an ask,
        see `Join`). `rows_to_ask` yields the rows in the order of these numbers.
        """
        spans = [
            span
            for span in _chunks(0, self.rows, self.chunk)
            if join.leaders(span[0], span[1]).any()
        ]
        for start, table in self._tables(spans):
            mask = join.leaders(start, start + table.num_rows)
            keys = join.keys[start : start + table.num_rows][mask]
            rows = table.select(input_columns(table)).filter(pa.array(mask))
            column = pa.Array.from_buffers(
                KEY_TYPE, len(keys), [None, pa.py_buffer(keys.tobytes())]
            )
            numbers = join.numbers_of_leaders(start, start + table.num_rows)
            rows = rows.append_column(KEY, column).append_column(RANK, pa.array(numbers))
            yield "the requests", rows

    def _requests(
        self, start: int, table: pa.Table
    ) -> tuple[list[ChatRequest | Failure], list[Digests]]:
        try:
            return self.prepare.keyed_requests(table)
        except NoChild as error:
            raise ConfigError(f"cannot make the requests of the rows: {error}") from None
        except TooManyAway as error:
            raise StoreUnavailable(
                f"many images of the rows {start} to {start + table.num_rows - 1} cannot be "
                f"fetched now: {error}"
            ) from None

    def _tables(self, spans: list[tuple[int, int]]) -> Iterator[tuple[int, pa.Table]]:
        """Yield (first row, table) for each span, given as (first row, row after the last).

        Raises `SourceError` for rows that cannot be read.
        """
        units = [(Unit(i, 0, stop - start), start) for i, (start, stop) in enumerate(spans)]
        for task in self.reader.tasks(units, max(1, len(units))):
            for unit, table in zip(task.units, self.reader.read(task), strict=True):
                if is_lost(table):
                    raise SourceError(losses(table)[0].message)
                yield spans[unit.shard][0], table


def _chunks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(start, stop, size), stop]))


def keying_of(spec: RunSpec, model: PinnedModel) -> tuple[Keying, JsonObject]:
    """Return (keying, context) for requests to the pinned `model`.

    The keying computes request keys. The context has everything on which all keys depend, such as
    model and sampling, with secrets masked.
    """
    parts = _context(spec, model)
    keying = Keying.under(
        context_of(parts),
        model.get("adapters") or {},
        spec.prompt.adapter_column,
        sampling=parts["sampling"],
        # A user's logits processor may keep state, so equal requests may get different answers.
        merge=spec.engine.merge and not spec.engine.model.vllm_arguments.get("logits_processors"),
    )
    return keying, {**parts, "engine": hide_argument(parts["engine"], "engine")}


def _context(spec: RunSpec, model: PinnedModel) -> JsonObject:
    prompt, finish, request = spec.prompt, spec.finish, spec.engine.model
    sampling = dict(spec.sampling.fields)
    if request.pools:  # no token is sampled
        sampling = {**spec.sampling.pooling, "task": request.task}
    # As in the job: the precision that a trial chooses is recorded with the answers.
    undecided = {name: TRY_FP8 for tried in spec.engine.tries for name in tried}
    engine = {**request.vllm_arguments, **undecided}
    parts: dict[str, object] = {
        "version": KEY_VERSION,
        "engine.model": model["identity"],
        "engine.max_model_len": request.context,
        "engine": {k: v for k, v in sorted(engine.items()) if k not in FREE_ENGINE_ARGUMENTS},
        "sampling": sampling,
        "prompt.on_too_long": prompt.on_too_long,
    }
    chat = ("chat_template", "chat_template_kwargs", "prefill", "continue_final_message", "tools")
    for name in chat:
        if getattr(prompt, name):
            parts[f"prompt.{name}"] = getattr(prompt, name)
    if prompt.special_tokens_in_rows != "allow":  # keys from before this field existed stay valid
        parts["prompt.special_tokens_in_rows"] = prompt.special_tokens_in_rows
    if prompt.images is not None:  # limits are checked when keys are computed
        parts["prompt.images.resize"] = prompt.images.resize
    if request.endpoint is not None and request.endpoint.path != "chat/completions":
        parts["engine.endpoint.api"] = request.endpoint.path
    if finish.probabilities:  # requested together with the answer
        parts["output.probabilities"] = True
    if finish.parsing is not None and finish.parsing.reasoning:
        # It says where structured output begins, and whether a prompt leaves the reasoning open.
        parts["output.reasoning_parser"] = finish.parsing.reasoning
    if finish.parsing is not None and (sampling.get("stop") or prompt.function):
        parts["special_tokens"] = True  # vLLM detokenized, and kept the tokens that parsers need
    if adapters.named(request):
        parts["adapters"] = True  # such an engine also computes differently without one
    return parts | counted_env(request.env)
