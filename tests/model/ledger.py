"""Commit, layout, parts, `_SUCCESS` and reap by two drivers and a reaper; and retries.

Each step is one request. A process may stop for ever or for any time before any of its steps, so
crashes and zombies need no steps of their own. A lost answer needs none either: after each PUT the
process looks at what is there. What may befall is counted: PUTs whose bytes are spoiled, PUTs that
arrive once more at any later time, and listings that lack a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

SHARDS = (0, 1)
DRIVERS = (0, 1)


class Content(NamedTuple):
    """Of a part: its rows as (shard, driver whose answer it is), who wrote it (another pyarrow
    writes the same rows as other bytes), and whether that is what was sent."""

    rows: tuple[tuple[int, int], ...]
    writer: int
    sound: bool


class Put(NamedTuple):
    """A PUT on its way: unconditional, if absent, or in the place of what was seen."""

    name: str
    content: Content
    kind: str
    seen: Content | None = None


class Process(NamedTuple):
    """`at`: the shard or part it is at. `record`: the parts it has proved, as (name, content)."""

    step: str
    at: int = 0
    seen: Content | None = None
    record: tuple[tuple[str, Content], ...] = ()
    listed: frozenset[tuple[int, int]] = frozenset()


class State(NamedTuple):
    pieces: frozenset[tuple[int, int]]  # (shard, driver)
    commits: tuple[int | None, ...]  # by shard: whose pieces it names
    layout: int | None  # whose cut of the rows into parts it is
    parts: frozenset[tuple[str, Content]]
    success: frozenset[tuple[str, Content]] | None
    drivers: tuple[Process, ...]
    reaper: Process
    late: frozenset[Put]
    spoil: int  # how often each may still happen
    repeat: int
    stale: int


@dataclass(frozen=True)
class Rules:
    """How the protocol writes parts (`plain`, `content`, `deleted`, `fenced`), whether finalizers
    share a layout, and whether reap looks at commits (`commits`) or believes in age (`age`)."""

    parts: str = "fenced"
    layout: bool = True
    reap: str = "commits"
    committed: bool = False  # begin where all shards are committed
    spoil: int = 1
    repeat: int = 1
    stale: int = 1
    reaper: bool = True


def first(rules: Rules) -> State:
    pieces = frozenset((shard, 0) for shard in SHARDS) if rules.committed else frozenset()
    commits = (0, 0) if rules.committed else (None, None)
    begin = Process("layout" if rules.committed else "piece")
    reaper = Process("pieces" if rules.reaper else "done")
    faults = (rules.spoil, rules.repeat, rules.stale)
    return State(
        pieces, commits, None, frozenset(), None, (begin,) * 2, reaper, frozenset(), *faults
    )


def following(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    """(what happens, the state after it) for all that can happen."""
    for me in DRIVERS:
        for label, after in _driver(rules, state, me):
            yield f"driver {me + 1} {label}", after
    for label, after in _reaper(rules, state):
        yield f"reaper {label}", after
    for put in state.late:
        after = state._replace(late=state.late - {put}, parts=_written(state.parts, put))
        yield f"a late PUT of {put.name} arrives", after


def faults_of(rules: Rules, state: State) -> Iterator[str]:
    """What must not be. Each is the opposite of an invariant of Ledger.tla: variants.INVARIANTS."""
    gone = any(d is not None and (s, d) not in state.pieces for s, d in enumerate(state.commits))
    if state.success is None:
        if gone:
            yield "the piece that a shard is committed with is gone"
        return
    missing = {name for name, _ in state.success - state.parts}
    if gone and not missing <= {name for name, _ in state.parts}:
        yield "the result is lost"
    if any(not content.sound for _, content in state.parts):
        yield "bad bytes are readable"
    if state.parts != state.success:
        rows = [row for _, content in state.parts for row in content.rows]
        if len(rows) != len(set(rows)):
            yield "a reader that globs doubles rows"
        yield "the files are not those that _SUCCESS names"
    named = sorted(row for _, content in state.success for row in content.rows)
    if named != sorted(enumerate(state.commits)):
        yield "_SUCCESS does not name each row once"


# --- a driver -------------------------------------------------------------------------------------


def _driver(rules: Rules, state: State, me: int) -> Iterator[tuple[str, State]]:
    mine = state.drivers[me]

    def to(step: str, state: State = state, **more: object) -> State:
        changed = mine._replace(step=step, **more)
        return state._replace(
            drivers=tuple(changed if d == me else state.drivers[d] for d in DRIVERS)
        )

    if mine.step == "piece":
        after = state._replace(pieces=state.pieces | {(mine.at, me)})
        yield f"writes its piece of shard {mine.at}", to("commit", after)
    elif mine.step == "commit":
        commits = list(state.commits)
        commits[mine.at] = me if commits[mine.at] is None else commits[mine.at]
        after = state._replace(commits=tuple(commits))
        last = mine.at == SHARDS[-1]
        step, at = ("layout", 0) if last else ("piece", mine.at + 1)
        yield f"puts the commit of shard {mine.at}", to(step, after, at=at)
    elif mine.step == "layout":
        after = state
        if state.layout is None:
            after = state._replace(layout=me)
        yield "puts the layout, or takes what is there", to("look", after)
    elif mine.step in ("look", "put", "replace", "delete"):
        yield from _part(rules, state, me, to)
    elif mine.step == "list":
        yield from _end(rules, state, me, to)
    elif mine.step == "success":
        success = frozenset(mine.record) if state.success is None else state.success
        yield "puts _SUCCESS", to("tidy", state._replace(success=success))
    elif mine.step == "tidy" and _there(state):
        yield "deletes the pieces", to("done", state._replace(pieces=frozenset()))


def _cut(rules: Rules, state: State, me: int) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shards) of each part: driver 1 makes one of both shards, driver 2 one of each."""
    whose = state.layout if rules.layout and state.layout is not None else me
    parts = [SHARDS] if whose == 0 else [(shard,) for shard in SHARDS]
    named = [(f"part-{at}", shards) for at, shards in enumerate(parts)]
    return [(f"{n}-{me}", s) for n, s in named] if rules.parts == "content" else named


def _part(rules: Rules, state: State, me: int, to: object) -> Iterator[tuple[str, State]]:
    mine, cut = state.drivers[me], _cut(rules, state, me)
    name, shards = cut[mine.at]
    rows = tuple((shard, state.commits[shard] or 0) for shard in shards)
    there = dict(state.parts).get(name)
    if mine.step == "look":
        step = _judged(rules, mine, there, rows, me)
        if step == "take":
            record = (*mine.record, (name, there))
            last = mine.at == len(cut) - 1
            at = mine.at if last else mine.at + 1
            yield (
                f"finds {name} as it should be",
                to("list" if last else "look", record=record, at=at),
            )
        else:
            yield f"looks at {name}", to(step, seen=there)
        return
    if mine.step == "delete":
        parts = frozenset(part for part in state.parts if part[0] != name)
        yield f"deletes the bad {name}", to("look", state._replace(parts=parts), seen=None)
        return
    if state.success is None and any(
        (s, state.commits[s]) not in state.pieces for s in shards
    ):  # its pieces are gone, so it stops with an error: faults_of tells where they must not be
        return
    kind = {"plain": "always", "content": "always"}.get(rules.parts, "absent")
    kind = "match" if mine.step == "replace" and rules.parts == "fenced" else kind
    for sound in (True, False) if state.spoil else (True,):
        put = Put(name, Content(rows, me, sound), kind, mine.seen if kind == "match" else None)
        after = state._replace(parts=_written(state.parts, put))
        after = after if sound else after._replace(spoil=state.spoil - 1)
        said = f"puts {name} ({kind}){'' if sound else ', which is spoiled'}"
        yield said, to("look", after, seen=None)
        if state.repeat:
            again = after._replace(late=after.late | {put}, repeat=state.repeat - 1)
            yield f"{said}, to arrive once more", to("look", again, seen=None)


def _judged(rules: Rules, mine: Process, there: Content | None, rows: object, me: int) -> str:
    """The step that a look at a part leads to."""
    if there is None:
        return "put"
    if rules.parts in ("plain", "content"):  # proved by size and checksum of one's own bytes
        return "take" if there == Content(rows, me, True) else "put"
    if there.sound and there.rows == rows:
        return "take"
    return "delete" if rules.parts == "deleted" else "replace"


def _written(parts: frozenset[tuple[str, Content]], put: Put) -> frozenset[tuple[str, Content]]:
    there = dict(parts).get(put.name)
    if (put.kind == "absent" and there is not None) or (put.kind == "match" and there != put.seen):
        return parts
    return frozenset({*(part for part in parts if part[0] != put.name), (put.name, put.content)})


def _end(rules: Rules, state: State, me: int, to: object) -> Iterator[tuple[str, State]]:
    """Lists the result and compares; where names are by content, others are tidied away first."""
    mine = state.drivers[me]
    named = frozenset(mine.record)
    if rules.parts == "content":
        kept = frozenset(part for part in state.parts if part in named)
        if named <= kept:
            yield "tidies away other names", to("success", state._replace(parts=kept))
        return
    if state.parts == named:
        yield "lists the result", to("success")
    if state.stale and named < state.parts:
        after = state._replace(stale=state.stale - 1)
        yield "lists the result, as it was before", to("success", after)
    if state.parts != named:  # an error; the same command is run again
        yield "begins again", to("layout", at=0, record=(), seen=None)


def _there(state: State) -> bool:
    return state.success is not None and state.success <= state.parts


# --- reap -----------------------------------------------------------------------------------------


def _reaper(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    mine = state.reaper
    if mine.step == "pieces" and state.pieces:
        yield "lists pieces", state._replace(reaper=Process("commits", listed=state.pieces))
    elif mine.step == "commits":
        shown = [(state.commits, state.stale)]
        if state.stale:
            for shard in SHARDS:
                if state.commits[shard] is not None:
                    lacking = tuple(None if s == shard else state.commits[s] for s in SHARDS)
                    shown.append((lacking, state.stale - 1))
        for commits, stale in shown:
            gone = frozenset(piece for piece in mine.listed if _orphan(rules, piece, commits))
            if state.success is not None and _there(state):
                gone = mine.listed
            after = state._replace(stale=stale, reaper=Process("delete", listed=gone))
            yield "lists commits", after
    elif mine.step == "delete":
        after = state._replace(pieces=state.pieces - mine.listed, reaper=Process("pieces"))
        yield "deletes what it takes for left over", after


def _orphan(rules: Rules, piece: tuple[int, int], commits: tuple[int | None, ...]) -> bool:
    shard, driver = piece
    if rules.reap == "age":
        return commits[shard] != driver
    return commits[shard] is not None and commits[shard] != driver


# --- retry ----------------------------------------------------------------------------------------


class Retries(NamedTuple):
    """Runs that retry the rows 0 and 1: `plans` by number, the rows of each. Per retrier: its step,
    the number it would take, the rows it knows to be taken."""

    plans: tuple[frozenset[int] | None, ...]
    retriers: tuple[tuple[str, int, frozenset[int]], ...]
    stale: int


def first_retries() -> Retries:
    return Retries((None,) * 3, (("look", 0, frozenset()),) * 3, 1)


def following_retries(asked: bool, state: Retries) -> Iterator[tuple[str, Retries]]:
    """`asked`: each number is asked for, from 1 on; else a listing is believed."""
    for me, (step, number, taken) in enumerate(state.retriers):

        def to(mine: tuple[str, int, frozenset[int]], me: int = me, **more: object) -> Retries:
            known = tuple(mine if at == me else one for at, one in enumerate(state.retriers))
            return state._replace(retriers=known, **more)

        if step == "look" and asked:
            plan = state.plans[number] if number < len(state.plans) else None
            if plan is None:
                yield f"retrier {me} finds no plan {number}", to(("plan", number, taken))
            else:
                yield f"retrier {me} reads plan {number}", to(("look", number + 1, taken | plan))
        elif step == "look":
            there = [n for n, plan in enumerate(state.plans) if plan is not None]
            for lacking in (None, *there) if state.stale else (None,):
                seen = [n for n in there if n != lacking]
                rows = frozenset(row for n in seen for row in state.plans[n])
                after = to(
                    ("plan", max(seen, default=-1) + 1, rows),
                    stale=state.stale - (lacking is not None),
                )
                yield f"retrier {me} lists plans {seen}", after
        elif step == "plan" and number < len(state.plans):
            free = [row for row in (0, 1) if row not in taken]
            wanted = frozenset(free[:1] if me == 2 else free)  # the third asks for one row alone
            if not wanted:
                continue
            plans = list(state.plans)
            if plans[number] is None:
                plans[number] = wanted
                yield (
                    f"retrier {me} puts plan {number}",
                    to(("done", 0, frozenset()), plans=tuple(plans)),
                )
            else:
                yield f"retrier {me} meets another plan {number}", to(("look", 0, frozenset()))


def faults_of_retries(state: Retries) -> Iterator[str]:
    rows = [row for plan in state.plans if plan is not None for row in plan]
    if len(rows) != len(set(rows)):
        yield "a row is retried twice"
