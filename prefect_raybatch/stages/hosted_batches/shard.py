"""Sends the requests of one shard in batches, and gets their answers despite any crashes.

Each step is recorded before the next one that depends on it. Only the creation of a batch can be
charged twice. So if a batch may exist already, it is looked up in the server's list by its input
file before another is created. This is so after a crash, and after the server's response to the
creation was lost.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from prefect_raybatch.errors import EndpointRefused, EndpointUnavailable
from prefect_raybatch.ledger.layout import commit_path
from prefect_raybatch.spec.endpoint import EndpointPath
from prefect_raybatch.stages.endpoint.answers import HostedAnswer
from prefect_raybatch.stages.endpoint.client import HostedRequest
from prefect_raybatch.stages.endpoint.limiter import BatchCounts
from prefect_raybatch.stages.hosted_batches.api import AnswerLost, Batch, BatchApi, CallRefused
from prefect_raybatch.stages.hosted_batches.lines import (
    MOST_FILE_BYTES,
    QUEUE_FULL,
    REFUSING,
    BatchAnswers,
    read_lines,
    split_requests,
)
from prefect_raybatch.stages.hosted_batches.records import (
    BatchOutcome,
    Slot,
    put_batch,
    put_outcome,
    put_slot,
    read_batch,
    read_outcome,
    read_slots,
    was_cancelled,
)
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)
ROUNDS = 3  # batches without an answer to a request after which its row is quarantined
FIRST_POLL, MOST_POLL, SLOWER_POLL = 1.0, 60.0, 1.5  # seconds between polls, growth factor
# The server's list of batches may lag. Before a batch whose creation may have succeeded is created
# again, the list is read LIST_LOOKS times, every LIST_LOOK_EVERY seconds.
LIST_LOOKS, LIST_LOOK_EVERY = 12, 5.0
CREATIONS = 3  # tries to create a batch without a usable answer after which the attempt ends
# Number of tries, first and longest pause (seconds) while the server's queue is full.
FULL_TRIES, FULL_PAUSE, MOST_FULL_PAUSE = 100, 60.0, 900.0
REFUSED_TRIES = 10  # files refused for bad lines, after which a refusal is a try of all its rows


class ShardCommitted(Exception):
    """Another driver committed the shard meanwhile, so nobody needs these answers any more."""


class ShardBatches:
    """Answers the requests of one shard by means of batches.

    `store` is rooted at the run directory; `attempt` is the name of this attempt; `name` is the
    prefix of the run's file names at the server; `path` is the API path of the requests.
    """

    def __init__(
        self,
        api: BatchApi,
        store: Store,
        shard: int,
        attempt: str,
        name: str,
        path: EndpointPath,
    ):
        self.api, self.store, self.shard, self.path = api, store, shard, path
        self.attempt, self.name = attempt, name
        self._slots: list[Slot] = []
        self._done: Counter[int] = Counter()  # by slot
        self._full = 0  # consecutive times that the server's queue was full
        self._refused_files = 0  # for bad lines

    def answer(self, requests: Iterable[HostedRequest]) -> dict[str, HostedAnswer]:
        """Send the requests in batches, wait for them, and return {request key: answer}.

        A request without an answer after ROUNDS batches gets an error as its answer. Raises
        `EndpointRefused` if the server will answer no further request, `EndpointUnavailable` after
        a long outage or once the attempt is cancelled, and `ShardCommitted` if another driver has
        committed the shard.
        """
        asked = {request.key: request for request in requests}
        wait = FIRST_POLL
        try:
            while True:
                answers, tried, why = self._ended()
                for key in asked.keys() - answers.keys():
                    if tried[key] >= ROUNDS:
                        answers[key] = HostedAnswer(error=("NoAnswer", _given_up(tried[key], why)))
                covered = {key for slot in self._open() for key in slot.keys}
                pending = [asked[key] for key in asked if key not in answers and key not in covered]
                if pending:
                    self._send(pending, asked)
                    wait = FIRST_POLL
                    continue
                if not self._open():
                    return {key: answers[key] for key in asked}
                self._report()
                self.api.pause(wait * random.uniform(0.8, 1.0))
                wait = min(MOST_POLL, wait * SLOWER_POLL)
                self._check_committed()
                for slot in self._open():
                    self._poll(slot)
        finally:
            with suppress(Exception):  # the limiter may be gone with the cluster
                self.api.note_batches(self.shard, BatchCounts())

    def _adopt(self, asked: Mapping[str, HostedRequest]) -> tuple[bool, int]:
        """Take over recorded slots that have any of these requests; find or create their batches.

        `asked` has the shard's requests by key. Return (whether any slot was added, the next free
        slot number).
        """
        known = {slot.number for slot in self._slots}
        slots, number = read_slots(self.store, self.shard)
        fresh = [
            slot for slot in slots if slot.number not in known and asked.keys() & set(slot.keys)
        ]
        for slot in fresh:
            self._slots.append(slot)
            if slot.outcome is None and slot.batch_id is None:
                self._find_or_create(slot, LIST_LOOKS)
        return bool(fresh), number

    def _open(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.outcome is None]

    def _ended(self) -> tuple[dict[str, HostedAnswer], Counter[str], str]:
        """Return (answers by key, tries by key, reason for missing answers) of ended batches.

        Each ended batch is a try of its requests, unless its outcome does not count. The reason is
        the latest one, "" if there is none.
        """
        answers: dict[str, HostedAnswer] = {}
        tried: Counter[str] = Counter()
        why = ""
        for slot in self._slots:
            if slot.outcome is None:
                continue
            answers.update(slot.outcome.answers)
            if slot.outcome.counts:
                tried.update(slot.keys)
            why = slot.outcome.why or why
        return answers, tried, why

    def _report(self) -> None:
        slots = self._open()
        done = sum(self._done[slot.number] for slot in slots)
        requests = sum(len(slot.keys) for slot in slots)
        self.api.note_batches(self.shard, BatchCounts(len(slots), done, requests))

    # --- sending ----------------------------------------------------------------------------

    def _send(self, pending: Sequence[HostedRequest], asked: Mapping[str, HostedRequest]) -> None:
        """Upload the `pending` requests as files, record the files, and create their batches.

        `asked` has all requests of the shard by key. If another driver has sent some of them
        meanwhile, take over its slots and send none.
        """
        self._check_needed()
        if self._full:
            self.api.pause(min(MOST_FULL_PAUSE, FULL_PAUSE * 2.0 ** min(self._full - 1, 10)))
        is_behind, number = self._adopt(asked)
        if is_behind:
            return
        for requests, data in split_requests(pending, self.path):
            keys = [request.key for request in requests]
            if not data:
                text = f"the request has over {MOST_FILE_BYTES:,} bytes. Shorten the row"
                refused = {key: HostedAnswer(error=("RequestTooLarge", text)) for key in keys}
                slot = Slot(self.shard, number, "", keys, outcome=BatchOutcome(refused, "", True))
                self._slots.append(slot)
                continue
            file_id = self.api.upload(f"{self.name}-{self.shard:08d}-{number:04d}.jsonl", data)
            slot = Slot(self.shard, number, file_id, keys)
            if not put_slot(self.store, slot):
                self.api.delete(file_id)
                return
            self._slots.append(slot)
            self._find_or_create(slot, 0)
            number += 1

    def _find_or_create(self, slot: Slot, looks: int) -> None:
        """Set a slot's batch: the recorded one, else one in the server's list, else a new one.

        `looks`: how often to read the list before a batch is created; 0 if no batch can exist yet.
        Raises `EndpointUnavailable` if CREATIONS tries to create it got no usable answer.
        """
        again, problem, tries = looks > 0, "", 0
        while True:
            for _ in range(looks):
                if read_batch(self.store, slot):
                    return
                if found := self.api.find(slot.file_id):
                    self._keep(slot, _best(found), found, again=True)
                    return
                self.api.pause(LIST_LOOK_EVERY)
            if tries == CREATIONS:
                raise EndpointUnavailable(
                    f"engine.endpoint.batch: {tries} tries to create a batch, each without a "
                    f"usable answer. The last: {problem}. Check the server, or remove batch"
                )
            self._check_needed()
            try:
                batch = self.api.create(slot.file_id, f"{slot.file_id}-{slot.number}")
            except AnswerLost as error:
                log.warning("shard %d: no answer to a new batch: %s", self.shard, error)
                looks, again, problem, tries = LIST_LOOKS, True, str(error), tries + 1
                continue
            except CallRefused as error:
                self._refused(slot, error)
                return
            self._keep(slot, batch, [batch], again)
            return

    def _refused(self, slot: Slot, error: CallRefused) -> None:
        """Handle the server's refusal to create the batch of `slot`.

        If the server no longer has the input file, the slot ends without answers: another driver
        may have run the same batch and then deleted the file. If the server still has it, raises
        `EndpointRefused`.
        """
        if self.api.has_file(slot.file_id):
            raise EndpointRefused(f"engine.endpoint.batch: {error}")
        self._end(slot, BatchOutcome({}, f"the input file is gone ({error})", True), ())

    def _keep(self, slot: Slot, batch: Batch, found: Sequence[Batch], again: bool) -> None:
        """Record a slot's batch; cancel the other batches in `found`, made from the same file.

        `again`: the server may have still more batches of that file (`Slot.created_again`).
        """
        put_batch(self.store, slot, batch.id, again)
        for other in found:
            if other.id != slot.batch_id and not other.ended:
                self._cancel_duplicate(slot, other)

    def _cancel_duplicate(self, slot: Slot, batch: Batch) -> None:
        log.warning(
            "shard %d: batch %s has the same requests as %s; it is cancelled",
            *(self.shard, batch.id, slot.batch_id),
        )
        self.api.cancel(batch.id)

    def _check_committed(self) -> None:
        """Raise `ShardCommitted` if the shard is committed.

        The driver that finishes a run removes the records of batches, and their files at the
        server. Without this check, all rows would then look as if they were never sent.
        """
        if self.store.holds(commit_path(self.shard)):
            raise ShardCommitted

    def _check_needed(self) -> None:
        """Raise an error if no further batch may be created."""
        self._check_committed()
        if was_cancelled(self.store, self.attempt):
            raise EndpointUnavailable("this attempt was cancelled, and its batches with it")

    # --- ends -------------------------------------------------------------------------------

    def _poll(self, slot: Slot) -> None:
        """Get the state of a slot's batch; record its answers if it has ended, else its progress.

        Cancels other batches of the same file, if there may be any.
        """
        batch = self.api.get(slot.batch_id or "")
        if slot.created_again:
            for other in self.api.find(slot.file_id):
                if other.id != slot.batch_id and not other.ended:
                    self._cancel_duplicate(slot, other)
        if batch is None:
            self._end(slot, BatchOutcome({}, "the server no longer has the batch", True), ())
        elif batch.ended:
            self._take(slot, batch)
        else:
            self._done[slot.number] = batch.done

    def _take(self, slot: Slot, batch: Batch) -> None:
        """Record an ended batch's answers, then delete its files at the server.

        Raises `EndpointRefused` if the server will answer no further request.
        """
        files = [one for one in (batch.output_file_id, batch.error_file_id) if one]
        contents = [self.api.download(one) for one in files]
        there = (data for data in contents if data is not None)
        answers = read_lines(there, slot.keys, self.path)
        counts = self._look_at_errors(slot, batch, answers)
        if answers.refusal or (batch.status == "cancelled" and was_cancelled(self.store)):
            counts = False  # the requests without an answer were not tried
        why = next(iter(answers.passing.values()), "")
        if None in contents:
            why = "its output file is gone from the server"
        elif batch.status != "completed" or not why:
            why = f"the batch is {batch.status}" + (f" ({why})" if why else "")
        without = len(set(slot.keys) - answers.by_key.keys())
        if without:
            log.warning(
                "shard %d: batch %s is %s; %s without an answer: %s",
                *(self.shard, batch.id, batch.status, counted(without, "request"), why),
            )
        self._end(slot, BatchOutcome(answers.by_key, why, counts), (*files, slot.file_id))
        if answers.refusal:
            raise EndpointRefused(f"engine.endpoint.batch: {answers.refusal}")

    def _look_at_errors(self, slot: Slot, batch: Batch, answers: BatchAnswers) -> bool:
        """Add a batch's own errors to `answers`; return whether the server tried its requests.

        False if the server refuses the account, if its queue was full, or if it refuses the file
        for bad lines. A full queue after FULL_TRIES consecutive full queues counts as a try, as
        does a refused file after REFUSED_TRIES refused files of the shard.
        """
        counts, has_bad_lines = True, False
        for code, message, line in batch.errors:
            if code in REFUSING:
                answers.refusal = f"{code}: {message}. Remedy: {REFUSING[code]}"
                counts = False
            elif code == QUEUE_FULL and self._full < FULL_TRIES:
                self._full += 1
                counts = False
                answers.passing[slot.keys[0]] = message
            elif line is not None and 0 < line <= len(slot.keys):
                text = f"the server says of the request: {message}. Correct the row"
                answers.by_key[slot.keys[line - 1]] = HostedAnswer(error=("RequestRefused", text))
                has_bad_lines = True
            else:
                answers.passing[slot.keys[0]] = message
        if counts:
            self._full = 0
        if has_bad_lines and batch.status == "failed":
            self._refused_files += 1
            counts = counts and self._refused_files > REFUSED_TRIES
        return counts

    def _end(self, slot: Slot, outcome: BatchOutcome, files: Sequence[str]) -> None:
        """Record a slot's outcome, add its tokens to the run's usage, and delete `files` remotely.

        If another driver recorded an outcome before, that one is kept and no tokens are added.
        """
        if put_outcome(self.store, slot, outcome):
            slot.outcome = outcome
            answers = outcome.answers.values()
            self.api.bill(
                sum(answer.prompt_tokens for answer in answers),
                sum(answer.output_tokens for answer in answers),
            )
        else:
            slot.outcome = read_outcome(self.store, slot) or outcome
        for file_id in files:
            self.api.delete(file_id)


def _usefulness(batch: Batch) -> tuple[int, int]:
    """Return a sort key: a batch that is likelier to give answers sorts higher."""
    order = ("cancelled", "failed", "cancelling", "expired")
    known = batch.status in order
    return order.index(batch.status) if known else len(order), batch.done


def _best(found: Sequence[Batch]) -> Batch:
    """Return the batch that is likeliest to give answers, of several made from one file."""
    return max(found, key=_usefulness)


def _given_up(rounds: int, why: str) -> str:
    return f"no answer in {counted(rounds, 'batch', 'batches')}: {why}. Retry the row"
