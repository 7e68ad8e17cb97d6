"""The engine stage: prompt tokens to answer tokens. The only stage that names vLLM.

One actor per engine. Several blocks are in flight in it at once, so that the tail of one shard
overlaps the head of the next; `stepper` has the one thread that drives vLLM.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import pyarrow as pa

from prefect_raybatch import installed
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.answer_schema import schema_engine_fields
from prefect_raybatch.job.early_stop import may_stop_early
from prefect_raybatch.ledger.failures import ENGINE_DIED, Loss
from prefect_raybatch.model import adapters
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.memory import KV_CACHE_BYTES, describe, packed
from prefect_raybatch.sizing.roofline import Work
from prefect_raybatch.sizing.sizes import Sizing
from prefect_raybatch.spec.engine import EarlyStop, EngineFields, core_in_actor
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.stages import pooling
from prefect_raybatch.stages.adapted import Adapted, Adapter
from prefect_raybatch.stages.answer_logprobs import TokenLogprobs, steps_of
from prefect_raybatch.stages.block import (
    Failure,
    failures_of,
    is_passthrough,
    load_tokenizer,
    lost_block_like,
    timed,
    units_of,
    with_failures,
)
from prefect_raybatch.stages.columns import (
    ANSWERS,
    CACHED_TOKENS,
    CHANCES,
    CHAT,
    ENDS,
    ENGINE_BEGAN,
    FINISH,
    MERGED,
    MM,
    PARAMS,
    PROMPT_TOKENS,
    SECOND,
    STEPS,
    TEXTS,
    TOKENS,
    VECTOR,
    HiddenColumn,
)
from prefect_raybatch.stages.label_cutoff import LabelCutoff, grammar_bytes
from prefect_raybatch.stages.label_probabilities import LabelTokens
from prefect_raybatch.stages.load import Sampler
from prefect_raybatch.stages.meter import Meter
from prefect_raybatch.stages.order import adapter_keys, arrange, token_keys
from prefect_raybatch.stages.row_sampling import has_form
from prefect_raybatch.stages.vllm import (
    canary,
    forking,
    internals,
    multimodal,
    phases,
    process_note,
)
from prefect_raybatch.stages.vllm.shorter_start import MEASURED_ONCE, memory_settings
from prefect_raybatch.stages.whole_prompts import TOKENS_A_STEP, with_whole_prompts
from prefect_raybatch.words import error_text, storable

if TYPE_CHECKING:
    from prefect_raybatch.stages.vllm.stepper import Completion, Request, SteppedEngine

log = logging.getLogger(__name__)
PAUSE = 10.0  # seconds between two tries to start an engine
SAME = 0.95  # share of the planned GPU memory that is enough: a GPU has a little less than stated


CPU_DEFAULTS: EngineFields = {
    "enforce_eager": True,  # compiling takes half a minute and pays back little on a CPU
    "enable_prefix_caching": True,
}
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # vLLM's core in the actor's own process and on one thread: 2.6 ms of CPU a row against 4.9, a
    # start of 15 s against 45 s (two more processes would import vLLM), and a CPU core left for
    # the other stages. More speed comes from more engines, one for each CPU core. Figures:
    # docs/decisions/cpu-engines.md.
    forking.CORE_APART: "0",
    "OMP_NUM_THREADS": "1",
}
POOLING_ENV = {
    # Of a GPU's engine that pools: in the actor's own process a row costs 0.14 ms of CPU, not 0.33,
    # because neither its tokens nor its vector go to another process. More speed comes from more
    # engines. Figures: docs/decisions/embedding.md.
    forking.CORE_APART: "0",
}
GPU_DEFAULTS: EngineFields = {
    "enable_prefix_caching": True,
}

GIVEN_BACK = Loss("NodeLeaves", "returned before it was started, because its node is being drained")


@dataclass(frozen=True)
class EngineLaunch:
    """Everything that an engine actor needs.

    `arguments` are vLLM's EngineArgs without the model. `hang_seconds` limits one step of vLLM,
    None for no limit. `work`: the FLOPs and bytes that a token costs, None if unknown. `encodes`:
    the model is an encoder, which has no KV cache.

    With `engines_per_gpu` above 1, this engine takes only its share of the GPU. The arguments in
    `share` set the share; they were chosen for a GPU of `gpu_bytes`. The engine computes them
    itself if `share` is empty or the GPU has less memory.

    `sort` puts a block's rows in the best order for the engine; `merge` sends equal requests of a
    block once. `labels` are the labels whose probabilities are written. `early_stop`: when to stop
    generating an answer that is one of several labels (see `label_cutoff`).

    `done` (picklable) takes a shard's id and returns whether the shard is committed. `leaving`
    returns, in the actor, whether its node is being drained. `tell` is called with the progress of
    the engine's start.

    `attempt` is an id: an actor finds the note (`process_note`) that a dead actor with the same id
    left on its node. `untaken`: the engine is prewarmed; its run takes it over later.
    """

    model: models.PinnedModel
    sampling: SamplingFields
    arguments: EngineFields = field(repr=False)  # a token of Hugging Face may be among them
    env: dict[str, str] = field(default_factory=dict, repr=False)
    engines_per_gpu: int = 1
    gpu_bytes: int = 0
    share: EngineFields = field(default_factory=dict)
    done: Callable[[int], bool] | None = None
    sort: bool = True
    merge: bool = True
    hang_seconds: float | None = None
    attempt: str = ""
    adapted: Adapted = field(default_factory=lambda: Adapted(None))
    labels: tuple[str, ...] = ()
    early_stop: EarlyStop = "off"
    encodes: bool = False
    tell: phases.ReportStart | None = None
    work: Work | None = None
    leaving: Callable[[], bool] | None = None
    untaken: bool = False


def engine_launch(
    spec: RunSpec,
    model: models.PinnedModel,
    size: Sizing,
    done: Callable[[int], bool] | None = None,
    attempt: str = "",
    task: pooling.Pooling | None = None,
    tell: phases.ReportStart | None = None,
) -> EngineLaunch:
    """Return the launch settings of a run's engines; `task` is None for text generation.

    Every sizing argument is set explicitly: under Ray, vLLM's own defaults underuse a GPU.
    """
    cpu, request = size.pool.device == "cpu", spec.engine.model
    sampling = dict(spec.sampling.fields if task is None else task.fields)
    if spec.finish.parsing is not None:  # the marks that parsers look for may be special tokens
        sampling["skip_special_tokens"] = False
    arguments = dict(_arguments(spec, size, sampling))
    if task is not None:
        arguments = task.engine_arguments(arguments, request.vllm_arguments)
    arguments |= adapters.arguments(model.get("adapters") or {}, request.vllm_arguments)
    is_whole = cpu or spec.sizes.takes_whole_prompts
    if is_whole and task is None and request.endpoint is None:
        given = {TOKENS_A_STEP: spec.sizes.max_num_batched_tokens, **request.vllm_arguments}
        arguments = with_whole_prompts(
            *(arguments, given, sampling, spec.prompt.function is not None),
            lambda: size.length or models.own_length(model, request.vllm_arguments),
        )
    if size.pool.gpus_a_replica > 1:
        # If the run is in a Ray placement group, vLLM would take the group for the engine's own and
        # wait for GPUs in it that the engine's actor already holds.
        arguments.setdefault("distributed_executor_backend", "mp")
    return EngineLaunch(
        model=models.with_arguments(model, request),
        sampling=sampling,
        arguments=arguments,
        env=_environment(spec, size),
        engines_per_gpu=size.pool.engines_per_gpu,
        gpu_bytes=size.pool.gpu_bytes,
        share=size.share,
        done=done,
        sort=spec.engine.sort,
        # A user's logits processor may keep state, so that equal requests get other answers.
        merge=spec.engine.merge and not arguments.get("logits_processors"),
        hang_seconds=spec.limits.hang_seconds or None,
        attempt=attempt,
        adapted=Adapted(
            spec.prompt.adapter_column,
            model.get("adapters") or {},
            null=spec.prompt.on_null == "empty",
            alone=not cpu,
        ),
        labels=spec.sampling.labels,
        early_stop=spec.engine.early_stop if may_stop_early(arguments) else "off",
        encodes=task is not None and task.encodes,
        tell=tell,
        work=size.work,
    )


def _environment(spec: RunSpec, size: Sizing) -> dict[str, str]:
    """Return the environment variables of an engine: ours, and those that the job sets.

    A variable of ours that this process has set keeps its value.
    """
    request, gpus = spec.engine.model, size.pool.gpus_a_replica
    if size.pool.device == "cpu":
        ours = CPU_ENV
    else:
        ours = dict(memory_settings(request, gpus, spec.prompt.images is not None))
        if core_in_actor(request, gpus):
            ours |= POOLING_ENV
    return {**{name: os.environ.get(name, value) for name, value in ours.items()}, **request.env}


def _arguments(spec: RunSpec, size: Sizing, sampling: SamplingFields) -> EngineFields:
    """Return vLLM's engine arguments for a run of these sizes and `sampling` fields."""
    cpu = size.pool.device == "cpu"
    arguments = {**(CPU_DEFAULTS if cpu else GPU_DEFAULTS), **size.arguments.vllm()}
    if cpu and (dtype := models.cpu_dtype(spec.engine.model)) is not None:
        arguments["dtype"] = dtype
    if spec.prompt.images is not None:
        limits = {"limit_mm_per_prompt": spec.prompt.images.limits()}
        arguments = {**arguments, **multimodal.WITH_IMAGES, **limits}
    arguments = schema_engine_fields(arguments, spec.finish.schema)
    reasoning = spec.finish.parsing and spec.finish.parsing.reasoning
    asks = has_form(sampling) or sampling.get("thinking_token_budget") or spec.prompt.function
    if reasoning and asks:
        # vLLM must know where the thinking ends: a form applies only to the answer after it, and a
        # thinking budget only before. A prompt function may set either field.
        arguments.setdefault("reasoning_parser", reasoning)
    return arguments


class EngineStage:
    """A callable class for a Ray actor pool: block in, block out; never raises for a row.

    An engine that cannot start, or that died with the block in it, returns a `lost` block with the
    reason: Ray would retry an exception forever and lose its text.
    """

    sampler: Sampler | None = None
    _note = process_note.ProcessNote("")
    _early = LabelCutoff("off", lambda: None)
    _labels: LabelTokens | None = None
    _suspect: str | None = None  # why the latest engine died, if it had answered no row
    _adapters: Mapping[str, Adapter] = MappingProxyType({})
    _numbers: dict[str, int]  # adapter numbers by content hash, kept while the actor lives
    _marks = phases.StartMarks()
    _teller: phases.StartReporter | None = None
    _meter = Meter(None)

    def __init__(self, launch: EngineLaunch):
        self._lock = threading.Lock()
        self.engine: SteppedEngine | None = None
        self._numbers = {}
        self._bind(launch)
        self._prepare_process(launch)
        self.sampler = Sampler(self._load).start()
        # Started now and not at the first block: all engines load side by side while rows are
        # still being read.
        self.ready()

    def _prepare_process(self, launch: EngineLaunch) -> None:
        os.environ.update(launch.env)
        forking.begin_fork_server(launch.arguments)

    def _bind(self, launch: EngineLaunch) -> None:
        """Set everything that belongs to one run; read and delete a dead actor's `ProcessNote`."""
        self.launch, self._id = launch, uuid.uuid4().hex
        self._meter = Meter(launch.work)
        self._refused: Loss | None = None
        self._labels = None
        self._note = process_note.ProcessNote(launch.attempt)
        self._left = self._note.read_predecessor()
        self._early = LabelCutoff(launch.early_stop, self._token_bytes)

    def take_over(self, launch: EngineLaunch) -> None:
        """Switch to another run and keep the running engine.

        `launch` must equal the earlier one in everything that the engine was started with. No block
        may be in the engine.

        If the engine was prewarmed for this run, its start is reported as the run's own. If a
        prewarmed engine did not start, it is not tried again: the run's blocks are lost with the
        reason.
        """
        untaken, refused = self.launch.untaken, self._refused
        if untaken:
            self._note.remove_note()
        with self._lock:
            self._bind(launch)
            if untaken and self.engine is None:
                self._refused = refused
                return
            engine = self.engine
            taken = engine is not None and self._take_labels() and self._take_adapters()
            if engine is not None and not (taken and engine.stats()["died"] is None):
                self.engine = None
                engine.close()
        if self.ready() is not engine or engine is None:
            return
        self._meter.begin(engine)
        if self._early.concerns(launch.sampling):
            self._early.ready()
        if untaken:  # a thread already reports its start
            self._note.write(process_note.ROWS)
            return
        self._marks = phases.StartMarks.of_warm()
        self._tell(lambda: 0.0)

    def close(self) -> None:
        """End the engine, so that its GPU is free."""
        with self._lock:
            engine, self.engine = self.engine, None
        if self._teller is not None:
            self._teller.end()
        if engine is not None:
            engine.close()

    def ready(self) -> SteppedEngine | None:
        """Return the live engine; start one if there is none.

        Return None if no engine starts: `_refused` has the reason.
        """
        with self._lock:
            if self.engine is None and self._refused is None:
                self._begin()
            return self.engine

    def _begin(self) -> None:
        """Start an engine, reporting its progress."""
        self._marks = phases.StartMarks()
        teller = self._tell(self._stepped_at)
        self._begin_working()
        if self.engine is None:
            teller.end()

    def _tell(self, stepped: Callable[[], float]) -> phases.StartReporter:
        """Start a thread that reports this engine's start, and end the thread of an earlier one.

        `stepped` returns when the engine's first step ended (seconds since 1970), 0 before that.
        """
        if self._teller is not None:
            self._teller.end()
        self._teller = phases.StartReporter(self.launch.tell, self._marks, stepped, self._id)
        return self._teller.start()

    def _stepped_at(self) -> float:
        engine = self.engine
        return 0.0 if engine is None else float(engine.stats().get("stepped_at", 0.0))

    def _begin_working(self) -> None:
        """Start an engine, and test it (`_prove`) if an earlier one died before it answered a row.

        If there is no engine afterwards, `_refused` has the reason.
        """
        if not (self._take_labels() and self._take_adapters()):
            return
        left, self._left = self._left, None
        starts = prompts = 1
        if left is not None:  # the note of an actor that died and that this one replaces
            self._refused = canary.loss_by_note(left)
            if self._refused is not None:
                return
            self._suspect = left.cause
            starts += left.times if left.doing == process_note.START else 0
            prompts += left.times if left.doing == process_note.PROMPT else 0
        self._note.write(process_note.START, starts, self._suspect or "")
        if self._early.concerns(self.launch.sampling):  # before rows wait for it
            self._early.ready()
        self.start()
        if self._suspect is not None:
            self._prove(self._suspect, prompts)
        if self.engine is None:
            self._note.remove_note()
        else:
            self._note.write(process_note.ROWS)

    def _take_labels(self) -> bool:
        """Tokenize the labels if the job asks for their probabilities.

        Return False if that fails: `_refused` says why.
        """
        if self.launch.labels and self._labels is None:
            try:
                place = models.tokenizer_place(self.launch.model)
                self._labels = LabelTokens.of(load_tokenizer(*place), self.launch.labels)
            except Exception as error:
                name = self.launch.model.get("tokenizer") or self.launch.model["source"]
                text = f"the tokenizer of {name} cannot encode the labels of sampling.choice"
                self._refused = _refusal(error, f"{text}: {error}")
                return False
        return True

    def _take_adapters(self) -> bool:
        """Copy the run's adapters to this node. Return False if that fails: `_refused` says why."""
        try:
            self._adapters = self.launch.adapted.copy_to_node(self._numbers)
        except Exception as error:
            self._refused = _refusal(error, str(error))
            return False
        return True

    def _prove(self, cause: str, first: int = 1) -> None:
        """Send the new engine the health-check prompt, after one died of `cause` without an answer.

        If the engine answers, return. If it dies of the same error as the engine before, or in try
        `PROMPT_TRIES`, give up: `_refused` says so. If it dies of another error, start another
        engine and try again; `first` is the number of the first try. Blocks wait meanwhile, so that
        none is lost and no row is blamed.
        """
        from prefect_raybatch.stages.vllm.stepper import EngineDied, Request

        fields = canary.fields_for(self.launch.sampling)
        for attempt in range(first, canary.PROMPT_TRIES + 1):
            if self.engine is None:  # it did not start, and `_refused` says why
                return
            self._note.write(process_note.PROMPT, attempt, cause)
            try:
                self.engine.run([Request(canary.CANARY_PROMPT, fields)])
            except EngineDied as death:
                log.error("the engine crashed on the health-check prompt: %s", death)
                self.engine = None
                if attempt == canary.PROMPT_TRIES or canary.is_same_error(cause, str(death)):
                    self._refused = canary.fatal_loss(str(death))
                    return
                cause = str(death)
                self.start()
            else:
                self._suspect = None
                return

    def start(self) -> None:
        """Start an engine, if need be in several tries; if all fail, `_refused` has the reason."""
        from prefect_raybatch.stages.vllm.stepper import SteppedEngine

        for attempt in range(canary.ENGINE_STARTS):
            try:
                with self._marks.capture_phases():
                    self.engine = SteppedEngine(self.arguments(), self.launch.hang_seconds)
                # Clear the error of an earlier try: with it, no engine is started after a death.
                self._refused = None
                return
            except Exception as error:
                log.exception("the engine did not start (attempt %d)", attempt + 1)
                said = error_text(error)
                if unfit := installed.misfits_line():  # vLLM's own message names no package
                    said += f"; {unfit}"
                self._refused = _refusal(error, said)
                # Wrong arguments stay wrong; a RuntimeError may be memory that a dying engine
                # has not given back yet, and any error may come from memory measured long ago.
                measured = os.environ.get(MEASURED_ONCE) == "1"
                again = isinstance(error, RuntimeError) or measured or not self._refused.fatal
                if not again or attempt + 1 == canary.ENGINE_STARTS:
                    return
                if measured:
                    os.environ[MEASURED_ONCE] = "0"
                time.sleep(PAUSE)

    def arguments(self) -> EngineFields:
        """Return all engine arguments: the run's, those for a share of a GPU, and the model."""
        path = models.local_path(self.launch.model)
        arguments = self.launch.arguments
        if self.launch.engines_per_gpu > 1:
            arguments = {**arguments, **self._share()}
        return {**arguments, "model": path, "revision": self.launch.model.get("revision")}

    def _share(self) -> EngineFields:
        """Return the engine arguments for this engine's share of the GPU.

        These are the planned ones. They are computed anew if the plan did not know the GPU, or if
        the GPU has less memory than the planned one.
        """
        there, share = internals.gpu_bytes(), self.launch.share
        if not share or there < SAME * self.launch.gpu_bytes:
            config, stored = models.read_config(self.launch.model)
            model = describe(config, self.launch.arguments, stored)
            arguments = EngineArguments.of(self.launch.arguments)
            share = packed(model, arguments, there, self.launch.engines_per_gpu)
        if self.launch.encodes:
            return {name: value for name, value in share.items() if name != KV_CACHE_BYTES}
        return share

    def __call__(self, table: pa.Table) -> pa.Table:
        """Answer the valid rows of a block; add answers, finish reasons and token counts.

        Returns a lost block if there is no engine, if it dies meanwhile, if the node is being
        drained, or if another version of vLLM prepared the images. Returns an empty block if its
        shards are committed already.
        """
        from prefect_raybatch.stages.vllm.stepper import EngineDied

        table = self.without_committed(table)
        if is_passthrough(table):
            return table
        if MM in table.column_names and (refusal := multimodal.other_version(table[MM])):
            return lost_block_like(table, refusal)
        began = time.time()
        engine = self.ready()
        if engine is None:
            return lost_block_like(
                table, self._refused or Loss("", "the engine did not start", True)
            )
        try:
            answers = self._ask(engine, table)
        except EngineDied as death:
            with self._lock:
                first = self.engine is engine  # this block is the first that this death costs
                if first:
                    self.engine = None
                    self._suspect = None if answered_any(engine) else str(death)
            return lost_block_like(table, Loss(ENGINE_DIED, str(death), counted=not first))
        if any(answer.error is None for _, _, answer in answers):
            self._note.remove_note()
            if self._teller is not None:
                self._teller.answered()
        table = answered(table, answers, began, self._labels)
        if self.sampler is not None:
            table = self.sampler.add_stats(table, began, self._meter.take_stats(engine))
        return timed(table, "engine", began)

    def _ask(self, engine: SteppedEngine, table: pa.Table) -> list[pooling.RowAnswer]:
        """Have the engine answer a block's valid rows; return [(row, rows, answer), ...].

        `row` is the row whose request was sent, `rows` those that get the answer, `row` included.
        If the job merges requests, equal requests whose answers are certain to be equal are sent
        once. A row with an unknown adapter is not sent; its answer is an error.
        """
        from prefect_raybatch.stages.vllm.stepper import Request

        spec, pools = self.launch, "task" in self.launch.sampling
        sampling = self._labels.with_logprobs(spec.sampling) if self._labels else spec.sampling
        params = [fields_of(sampling, own) for own in table[PARAMS].to_pylist()]
        well = [i for i, failure in enumerate(failures_of(table)) if failure is None]
        under, unknown = spec.adapted.row_adapters(table, self._adapters)
        refused = [(i, [i], pooling.failed_completion(unknown[i])) for i in well if i in unknown]
        well = [i for i in well if i not in unknown]
        sides = [table[name] for name in (TOKENS, SECOND) if name in table.column_names]
        numbers = [adapter[1] if adapter else 0 for adapter in under]
        prompts = [side.to_pylist() for side in sides]
        keys = [adapter_keys(token_keys(side), numbers) for side in sides]
        seen: list[pa.Buffer | None] = [None] * table.num_rows
        if MM in table.column_names:
            keys[0], seen = multimodal.with_image_features(keys[0], table[MM])

        def request(i: int, side: int = 0) -> Request:
            return Request(prompts[side][i], params[i], under[i], seen[i])

        if len(sides) > 1:
            run = partial(self._meter.run, engine)
            made = pooling.ask_pairs(run, request, keys, params, well, spec.sort, spec.merge)
        else:
            asked = arrange(keys[0], params, well, spec.sort, spec.merge)
            done = self._answers(engine, [request(i) for i in asked.rows])
            made = list(zip(asked.rows, map(asked.served, asked.rows), done, strict=True))
        return [*(pooling.without_misfits(made) if pools else made), *refused]

    def _answers(self, engine: SteppedEngine, requests: list[Request]) -> list[Completion]:
        """Return the engine's answers to the requests, in their order.

        If the job asks for label probabilities, each request is followed by one more request for
        each later fork of the labels (`label_probabilities.Fork`). `Completion.later` has the log
        probabilities of the possible tokens at each of these forks.
        """
        labels, run = self._labels, partial(self._meter.run, engine)
        if labels is None or not labels.later:
            return self._early.run(run, requests)
        each = [[one, *_further(one, labels)] for one in requests]
        done = iter(self._early.run(run, [one for some in each for one in some]))
        made = []
        for some in each:
            answer, *later = [next(done) for _ in some]
            error = next((one.error for one in later if one.error is not None), None)
            told = [one.logprobs or {} for one in later]
            made.append(replace(answer, later=told, error=answer.error or error))
        return made

    def _token_bytes(self) -> Sequence[bytes] | None:
        return grammar_bytes(load_tokenizer(*models.tokenizer_place(self.launch.model)))

    def _load(self) -> dict[str, float]:
        engine = self.engine
        return {} if engine is None else engine.load()

    def without_committed(self, table: pa.Table) -> pa.Table:
        """Return the block if it must still be answered, an empty one if its shards are committed.

        Returns a lost block if the node is being drained, so that another engine gets its rows.
        Another driver may have committed the shards meanwhile. The read stage checks for that too,
        but blocks can wait for a long time between that stage and this one.
        """
        if is_passthrough(table):
            return table
        if self.launch.leaving is not None and self.launch.leaving():
            return lost_block_like(table, GIVEN_BACK)
        if self.launch.done is None:
            return table
        try:
            if all(self.launch.done(unit.shard) for unit in units_of(table)):
                return table.slice(0, 0)
        except RayBatchError as error:
            # the check only saves work: put-if-absent decides which commit counts
            log.info("cannot check whether the shard is committed: %s", error)
        return table


def _refusal(error: Exception, message: str) -> Loss:
    """Return why there is no engine, given the error of its start.

    The loss is fatal, so that the run ends, unless the error is a transient one of this package,
    such as an outage of a store. Errors of other packages are fatal even if they may be transient,
    because most come from wrong settings.
    """
    outage = isinstance(error, RayBatchError) and error.transient
    return Loss(type(error).__name__, message, fatal=not outage)


def answered_any(engine: SteppedEngine) -> bool:
    """Return whether an engine has answered any request, not counting those that vLLM refused.

    Requests answered in a call during which the engine then died count too.
    """
    stats = engine.stats()
    return bool(stats["rows"] > stats["refused"])


ANSWER_COLUMNS = (ANSWERS, TEXTS, FINISH, PROMPT_TOKENS, CACHED_TOKENS, MERGED, ENDS)


def _further(request: Request, labels: LabelTokens) -> list[Request]:
    """Return the extra requests of a row's `request`, one for each later fork of the labels."""
    prompt = list(request.prompt_token_ids)
    return [
        replace(request, prompt_token_ids=[*prompt, *tokens], params=fields)
        for tokens, fields in labels.further_requests(request.params)
    ]


UNTOLD = Failure(
    "engine",
    "ProbabilitiesMissing",
    "vLLM returned no probability for any label. Retry the row, or remove output.probabilities",
)


def fields_of(sampling: SamplingFields, own: str | None) -> SamplingFields:
    """Return a row's sampling fields: the job's, updated by the row's own (JSON)."""
    return {**sampling, **json.loads(own)} if own else sampling


def answered(
    table: pa.Table,
    answers: Sequence[pooling.RowAnswer],
    began: float,
    labels: LabelTokens | None = None,
) -> pa.Table:
    """Return a prepared block with columns for its answers in place of the engine's input columns.

    `answers` are (row whose request was sent, rows that get its answer, answer). `began` is when
    the block reached the engine, in seconds since 1970. With `labels`, a column has the probability
    of each label.
    """
    failures = failures_of(table)
    columns: dict[HiddenColumn, list[object]] = {c: [None] * table.num_rows for c in ANSWER_COLUMNS}
    chances: list[list[tuple[str, float]] | None] = [None] * table.num_rows
    steps: list[list[list[TokenLogprobs]] | None] = [None] * table.num_rows
    for row, served, completion in answers:
        for i in served:
            if completion.error:
                kind, message = completion.error
                failures[i] = Failure("engine", kind, storable(message))
                continue
            if labels is not None:
                chances[i] = labels.probabilities(completion.logprobs or {}, completion.later)
                if chances[i] is None:
                    failures[i] = UNTOLD
                    continue
            if completion.steps is not None:
                steps[i] = steps_of(completion.steps)
            elif completion.named_steps is not None:
                steps[i] = completion.named_steps
            columns[ANSWERS][i] = completion.token_ids
            columns[TEXTS][i] = completion.texts
            columns[FINISH][i] = completion.finish_reason
            columns[MERGED][i] = i != row
            columns[ENDS][i] = completion.finish_reasons
            columns[PROMPT_TOKENS][i] = completion.prompt_tokens
            if i == row:  # cached tokens count once, for the row whose request was sent
                columns[CACHED_TOKENS][i] = completion.cached_tokens
    if any(completion.vector is not None for _, _, completion in answers):
        table = table.append_column(VECTOR, pooling.column(table.num_rows, answers))
    used = [name for name in (TOKENS, CHAT, SECOND, MM, PARAMS) if name in table.column_names]
    table = with_failures(table.drop_columns(used), failures)
    for column, values in columns.items():
        table = column.add_to(table, values)
    if labels is not None:
        table = CHANCES.add_to(table, chances)
    if any(row is not None for row in steps):
        table = STEPS.add_to(table, steps)
    return ENGINE_BEGAN.add_to(table, [began] * table.num_rows)
