"""User functions as a job names them, well behaved and not."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
SURROGATE = "broken \udcff text"  # what os.fsdecode makes of a byte that is not UTF-8


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


# --- prompt.function ----------------------------------------------------------------------------


def as_text(row: Row) -> str:
    return f"about {row['Company']}"


def noted(row: Row) -> str:
    """Notes in the folder of the row that the row is prepared."""
    Path(row["folder"], str(row["id"])).touch()
    return as_text(row)


def as_messages(row: Row) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(row["Company"])}]


def as_parts(row: Row) -> list[Row]:
    """The content of the message stands in the row, as JSON."""
    return [{"role": "user", "content": json.loads(row["Parts"])}]


def as_dict(row: Row) -> Row:
    return {"messages": as_messages(row), "sampling": {"max_tokens": 3}}


def as_pair(row: Row) -> Any:
    return [row["a"], "dog"] if row["a"] else "dog"


def by_name(row: Row) -> Any:
    """Does what the row's Company says, so that one block holds good and bad rows."""
    what = row["Company"]
    if what == "raise":
        raise LookupError("no such company")
    return ODD.get(what, f"about {what}")


ODD: Row = {
    "number": 7,
    "null": None,
    "empty list": [],
    "empty dict": {},
    "list of text": ["a"],
    "no content": [{"role": "user"}],
    "raw prompt": {"prompt": "a"},
    "unknown key": {"messages": [{"role": "user", "content": "a"}], "temperature": 1},
    "sampling text": {"messages": [{"role": "user", "content": "a"}], "sampling": "hot"},
    "sampling object": {"messages": [{"role": "user", "content": "a"}], "sampling": {"x": {1}}},
    "content object": [{"role": "user", "content": object()}],
    "surrogate": SURROGATE,
}


def raises_surrogate(row: Row) -> str:
    raise ValueError(SURROGATE)


def raises_unprintable(row: Row) -> str:
    raise Unprintable


def own_sampling(row: Row) -> Row:
    """The row's own sampling fields stand in it, as JSON."""
    return {
        "messages": [{"role": "user", "content": "x"}],
        "sampling": json.loads(row["Sampling"]),
    }


PART: Row = {"type": "text", "text": ""}
KEPT: Row = {
    "messages": [{"role": "user", "content": ""}],
    "parts": [{"role": "user", "content": [PART]}],
    "sampling": {"max_tokens": 0, "bad_words": [""]},
}


def reuses(row: Row) -> Row:
    """Messages and sampling are the same objects in every row, changed from row to row."""
    KEPT["messages"][0]["content"] = f"about {row['Company']}"
    KEPT["sampling"]["max_tokens"] = len(row["Company"])
    KEPT["sampling"]["bad_words"][0] = row["Company"]
    return {"messages": KEPT["messages"], "sampling": KEPT["sampling"]}


def reuses_parts(row: Row) -> list[Row]:
    PART["text"] = f"about {row['Company']}"
    return KEPT["parts"]


not_callable = 3


# --- output.postprocess -------------------------------------------------------------------------


def shout(row: Row) -> Row:
    return {"loud": row["response"].upper(), "length": len(row["response"])}


def skip_odd(row: Row) -> Row | None:
    return None if row["id"] % 2 else {"even": row["id"]}


def by_id(row: Row) -> Any:
    """Row 0 is good, the others each go wrong in their own way."""
    if row["id"] == 1:
        raise KeyError("gone")
    return {
        2: "text",
        3: {"value": "not a number"},
        4: {"value": 1, "more": 2},
        5: {},
        6: {7: 1},
        7: None,
        8: {"value": 1 << 80},
    }.get(row["id"], {"value": row["id"]})


def changes_type(row: Row) -> Row:
    """Integers from the first ten rows, text from later ones."""
    return {"value": row["id"] if row["id"] < 10 else f"text {row['id']}"}


def whole_row(row: Row) -> Row:
    return dict(row)


MADE: Row = {"id": 0, "tags": [], "deep": {"list": [{"at": 0}]}, "raw": bytearray(1)}
VECTOR = np.zeros(2)


def reuses_result(row: Row) -> Row:
    """The same dict each time, and the same values within it, changed from row to row."""
    MADE["id"] = row["id"]
    MADE["tags"][:] = [row["response"]]
    MADE["deep"]["list"][0]["at"] = row["id"]
    MADE["raw"][:] = b"%d" % row["id"]
    VECTOR[:] = row["id"]
    return {**MADE, "vector": VECTOR}


def reuses_dict(row: Row) -> Row:
    MADE["id"] = row["id"]
    return MADE


def nulls(row: Row) -> Row:
    return {"value": None}


def raises_surrogate_after(row: Row) -> Row:
    raise ValueError(SURROGATE)


# --- end or hang their process ------------------------------------------------------------------


class Panic(BaseException):
    """What a library written in Rust raises, say: no Exception."""


def deadly(row: Row) -> Any:
    """Does to its process what the row's `what` says, else answers."""
    what = row["what"]
    if row.get("not_in") == os.getpid():
        raise RuntimeError("called in the process that must go on")
    if what == "exit":
        os._exit(3)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "loop":
        while True:
            pass
    if what == "hold":  # as an extension that never gives the interpreter back
        ctypes.PyDLL(None).sleep(600)
    if what == "closed":
        os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
        time.sleep(600)
    if what == "forked" and os.fork() == 0:
        return {"said": "answer of a copy"}
    if what in ("child", "busy child"):
        copy = os.fork()
        if copy == 0:
            time.sleep(600)
        with open(row["file"], "w") as file:
            file.write(str(copy))
        while what == "busy child":
            pass
        os._exit(4)
    if what == "later":  # ends the process once the answer is given
        threading.Timer(0.1, os._exit, [5]).start()
    if what == "once" and not os.path.exists(row["file"]):
        open(row["file"], "x").close()
        os._exit(3)
    if what == "node stops":
        from ray._raylet import raise_sys_exit_with_custom_error_message

        raise_sys_exit_with_custom_error_message("The process receives a SIGTERM.", exit_code=1)
    if what == "unpicklable":
        return {"said": threading.Lock()}
    if raised := RAISED.get(what):
        raise raised
    return {"said": what.upper()}


RAISED: dict[str, BaseException] = {
    "sys.exit": SystemExit("no good"),
    "interrupt": KeyboardInterrupt(),
    "generator": GeneratorExit("over"),
    "panic": Panic("index out of bounds"),
    "error": LookupError("not there"),
}


def deadly_ask(row: Row) -> str:
    return str(deadly(row)["said"])


def thought_and_said(row: dict[str, Any]) -> dict[str, Any]:
    """Both columns of an answer with thinking."""
    return {"both": f"{row['reasoning']}/{row['response']}"}


def most(row: Row) -> Row:
    """The largest number of a vector."""
    return {"most": max(row["answer"])}


def seats(row):
    """Takes an answer that is an object."""
    return {"first": row["response"]["seats"][0]}


def at_random(row: dict[str, Any]) -> str:
    """A prompt that is another one each time."""
    return f"Say {row['text']} {uuid.uuid4()}"


def staff(row: dict[str, Any]) -> dict[str, Any]:
    """Of each of several parsed answers, under the name of output.column."""
    return {"staff": [float(one["staff"]) for one in row["found"]]}


def least_sure(row: dict[str, Any]) -> dict[str, Any]:
    """The least logarithm of an answer's tokens."""
    return {"least": min(one["logprob"] for one in row["logprobs"])}


def judged(row: Row) -> Row | None:
    """Return the answer as a label; fail, or leave the row out, where the answer says so."""
    answer = row["response"]
    if answer == "no label":
        raise ValueError("the answer is no label")
    if answer == "other columns":
        return {"label": answer, "more": 1}
    return None if answer == "left out" else {"label": answer}


def changing(row: Row) -> str:
    """Return a prompt that follows from `CHANGING`, which a test sets between two calls."""
    return f"Say {CHANGING.get(row['text'], row['text'])}"


CHANGING: dict[str, str] = {}


def fails_by_flag(row: Row) -> Row:
    if row["flag"]:
        raise ValueError("the row is flagged")
    return {"label": row["response"]}
