"""One vLLM engine driven by one thread: tokens in, final answers out, little Python in between.

`SteppedEngine` steps vLLM's synchronous `LLMEngine` itself. A row costs one `add_request` and one
finished output: no asyncio task, no queue and no wake-up per row. These limit the other ways of
driving vLLM (about 1 ms of Python a row, on one CPU core, however fast the GPU is).

The engine core is in its own process (vLLM's default) or in this one (environment variable
VLLM_ENABLE_V1_MULTIPROCESSING=0).
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prefect_raybatch.exit_codes import exit_text
from prefect_raybatch.job.vllm.structured_outputs import label_form
from prefect_raybatch.spec.engine import EngineFields
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.vllm import internals, multimodal
from prefect_raybatch.stages.vllm.engine_errors import EngineErrors, with_signal
from prefect_raybatch.stages.vllm.forking import core_apart
from prefect_raybatch.stages.vllm.hang import HANG_LOOK, HangWatch, end_process
from prefect_raybatch.stages.vllm.internals import LLMEngine, Params, RequestOutput, SchedulerStats
from prefect_raybatch.stages.vllm.plugin import allow, register
from prefect_raybatch.words import error_text

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    import numpy as np

    from prefect_raybatch.stages.answer_logprobs import TokenLogprobs

WINDOW = 3
"""Sequences that vLLM holds at most, running or queued, in multiples of `max_num_seqs`.

More than 1, so that the next caller's rows are ready when the last rows of the first caller leave
slots free.
"""

FEATURE_BYTES = 256 << 20
"""From this many bytes of prepared images, vLLM gets no more than `max_num_seqs` sequences.

vLLM keeps the images of a request until the request is answered.
"""

PARAMS_KEPT = 1024
"""Most vLLM parameter objects that an engine caches; the least recently used is dropped first."""

START_LIMIT = "VLLM_ENGINE_READY_TIMEOUT_S"  # vLLM's variable; its default is 600

START_LOCK = threading.Lock()  # an engine's processes are the children that a start adds


class EngineDied(Exception):
    """The engine died, or was closed, with requests in flight; the message carries the cause.

    Which request was the cause is unknown. The `SteppedEngine` is closed: start another one.
    """


@dataclass(slots=True)
class Request:
    """One prompt for the engine.

    prompt_token_ids: token ids of the whole prompt, 1 to `max_model_len` - 1 of them.
    params: fields of vLLM's `SamplingParams`; `choice: [str, ...]` is short for
        `structured_outputs: {"choice": [...]}`. `output_kind` is always FINAL_ONLY, and
        `detokenize` is off unless set here or needed by `stop`. With `task` (embed, classify)
        they are fields of vLLM's `PoolingParams`, and the answer is a vector.
    adapter: (name, number from 1 on, local folder) of its LoRA adapter. In one engine, no two
        adapters may have the same name, number or folder. None for the base model.
    features: its images as `multimodal.Renderer` prepared them, None for text alone.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingFields = field(default_factory=dict)
    adapter: tuple[str, int, str] | None = None
    features: bytes | memoryview | None = None


@dataclass(slots=True)
class Completion:
    """The outcome of one request: either answers or an `error`.

    token_ids: one list of generated ids for each of the `n` answers, the end token included.
    texts: one text for each answer where vLLM had to detokenize (stop strings), else None.
    finish_reason: vLLM's `stop` or `length`. With several answers, the first reason that is not
        `stop`, so that a truncated answer shows. None with an error.
    logprobs: {token id: log probability} at the first answer's first token, if the request sets
        `logprob_token_ids`.
    steps: {token id: log probability} of each token of each answer, if the request sets `logprobs`.
    named_steps: like `steps`, but from a hosted model, which names tokens by their texts.
    later: `logprobs` of the extra requests that `label_probabilities` sent for this row.
    finish_reasons: the finish reason of each answer, if there are several.
    prompt_tokens, cached_tokens: the prompt's length, and the part of it that was in the prefix
        cache, in tokens.
    error: (class, message) of the error if vLLM refused or aborted the request.
    vector: the answer of a pooling request, float32[dimension].
    """

    token_ids: list[list[int]]
    texts: list[str] | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: tuple[str, str] | None = None
    finish_reasons: list[str | None] | None = None
    logprobs: dict[int, float] | None = None
    later: list[dict[int, float]] = field(default_factory=list)
    steps: list[list[dict[int, float]]] | None = None
    named_steps: list[list[TokenLogprobs]] | None = None
    vector: np.ndarray | None = None


class _Call:
    """One `run()` in progress: its requests, the answers so far, and its event `done`.

    `cursor` is the index of the next request to hand to vLLM, `missing` the number of answers still
    to come. The caller waits for `done`.
    """

    __slots__ = (
        *("adapters", "answers", "cursor", "died", "done", "features", "missing", "params"),
        "prompts",
    )

    def __init__(
        self,
        prompts: list[list[int]],
        params: list[Params | Exception],
        adapters: list[tuple[str, int, str] | None],
        features: list[bytes | memoryview | None],
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.adapters = adapters
        self.features = features
        self.answers: list[Completion | None] = [None] * len(prompts)
        self.cursor = 0
        self.missing = len(prompts)
        self.done = threading.Event()
        self.died: str | None = None


class SteppedEngine:
    """A vLLM engine and the one thread that feeds and steps it.

    engine_kwargs: fields of vLLM's `EngineArgs` (`model`, `max_model_len`, `max_num_seqs`, ...).
        Unless `disable_log_stats` is given, vLLM's scheduler collects statistics (once a step),
        but its front end in this process does not, because that costs Python time per token.
    hang_seconds: the time limit of a step, twice that until the engine's first answer. After it,
        the engine counts as hung and dead: its processes are killed. If the engine core is in
        this process, this process ends itself (`hang.end_process`). None: no limit.

    The constructor returns when the engine is ready and raises whatever vLLM raises. Engine
    processes die with this one, even after `kill -9` (see `reaper`).
    """

    def __init__(self, engine_kwargs: EngineFields, hang_seconds: float | None = None) -> None:
        from prefect_raybatch.stages.vllm.reaper import watch_children

        watch_children()
        self._wake = threading.Condition()  # guards everything below
        self._waiting: deque[_Call] = deque()  # calls with requests not handed to vLLM yet
        self._in_flight: dict[str, tuple[_Call, int, Params]] = {}  # by vLLM's request id
        self._sequences = 0  # in flight: each request counts once per answer
        self._features: dict[str, int] = {}  # image bytes of requests in flight, by id
        self._closing = False
        self._died: str | None = None
        self._cleaned = False
        self._params: OrderedDict[str, Params | Exception] = OrderedDict()
        self._count = 0
        self._stats = dict.fromkeys(
            ("rows", "refused", "prompt_tokens", "cached_tokens", "output_tokens", "steps"), 0
        )
        self._busy_s = self._feed_s = 0.0
        self._stepped_at = 0.0  # when the first step ended, in seconds since 1970
        self._inside = 0.0  # when the thread last called vLLM; 0 while it has no work
        self._hang = HangWatch(hang_seconds)
        self._engine: LLMEngine | None = None
        self._scheduler_stats: SchedulerStats | None = None  # the latest; None if off
        self._processes: list[BaseProcess] = []
        self._errors = EngineErrors()
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        # The engine is created on the thread that steps it: OpenMP's and torch's thread settings
        # are per thread, and with the core in this process that thread runs the model.
        self._thread = threading.Thread(
            target=self._main, args=(engine_kwargs,), name="SteppedEngine", daemon=True
        )
        self._thread.start()
        limit = _start_limit()
        if not self._started.wait(limit):
            end_process(f"the engine's start hung: it was not over after {limit:g} s")
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error
        # A thread inside vLLM while the interpreter is torn down can crash it.
        atexit.register(self.close)

    # What callers use -----------------------------------------------------------------------------

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests, in their order; blocks until the last is done. Thread-safe.

        Rows of several callers share the engine, first come first served. A request that vLLM
        refuses gets `Completion.error` and disturbs no other.

        Raises EngineDied if the engine is dead or closed, or becomes so before the last answer.
        """
        prompts = [_as_list(request.prompt_token_ids) for request in requests]
        params = self._prepare_params(requests)
        call = _Call(
            prompts,
            params,
            [request.adapter for request in requests],
            [request.features for request in requests],
        )
        if not requests:
            return []
        with self._wake:
            if self._died is not None:
                raise EngineDied(self._died)
            self._waiting.append(call)
            self._wake.notify_all()
        call.done.wait()
        if call.died is not None:
            raise EngineDied(call.died)
        return call.answers  # type: ignore[return-value]  # all filled, or the call had died

    def close(self) -> None:
        """Stop the thread and the engine's processes; callers in flight get EngineDied.

        Idempotent. Waits up to 15 s for a step in progress, then ends the engine regardless.
        """
        atexit.unregister(self.close)
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._fail("the engine was closed")
        if self._thread is not threading.current_thread():
            self._thread.join(15)
            if self._thread.is_alive():  # stuck inside vLLM: end what it waits for
                self._shutdown()

    def stats(self) -> dict[str, Any]:
        """Return totals since the start.

        rows: requests answered; refused: the number of these that vLLM refused or aborted;
        prompt_tokens, cached_tokens, output_tokens; steps: calls of vLLM's step; busy_s: seconds
        with requests in flight; feed_s: the part of busy_s spent on handing requests over;
        in_flight: requests inside vLLM; waiting: requests not handed over yet; died: None or the
        cause; stepped_at: when the first step was over, in seconds since 1970, 0 before.
        """
        with self._wake:
            waiting = sum(len(call.prompts) - call.cursor for call in self._waiting)
            return {
                **self._stats,
                "busy_s": self._busy_s,
                "feed_s": self._feed_s,
                "in_flight": len(self._in_flight),
                "waiting": waiting,
                "died": self._died,
                "stepped_at": self._stepped_at,
            }

    def load(self) -> dict[str, float]:
        """Return the engine's current load; {} once it is closed.

        running, waiting: numbers of sequences; sequences: the most that may run at once; steps:
        number of steps since the start; kv_cache: share of the KV cache in use.
        The figures come from vLLM. With `disable_log_stats: true` and the core in another process,
        `running` is an upper limit (the sequences that vLLM holds, at most as many as may run at
        once), and kv_cache is missing.
        """
        engine = self._engine
        if engine is None:
            return {}
        with self._wake:
            held, steps = self._sequences, self._stats["steps"]
            outside = sum(len(call.prompts) - call.cursor for call in self._waiting)
        most = self._window // WINDOW
        running = min(held, most)
        found: dict[str, float] = {"steps": steps, "sequences": most}
        in_use = internals.running(engine, self._scheduler_stats)
        if in_use is not None:
            running, found["kv_cache"] = in_use
        return {**found, "running": running, "waiting": max(0, held - running) + outside}

    def __enter__(self) -> SteppedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Sampling parameters --------------------------------------------------------------------------

    def _prepare_params(self, requests: Sequence[Request]) -> list[Params | Exception]:
        """Return vLLM's params for each request, or the exception that building them raised.

        Equal dicts share one object. A dict that several requests share is looked up once.
        """
        by_identity: dict[int, Params | Exception] = {}
        result = []
        for request in requests:
            found = by_identity.get(id(request.params))
            if found is None:
                found = by_identity[id(request.params)] = self._lookup_params(request.params)
            result.append(found)
        return result

    def _lookup_params(self, params: SamplingFields) -> Params | Exception:
        try:
            key = json.dumps(params, sort_keys=True)
        except (TypeError, ValueError):  # holds an object: no key, so nothing to share
            return _guarded_params(params)
        with self._wake:
            found = self._params.get(key)
            if found is not None:
                self._params.move_to_end(key)
                return found
        made = _guarded_params(params)
        with self._wake:
            self._params[key] = made
            if len(self._params) > PARAMS_KEPT:
                self._params.popitem(last=False)
        return made

    # The thread -----------------------------------------------------------------------------------

    def _main(self, engine_kwargs: EngineFields) -> None:
        try:
            self._start(engine_kwargs)
        except BaseException as error:  # handed to the constructor, which raises it
            if internals.gpu_is_lost():  # another try in this process would fail, too
                end_process(f"the engine did not start: {_describe(error)}")
            self._start_error = self._explained(error)
            self._fail(f"the engine did not start: {self._start_error}")
            self._shutdown()
            return
        finally:
            self._started.set()
        try:
            self._loop()
        except BaseException as error:
            if not self._processes:
                if internals.gpu_is_lost():  # no engine can start in this process
                    end_process(f"the engine died: {_describe(error)}")
                # First: callers that learn of the death start an engine in this process at once.
                self._shutdown()
            self._fail(self._cause(error))
        finally:
            self._shutdown()

    def _cause(self, error: BaseException) -> str:
        """Return a message with the cause of the engine's death; `error` is what vLLM raised."""
        if internals.engine_is_gone(error):
            for process in self._processes:
                process.join(2)
                if process.exitcode is not None:
                    return self._how_it_ended(process)
            return self._errors.read() or _describe(error)
        return _describe(error)

    def _how_it_ended(self, process: BaseProcess) -> str:
        """Describe how an engine process ended: by a signal, or with an error that it logged."""
        end = _end_of(process)
        # vLLM ends the remaining processes of a failed engine by these two signals.
        ended_so = (None, -signal.SIGTERM, -signal.SIGKILL)
        own = process.exitcode not in ended_so and process.exitcode < 0
        return end if own else self._errors.read() or end

    def _explained(self, error: BaseException) -> BaseException:
        """Return `error`, which vLLM's start raised, with the cause from vLLM's log added.

        Returns `error` itself if nothing is to add, or if it is no RuntimeError.
        """
        words = self._errors.read()
        text = with_signal(f"{error}: {words}" if words else str(error))
        if not isinstance(error, RuntimeError) or text == str(error):
            return error
        made = RuntimeError(text)
        made.__cause__ = error
        return made

    def _start(self, engine_kwargs: EngineFields) -> None:
        import multiprocessing

        allow(os.environ)  # for the processes that vLLM starts
        arguments = dict(engine_kwargs)
        no_stats = arguments.pop("disable_log_stats", None)
        with START_LOCK, self._errors.capture():
            register()  # in this process too, even if vLLM may load no plugins
            before = {process.pid for process in multiprocessing.active_children()}
            engine = self._engine = internals.start(
                {**arguments, "disable_log_stats": bool(no_stats)}
            )
            self._processes = [
                process
                for process in multiprocessing.active_children()
                if process.pid not in before
            ]
        self._window = WINDOW * internals.most_sequences(engine)
        if not no_stats:
            front = no_stats is not None  # set to false: vLLM's own statistics stay on
            internals.keep_scheduler_stats(engine, self._keep_stats, front)
        # vLLM's own step() hangs for ever when its core is killed with SIGKILL (tried, 0.29).
        threading.Thread(target=self._watch, name="SteppedEngineWatch", daemon=True).start()

    def _keep_stats(self, stats: SchedulerStats) -> None:
        self._scheduler_stats = stats

    def _loop(self) -> None:
        engine, wake = self._engine, self._wake
        while engine is not None:
            with wake:
                while not (self._waiting or self._in_flight or self._closing or self._died):
                    self._inside = 0.0
                    wake.wait()
                if self._closing or self._died:
                    self._inside = 0.0
                    return
            start = self._inside = time.perf_counter()
            self._feed(engine)
            fed = self._inside = time.perf_counter()
            outputs = engine.step() if self._in_flight else ()
            finished: list[_Call] = []
            with wake:
                for output in outputs:
                    if output.finished:
                        self._take(output, finished)
                self._stats["steps"] += 1
                self._stepped_at = self._stepped_at or time.time()
                self._feed_s += fed - start
                self._busy_s += time.perf_counter() - start
            for call in finished:
                call.done.set()

    def _feed(self, engine: LLMEngine) -> None:
        """Hand requests to vLLM, oldest call first, until it holds `self._window` sequences.

        Stops earlier if the images of its requests take too much memory (`_has_room`).
        """
        while self._waiting and self._sequences < self._window and self._has_room():
            call = self._waiting[0]
            position = call.cursor
            call.cursor += 1
            if call.cursor == len(call.prompts):
                with self._wake:
                    self._waiting.popleft()
            params = call.params[position]
            if isinstance(params, Exception):
                self._refuse(call, position, params)
                continue
            request_id = str(self._count)
            self._count += 1
            self._in_flight[request_id] = (call, position, params)
            self._sequences += internals.sequences(params)
            adapter = call.adapters[position]
            more = {} if adapter is None else {"lora_request": internals.lora_request(*adapter)}
            features, call.features[position] = call.features[position], None
            if features is not None:
                self._features[request_id] = memoryview(features).nbytes
            try:
                engine.add_request(
                    request_id,
                    multimodal.engine_input(call.prompts[position], features),
                    params,
                    **more,
                )
            except Exception as error:
                if internals.engine_is_gone(error):
                    raise
                self._in_flight.pop(request_id, None)
                self._features.pop(request_id, None)
                self._sequences -= internals.sequences(params)
                self._refuse(call, position, error)
                continue
            internals.accept_always(params)

    def _has_room(self) -> bool:
        """Return whether the images of the requests in vLLM leave memory for another request."""
        if self._sequences < self._window // WINDOW or not self._features:
            return True
        return sum(self._features.values()) < FEATURE_BYTES

    def _take(self, output: RequestOutput, finished: list[_Call]) -> None:
        """Turn a finished vLLM output into a Completion of its call.

        If it was the last missing answer of the call, append the call to `finished`.
        """
        entry = self._in_flight.pop(output.request_id, None)
        if entry is None:  # its call was given up
            return
        call, position, params = entry
        self._features.pop(output.request_id, None)
        self._sequences -= internals.sequences(params)
        prompt_tokens = len(call.prompts[position])
        cached = output.num_cached_tokens or 0
        vector = internals.vector_of(output)
        answers = output.outputs if vector is None else ()
        reason: str | None = "stop" if vector is None or len(vector) else "abort"
        for answer in answers:
            if answer.finish_reason != "stop":
                reason = answer.finish_reason
                break
        if reason in ("abort", "error"):
            completion = Completion(
                [],
                None,
                None,
                prompt_tokens,
                cached,
                ("RequestFailed", _given_up(params, reason)),
            )
            self._stats["refused"] += 1
        elif vector is not None:
            completion = Completion([], None, None, prompt_tokens, cached, vector=vector)
        else:
            token_ids = [
                answer.token_ids if type(answer.token_ids) is list else list(answer.token_ids)
                for answer in answers
            ]
            texts = [answer.text for answer in answers] if params.detokenize else None
            completion = Completion(token_ids, texts, reason, prompt_tokens, cached)
            if getattr(params, "logprob_token_ids", None):
                completion.logprobs = internals.first_logprobs(output)
            elif getattr(params, "logprobs", None) is not None:
                completion.steps = [internals.answer_logprobs(answer) for answer in answers]
            if len(answers) > 1:
                completion.finish_reasons = [answer.finish_reason for answer in answers]
            self._stats["output_tokens"] += sum(map(len, token_ids))
        self._stats["prompt_tokens"] += prompt_tokens
        self._stats["cached_tokens"] += cached
        self._settle(call, position, completion, finished)

    def _refuse(self, call: _Call, position: int, error: Exception) -> None:
        finished: list[_Call] = []
        with self._wake:
            self._stats["refused"] += 1
            self._settle(
                call,
                position,
                Completion(
                    [],
                    prompt_tokens=len(call.prompts[position]),
                    error=(type(error).__name__, error_text(error)),
                ),
                finished,
            )
        for done in finished:
            done.done.set()

    def _settle(
        self, call: _Call, position: int, completion: Completion, finished: list[_Call]
    ) -> None:
        self._stats["rows"] += 1
        call.answers[position] = completion
        call.missing -= 1
        if call.missing == 0:
            finished.append(call)

    # Death and closing ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch for engine processes that end unexpectedly, and for a step that never returns.

        In both cases, marks the engine dead and wakes every caller.
        """
        from multiprocessing.connection import wait

        sentinels = {process.sentinel: process for process in self._processes}
        while True:
            ended = wait(list(sentinels), timeout=HANG_LOOK)
            with self._wake:
                if self._closing or self._died is not None:
                    return
                answered = self._stats["rows"] > self._stats["refused"]
            if ended:
                process = sentinels[ended[0]]  # type: ignore[index]
                self._fail(self._how_it_ended(process))
                self._thread.join(2)
                if self._thread.is_alive():  # in a step that will never return
                    self._shutdown()
                return
            allowed = self._hang.look(time.monotonic(), self._inside, answered)
            if allowed is not None:
                self._end_hung(f"hung: no step returned for {allowed:g} s")
                return

    def _end_hung(self, cause: str) -> None:
        """End an engine that hangs: kill its processes, then wake the callers with EngineDied.

        This order matters because callers start another engine on the same GPU. If the engine's
        core is in this process, ends this process.
        """
        from prefect_raybatch.stages.vllm.reaper import kill_all

        if not self._processes:
            end_process(cause)
        with self._wake:
            self._died = cause  # first, so that vLLM's error at the end of its core does not count
        kill_all([process.pid for process in self._processes if process.pid is not None])
        self._shutdown()
        self._thread.join(5)
        # the killed processes were workers; the core is in this process
        if self._thread.is_alive():
            end_process(cause)
        self._fail(cause)

    def _fail(self, cause: str) -> None:
        """Mark the engine dead (the first cause stays) and wake every caller in flight."""
        with self._wake:
            if self._died is None:
                self._died = cause
            calls = {id(call): call for call in self._waiting}
            calls.update((id(call), call) for call, *_ in self._in_flight.values())
            self._waiting.clear()
            self._wake.notify_all()
        for call in calls.values():
            if not call.done.is_set():
                call.died = self._died
                call.done.set()

    def _shutdown(self) -> None:
        """End the engine core and its processes, and free memory if the core is in this process."""
        with self._wake:
            engine, self._engine = self._engine, None
        if engine is not None:
            internals.shut_down(engine, self._thread is not threading.current_thread())
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        self._errors.forget()
        if not self._processes and not self._cleaned:
            self._cleaned = True
            engine = None  # this reference would keep its memory
            internals.free_process()


def _start_limit() -> float | None:
    """Return the time limit of a start in seconds; None where vLLM itself sets it.

    vLLM limits the start of a core in another process. In this process, we set the same limit.
    """
    return None if core_apart() else float(os.environ.get(START_LIMIT) or 600)


def _given_up(params: Params, reason: str) -> str:
    said = f"vLLM aborted the request ({reason})"
    if getattr(params, "structured_outputs", None) is None:
        return said
    return (
        f"{said}, most likely because it could not build the grammar of structured_outputs or "
        "choice. An engine builds the grammars of all rows with the backend that its first row "
        "needs. Choose one that supports all of them, e.g. engine.structured_outputs_config: "
        "{backend: guidance}"
    )


def _as_list(token_ids: Sequence[int]) -> list[int]:
    """Return the token ids as a list of ints, because vLLM's wire format takes no arrays."""
    if type(token_ids) is list:
        return token_ids
    return token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)


def _guarded_params(params: SamplingFields) -> Params | Exception:
    """Return vLLM's object for these params, or the exception that building it raised."""
    try:
        if "task" in params:
            return internals.pooling_params(params)
        return internals.sampling_params(plain_fields(params))
    except Exception as error:
        return error


def plain_fields(params: SamplingFields) -> dict[str, Any]:
    """Return the arguments for vLLM's `SamplingParams` as plain values.

    Drops nulls, turns `choice` (our short form) into `structured_outputs` that any backend takes,
    and makes token ids in `logit_bias` ints (JSON has them as text). `detokenize` is off unless set
    or needed by `stop`. Raises ValueError if both `choice` and `structured_outputs` are set.
    """
    fields = {name: value for name, value in params.items() if value is not None}
    if isinstance(bias := fields.get("logit_bias"), dict):
        fields["logit_bias"] = {int(token): value for token, value in bias.items()}
    choice = fields.pop("choice", None)
    if choice is not None:
        if fields.get("structured_outputs") is not None:
            raise ValueError("give either `choice` or `structured_outputs`, not both")
        fields["structured_outputs"] = {"choice": list(choice)}
    form = fields.get("structured_outputs")
    if isinstance(form, dict) and form.get("choice"):
        rest = {name: value for name, value in form.items() if name != "choice"}
        fields["structured_outputs"] = {**label_form(form["choice"]), **rest}
    fields.setdefault("detokenize", bool(fields.get("stop")))
    return fields


def _end_of(process: BaseProcess) -> str:
    # vLLM's monitor waits for the same process. Only one of two waiting threads gets the exit code
    # at once; the other sees it a moment later.
    until = time.monotonic() + 1
    while process.exitcode is None and time.monotonic() < until:
        time.sleep(0.02)
    code = "" if process.exitcode is None else f" with {exit_text(process.exitcode)}"
    return f"engine process {process.name} (pid {process.pid}) ended{code}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
