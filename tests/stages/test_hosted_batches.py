"""A shard's batches through crashes at every step, simulated: real records and decisions, a server
and a store in memory, and no time that passes."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from helpers.batch_server import BatchService, NotFound
from helpers.openai_server import completion

from prefect_raybatch.errors import EndpointRefused, EndpointUnavailable
from prefect_raybatch.ledger.layout import commit_path
from prefect_raybatch.stages.endpoint.answers import HostedAnswer
from prefect_raybatch.stages.endpoint.client import HostedRequest
from prefect_raybatch.stages.endpoint.limiter import BatchCounts
from prefect_raybatch.stages.hosted_batches import lines, records
from prefect_raybatch.stages.hosted_batches.api import AnswerLost, Batch, BatchApi, CallRefused
from prefect_raybatch.stages.hosted_batches.shard import (
    CREATIONS,
    LIST_LOOK_EVERY,
    LIST_LOOKS,
    REFUSED_TRIES,
    ROUNDS,
    ShardBatches,
    ShardCommitted,
)
from prefect_raybatch.storage import Store
from prefect_raybatch.storage.base import FileInfo

LOOKED = (
    LIST_LOOKS * LIST_LOOK_EVERY
)  # seconds that the list is looked at before a batch is created again
CRASHES = 2_000
CHATS = "/v1/chat/completions"


class Crash(BaseException):
    """The process ends here."""


@dataclass
class World:
    """What outlives a crash: the server, the files of the store, and the time.

    `crash_at` are numbers of the I/O points, counted since the last start, at which the process
    ends. `at_point` is called at each.
    """

    service: BatchService
    crash_at: int | None = None
    points: int = 0
    now: float = 0.0
    files: dict[str, bytes] = field(default_factory=dict)
    lose: Callable[[str, int], bool] = lambda call, number: False
    calls: Counter[str] = field(default_factory=Counter)
    uncertain: int = 0  # creations without a recorded answer
    billed: int = 0  # tokens that all drivers have added to their runs' usage
    at_point: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.service.clock = lambda: self.now

    def point(self) -> None:
        self.points += 1
        if self.points == self.crash_at:
            raise Crash
        self.at_point()

    def around(self, work: Callable[[], Any]) -> Any:
        """Do something that may be cut off before or after its effect."""
        self.point()
        value = work()
        self.point()
        return value


@dataclass
class FilesInMemory:
    world: World

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        self.world.point()
        if path not in self.world.files:
            raise FileNotFoundError(path)
        return self.world.files[path]

    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        self.world.point()
        for path in sorted(self.world.files):
            if path.startswith(f"{prefix}/"):
                yield FileInfo(path, 1, None, 1)

    def stat(self, path: str) -> FileInfo:
        data = self.read(path)
        return FileInfo(path, len(data), hashlib.md5(data).hexdigest(), None)

    def holds(self, path: str) -> bool:
        self.world.point()
        return path in self.world.files

    def put(self, path: str, data: bytes) -> None:
        self.world.around(lambda: self.world.files.update({path: data}))

    def put_if_absent(self, path: str, data: bytes) -> bool:
        created = path.endswith(".batch.json")
        self.world.point()
        here = self.world.files.setdefault(path, data) == data
        if created:
            self.world.uncertain -= 1
        self.world.point()
        return here


@dataclass
class ApiInMemory:
    """Calls of the service; an answer that is lost is asked for again, except that of a create."""

    world: World

    def _call(self, name: str, work: Callable[[], Any]) -> Any:
        world = self.world
        while True:
            world.now += 0.01
            world.calls[name] += 1
            value = world.around(work)
            if not world.lose(name, world.calls[name]):
                return value
            if name == "create":
                raise AnswerLost("the connection was closed")

    def upload(self, name: str, data: bytes) -> str:
        return str(self._call("upload", lambda: self.world.service.upload(name, data))["id"])

    def create(self, file_id: str, key: str) -> Batch:
        body = {
            "input_file_id": file_id,
            "endpoint": CHATS,
            "completion_window": "24h",
        }

        def create() -> dict[str, Any]:
            made = self.world.service.create(body)
            self.world.uncertain += 1  # until it is recorded
            return made

        try:
            return Batch.of(self._call("create", create))
        except NotFound:
            raise CallRefused(404, "no such file") from None

    def get(self, batch_id: str) -> Batch | None:
        try:
            return Batch.of(self._call("get", lambda: self.world.service.get(batch_id)))
        except NotFound:
            return None

    def find(self, file_id: str) -> list[Batch]:
        page = self._call("find", lambda: self.world.service.listed(100, None))
        batches = map(Batch.of, page["data"])
        return [batch for batch in batches if batch.input_file_id == file_id]

    def cancel(self, batch_id: str) -> None:
        self._call("cancel", lambda: self.world.service.cancel(batch_id))

    def download(self, file_id: str) -> bytes | None:
        try:
            return cast(
                "bytes", self._call("download", lambda: self.world.service.content(file_id))
            )
        except NotFound:
            return None

    def has_file(self, file_id: str) -> bool:
        return bool(self._call("has_file", lambda: file_id in self.world.service.files))

    def delete(self, file_id: str) -> None:
        with suppress(NotFound):
            self._call("delete", lambda: self.world.service.delete(file_id))

    def pause(self, seconds: float) -> None:
        self.world.now += seconds

    def note_batches(self, shard: int, batches: BatchCounts) -> None: ...

    def bill(self, prompt_tokens: int, output_tokens: int) -> None:
        self.world.billed += prompt_tokens + output_tokens


def request_of(text: str) -> HostedRequest:
    body = {"model": "large", "messages": [{"role": "user", "content": text}]}
    return HostedRequest(body, 1, f"key of {text}", lambda answer: None)


REQUESTS = [request_of(f"row {number}") for number in range(6)]


def shard_of(world: World, attempt: str = "a") -> ShardBatches:
    api, store = cast("BatchApi", ApiInMemory(world)), cast("Store", FilesInMemory(world))
    return ShardBatches(api, store, 3, attempt, "raybatch-test", "chat/completions")


def lived(world: World, crash_at: int | None = None) -> dict[str, HostedAnswer] | None:
    """Run a process over the shard until it ends or crashes; return its answers."""
    world.points, world.crash_at = 0, crash_at
    try:
        return shard_of(world).answer(REQUESTS)
    except Crash:
        return None


def check_answers(answers: dict[str, HostedAnswer] | None) -> None:
    assert answers is not None
    assert {key: answer.choices[0].text for key, answer in answers.items()} == {
        request.key: f"about {request.body['messages'][0]['content']}" for request in REQUESTS
    }


def paid_again(world: World) -> int:
    """Return how many answers were paid twice, once everything at the server has ended."""
    world.service.settle()
    assert set(world.service.paid) == {request.key for request in REQUESTS}
    return world.service.paid.total() - len(REQUESTS)


def first(*fates: str) -> Callable[[int], str]:
    """Let the first batches end so, and the others complete."""
    return lambda number: fates[number] if number < len(fates) else "completed"


def nothing_lost(call: str, number: int) -> bool:
    return False


@dataclass(frozen=True)
class Scenario:
    name: str
    fate: Callable[[int], str] = lambda number: "completed"
    takes: float = 100.0
    lag: float = 0.0
    lose: Callable[[str, int], bool] = nothing_lost
    most_requests: int = 50_000

    def world(self) -> World:
        service = BatchService(takes=self.takes, lag=self.lag, fate=self.fate)
        return World(service, lose=self.lose)


SCENARIOS = [
    Scenario("all is well"),
    Scenario("the list lags", lag=LOOKED / 2),
    Scenario("the list lags for too long", lag=LOOKED * 1.5, takes=1_000.0),
    Scenario("the batch expires", first("expired", "half")),
    Scenario("the batch fails", first("failed", "full", "full")),
    Scenario("two files", first("expired"), most_requests=3),
    Scenario("each first answer is lost", lose=lambda call, number: number == 1),
    Scenario("created, lost, lagging", lag=30.0, lose=lambda call, n: call == "create" and n < 3),
]


def crashed_runs(chance: random.Random, crashes: int, check: Callable[..., None]) -> int:
    """Crash runs of all scenarios at each point, and some of them again and again."""
    done = 0
    points = {}
    for scenario in itertools.cycle(SCENARIOS):
        world = scenario.world()
        lines.MOST_REQUESTS = scenario.most_requests
        if scenario.name not in points:  # how many there are
            answers = lived(world)
            points[scenario.name] = iter(range(1, world.points + 1))
        else:
            answers, crash_at = None, next(points[scenario.name], None)
            while answers is None:
                answers = lived(world, crash_at or chance.randint(1, 40))
                done += answers is None
                again = chance.random() < 0.6
                crash_at = chance.randint(1, 40) if again else 10**9
        check(scenario, world, answers)
        if done >= crashes:
            return done
    raise AssertionError("unreachable")


def check_run(scenario: Scenario, world: World, answers: dict[str, HostedAnswer] | None) -> None:
    check_answers(answers)
    twice = paid_again(world)
    if scenario.lag <= LOOKED:  # then an earlier creation was found, or cancelled in time
        assert twice == 0, scenario.name
    assert twice <= max(0, world.uncertain) * len(REQUESTS), scenario.name


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_REQUESTS", lines.MOST_REQUESTS)
    random.seed(45)  # of the pauses between polls


def test_a_crash_at_any_point_loses_no_row_and_pays_for_none_twice():
    assert crashed_runs(random.Random(1), 300, check_run) >= 300


@pytest.mark.whole
def test_two_thousand_crashes():
    assert crashed_runs(random.Random(45), CRASHES, check_run) >= CRASHES


def two_drivers(world: World, other_at: int, crash_at: int | None) -> None:
    """Run a driver, and at one of its points another, which may crash at one of its own."""

    def other() -> None:
        if world.points != other_at:
            return
        world.points, world.at_point, world.crash_at = 0, lambda: None, crash_at
        with suppress(Crash):
            check_answers(shard_of(world, "b").answer(REQUESTS))
        world.points, world.crash_at = other_at, None

    world.at_point = other
    check_answers(lived(world))


def points_of(scenario: Scenario) -> int:
    world = scenario.world()
    check_answers(lived(world))
    return world.points


SLOW = Scenario("slow", takes=1_000.0)


@pytest.mark.parametrize("lag", [0.0, LOOKED * 1.5])
def test_two_drivers_of_a_shard_give_the_same_answers_and_pay_and_bill_once(lag):
    """A second driver does all of its work at one point of the first one's, for each point."""
    for other_at in range(1, points_of(SLOW) + 1):
        world = replace(SLOW, lag=lag).world()
        two_drivers(world, other_at, None)
        assert paid_again(world) == 0, other_at
        assert world.billed == len(REQUESTS) * (11 + 7), other_at
        purposes = {file["purpose"] for file in world.service.files.values()}
        assert purposes <= {"batch_output"}, other_at  # of a duplicate that was cancelled


def test_a_driver_beside_one_that_finishes_the_run_pays_for_no_row_again():
    """A second driver finishes the whole run at one point of the first one's, for each point."""
    for other_at in range(1, points_of(SLOW) + 1):
        world = SLOW.world()

        def finish(world: World = world, at: int = other_at) -> None:
            if world.points != at:
                return
            world.at_point = lambda: None
            check_answers(shard_of(world, "b").answer(REQUESTS))
            world.files = {commit_path(3): b"{}"}  # the records of its batches are removed

        world.at_point = finish
        with suppress(ShardCommitted):
            check_answers(lived(world))
        assert paid_again(world) == 0, other_at


def test_a_driver_that_dies_beside_another_leaves_it_all_rows():
    """As above, and the second driver crashes. Only a batch that it had created and not recorded
    may be paid beside that of the first one, which was about to create its own."""
    chance, points = random.Random(45), points_of(SLOW)
    for other_at in range(1, points + 1):
        for crash_at in chance.sample(range(1, points), 4):
            world = SLOW.world()
            two_drivers(world, other_at, crash_at)
            most = max(0, world.uncertain) * len(REQUESTS)
            assert paid_again(world) <= most, (other_at, crash_at)


def test_a_batch_that_another_driver_records_meanwhile_is_taken():
    world = World(BatchService(takes=100.0, lag=10**6))
    assert lived(world, crash_at=_points_until(world, ".file.json") + 2) is None
    made: list[dict[str, Any]] = []

    def record() -> None:
        if world.calls["find"] == 2 and not made:
            (file_id,) = world.service.files
            body = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
            made.append(world.service.create(body))
            text = f'{{"batch_id": "{made[0]["id"]}"}}'
            world.files[records.slot_path(3, 0, "batch.json")] = text.encode()

    world.at_point = record
    check_answers(lived(world))
    assert len(world.service.batches) == 1


def test_a_batch_of_ones_own_is_cancelled_if_another_driver_records_one_first():
    world = World(BatchService(takes=100.0, lag=10**6))
    assert lived(world, crash_at=_points_until(world, ".file.json") + 2) is None
    others: list[str] = []

    def record() -> None:
        if world.service.batches and not others:
            (file_id,) = world.service.files
            body = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
            others.append(world.service.create(body)["id"])
            text = f'{{"batch_id": "{others[0]}"}}'
            world.files[records.slot_path(3, 0, "batch.json")] = text.encode()

    world.at_point = record
    check_answers(lived(world))
    assert paid_again(world) == 0
    states = {name: batch["status"] for name, batch in world.service.batches.items()}
    assert states == {"batch_0": "cancelled", others[0]: "completed"}


def test_two_drivers_of_other_rows_of_a_shard_send_a_batch_each():
    for other_at in range(1, points_of(SLOW) + 1):
        world = SLOW.world()

        def other(world: World = world, at: int = other_at) -> None:
            if world.points == at:
                world.at_point = lambda: None
                assert len(shard_of(world, "b").answer(REQUESTS[:2])) == 2

        world.at_point = other
        assert len(shard_of(world).answer(REQUESTS[2:])) == 4
        assert paid_again(world) == 0 and len(world.service.batches) == 2, other_at


def test_all_files_of_a_shard_are_removed_from_the_server_once_their_answers_are_recorded():
    world = World(BatchService(takes=10.0, fate=first("expired")))
    check_answers(lived(world))
    assert world.service.contents == {} and len(world.service.batches) == 2


def test_a_request_without_an_answer_in_three_batches_is_quarantined_with_the_reason():
    world = World(BatchService(fate=lambda number: "failed"))
    answers = lived(world)
    assert answers is not None and len(world.service.batches) == ROUNDS
    for answer in answers.values():
        assert answer.error is not None and "it is failed" in answer.error[1]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not JSON",
        b"[" * 100_000,
        b"3",
        b'{"custom_id": ["a"], "response": {"status_code": 200, "body": 1}}',
        b'{"custom_id": "key of row 0", "response": {"status_code": 1e999, "body": {}}}',
        b'{"custom_id": "key of row 0", "response": {"status_code": 200, "body": {"choices": []}}}',
        b'{"custom_id": "key of row 0", "response": 3, "error": 4}',
        b'{"custom_id": "key of another", "response": {"status_code": 400, "body": null}}',
    ],
)
def test_a_line_that_is_not_as_agreed_leaves_its_request_without_an_answer(line):
    keys = [request.key for request in REQUESTS]
    found = lines.read_lines([line + b"\n"], keys, "chat/completions")
    assert found.by_key == {} and found.refusal == ""


def test_an_answer_that_the_server_cut_off_is_an_error_of_its_row():
    body = json.loads(completion("The answer is", "content_filter"))
    line = {"custom_id": "key of row 0", "response": {"status_code": 200, "body": body}}
    found = lines.read_lines([json.dumps(line).encode()], ["key of row 0"], "chat/completions")
    answer = found.by_key["key of row 0"]
    assert answer.error is not None and "content_filter" in answer.error[1]
    assert (answer.prompt_tokens, answer.output_tokens) == (11, 7)


def test_a_server_that_creates_no_batch_ends_the_attempt_and_a_later_one_pays_once():
    world = World(
        BatchService(), lose=lambda call, number: call == "create" and number <= CREATIONS
    )
    api = ApiInMemory(world)
    api.find = lambda file_id: []  # type: ignore[method-assign]  # the list never has the batches
    store = cast("Store", FilesInMemory(world))
    shard = ShardBatches(cast("BatchApi", api), store, 3, "a", "raybatch-test", "chat/completions")
    with pytest.raises(EndpointUnavailable, match=r"3 tries .* the connection was closed"):
        shard.answer(REQUESTS)
    assert world.calls["create"] == CREATIONS
    check_answers(lived(world))
    assert world.calls["create"] == CREATIONS  # the next attempt finds the batches in the list


def test_a_full_queue_is_waited_for_and_costs_no_round():
    full = ["full"] * (ROUNDS + 2)
    world = World(BatchService(fate=first(*full)))
    check_answers(lived(world))
    assert world.now > 60 * len(full)


def test_a_row_that_the_server_refuses_is_the_rows_error_and_the_others_are_answered():
    world = World(BatchService())
    requests = [*REQUESTS, request_of("a bad row")]
    answers = shard_of(world).answer(requests)
    assert answers["key of a bad row"].error is not None
    assert answers["key of a bad row"].error[0] == "RequestRefused"
    assert len(world.service.batches) == 1


def test_a_file_that_fails_for_bad_lines_is_no_try_of_its_other_rows():
    world = World(BatchService(fate=lambda number: "invalid"))
    bad = [request_of(f"a bad row {number}") for number in range(ROUNDS + 1)]
    answers = shard_of(world).answer([*bad, *REQUESTS])
    for request in bad:
        error = answers.pop(request.key).error
        assert error is not None and error[0] == "RequestRefused" and "it is bad" in error[1]
    check_answers(answers)
    assert len(world.service.batches) == len(bad) + 1


def test_a_server_that_names_one_bad_line_each_time_gets_few_files():
    world = World(BatchService(fate=lambda number: "invalid"))
    bad = [request_of(f"a bad row {number}") for number in range(REFUSED_TRIES + 20)]
    answers = shard_of(world).answer(bad)
    kinds = Counter(answer.error[0] for answer in answers.values() if answer.error)
    batches = REFUSED_TRIES + ROUNDS
    assert len(world.service.batches) == batches
    assert kinds == {"RequestRefused": batches, "NoAnswer": len(bad) - batches}


def test_a_used_up_quota_ends_the_run_and_keeps_what_was_answered():
    world = World(BatchService(fate=first(*["quota"] * ROUNDS)))
    for _ in range(ROUNDS):  # a row that was refused for the quota was not tried
        with pytest.raises(EndpointRefused, match="quota"):
            lived(world)
    check_answers(lived(world))
    assert paid_again(world) == 0


def test_a_request_over_the_limit_of_a_file_is_an_error_of_its_row(monkeypatch):
    monkeypatch.setattr(lines, "MOST_FILE_BYTES", 300)
    world = World(BatchService())
    answers = shard_of(world).answer([*REQUESTS, request_of("long " * 100)])
    assert sum(answer.error is not None for answer in answers.values()) == 1
    assert max(len(world.service.contents), len(world.service.batches)) > 2


def test_answers_whose_file_has_expired_are_asked_for_again():
    world = World(BatchService(takes=10.0))
    assert lived(world, crash_at=_points_until(world, ".batch.json")) is None
    world.now = 10**6  # while nobody looked
    (batch_id,) = world.service.batches
    world.service.contents.pop(world.service.get(batch_id)["output_file_id"])
    check_answers(lived(world))
    assert len(world.service.batches) == 2


def _points_until(world: World, ending: str) -> int:
    """Return the point at which a file of that name is there, found in another world."""
    other = World(BatchService(takes=world.service.takes))
    there: list[int] = []

    def look() -> None:
        if not there and any(path.endswith(ending) for path in other.files):
            there.append(other.points)

    other.at_point = look
    lived(other)
    return there[0]


@pytest.mark.parametrize("kind", ["file.json", "batch.json", "answers.jsonl"])
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"", b"[]", b"{}", b"\xff\x00", b'{"file_id": 3, "keys": 4}']
)
def test_a_damaged_record_loses_no_row(kind, content):
    world = World(BatchService())
    check_answers(lived(world))
    world.files[records.slot_path(3, 0, kind)] = content
    check_answers(lived(world))


def test_a_cancelled_attempt_creates_no_further_batch_and_the_next_goes_on():
    world = World(BatchService(takes=100.0))
    waiting = _points_until(world, ".batch.json") + 4

    def cancel() -> None:
        if world.points == waiting:
            world.files[records.cancel_path("a")] = b"{}"
            for batch_id in world.service.batches:
                world.service.cancel(batch_id)

    world.at_point = cancel
    with pytest.raises(EndpointUnavailable, match="cancelled"):
        lived(world)
    assert len(world.service.batches) == 1
    for _ in range(ROUNDS + 1):  # what was cancelled by us was not tried
        world.at_point = lambda: None
        check_answers(shard_of(world, "b").answer(REQUESTS))
    assert paid_again(world) == 0
