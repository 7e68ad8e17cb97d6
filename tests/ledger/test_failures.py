"""Losses and failure keys: values in the program, text in records."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefect_raybatch.errors import SourceError, StoreUnavailable
from prefect_raybatch.ledger.failures import (
    FailureKey,
    Loss,
    add_failures,
    alike,
    counted_message,
    failure_texts,
)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("EngineDied: exit code -9: SIGKILL", "EngineDied", "exit code -9: SIGKILL"),
        ("KeyError: ", "KeyError", ""),
        ("EngineDied: two\nlines", "EngineDied", "two\nlines"),
        ("the block came back without 3 rows", "", "the block came back without 3 rows"),
        ("the engine did not start: a reason", "", "the engine did not start: a reason"),
        ("", "", ""),
    ],
)
def test_a_loss_is_its_text_and_back(text, kind, message):
    for fatal in (True, False):
        loss = Loss.parse(text, fatal)
        assert loss == Loss(kind, message, fatal) and str(loss) == text
        assert pickle.loads(pickle.dumps(loss)) == loss


@given(st.text())
@example("A: : b")
def test_any_text_of_a_loss_stays_what_it_is(text):
    assert str(Loss.parse(text)) == text


def test_an_error_that_a_retry_cannot_mend_is_fatal():
    assert Loss.of(SourceError("gone")) == Loss("SourceError", "gone", fatal=True)
    assert Loss.of(StoreUnavailable("no answer")) == Loss("StoreUnavailable", "no answer")


def test_which_losses_may_be_of_a_row():
    died, hung, store = (Loss(kind, "") for kind in ("EngineDied", "BlockHung", "StoreError"))
    assert died.is_death and died.may_be_caused_by_row
    assert not hung.is_death and hung.may_be_caused_by_row
    assert not store.is_death and not store.may_be_caused_by_row
    assert not Loss("EngineDiedNever", "").is_death


names = st.text(st.characters(exclude_characters="|"), max_size=8)


@given(names, names, st.text(max_size=20))
def test_a_failure_key_is_its_text_and_back(stage, error, message):
    key = FailureKey(stage, error, message)
    assert str(key) == f"{stage}|{error}|{message}" and FailureKey.parse(str(key)) == key
    assert pickle.loads(pickle.dumps(key)) == key


def test_a_text_of_another_shape_is_a_stage():
    assert FailureKey.parse("odd") == FailureKey("odd", "", "")
    assert FailureKey.parse("a|B|c | d") == FailureKey("a", "B", "c | d")


def test_keys_of_one_text_are_counted_together():
    odd = {FailureKey("a|b", "c"): 2, FailureKey("a", "b|c"): 3}
    assert failure_texts(odd) == {"a|b|c|": 5}


def test_failures_are_added_by_key():
    a, b = FailureKey("a"), FailureKey("b")
    assert add_failures([{a: 1, b: 2}, {}, {b: 3}]) == {a: 1, b: 5}


def test_messages_that_differ_in_numbers_alone_are_one_group():
    def key(message, error="E"):
        return FailureKey("prepare", error, message)

    long = "the prompt, of which much is to be said, and all of it at such length that it is cut: "
    failures = {
        key("5,123 tokens, more than 4096"): 2,
        key("77 tokens, more than 4096"): 3,
        key("77 tokens, more than 4096", "F"): 1,
        key("no number"): 4,
        key(counted_message(long + "1 of the tokens of it, and the rest")): 1,
        key(counted_message(long + "1234 of the tokens of it, and the rest")): 1,
    }
    found = alike(failures)
    assert found[key("N tokens, more than 4096")] == 5
    assert found[key("77 tokens, more than 4096", "F")] == 1 and found[key("no number")] == 4
    assert sorted(found.values()) == [1, 2, 4, 5] and len(found) == 4


def test_a_message_is_counted_by_its_beginning_and_shows_where_it_is_cut():
    assert counted_message("x" * 120) == "x" * 120
    assert counted_message("x" * 121) == "x" * 117 + "..."
