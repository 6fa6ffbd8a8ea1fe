"""Caches that were warm before a run are told from those that the run itself warmed."""

import types

import pytest

from loadgen.drive.records import Record
from loadgen.report import warm
from loadgen.workload.conversations import Conversation, Turn, span

LENGTH = 100


def talk(name: str, *contents) -> Conversation:
    return Conversation(name, [Turn([{"role": "user", "content": content}], 1) for content in contents])


def record(conversation: str, turn: int, sent: float, cached: int | None, error=None) -> Record:
    return Record(conversation, turn, sent, sent=sent, prompt_tokens=LENGTH, cached_tokens=cached, error=error)


def found(conversations, *records):
    return warm.warm(types.SimpleNamespace(conversations=conversations, done=list(records)))


def said(figures) -> str:
    return " ".join(warm.notice({"warm_caches": figures}))


SHARED = (span(1, 60), span(2, 40)), (span(1, 60), span(3, 40))


def test_what_a_run_warms_itself_is_not_warm():
    talks = [talk("a", SHARED[0], (span(9, 10),)), talk("b", SHARED[1])]
    figures = found(talks, record("b", 0, 2.0, 60), record("a", 1, 1.0, 96), record("a", 0, 0.0, 0))
    assert figures == {"requests": 1, "prompt_tokens": 100, "cached_tokens": 0, "is_text": False}
    assert said(figures) == ""


def test_what_was_there_before_is_said():
    talks = [talk("a", SHARED[0]), talk("b", (span(5, 100),))]
    figures = found(talks, record("a", 0, 0.0, 96), record("b", 0, 1.0, 96))
    sentence = said(figures)
    assert "of 2 prompts that begin like none before them in this run, 192 of 200 tokens were cached (96 %)" in sentence
    assert sentence.endswith("Restart them, or take another --seed.")


def test_another_seed_is_no_remedy_where_the_texts_stay_the_same():
    sentence = said(found([talk("a", "words " * 50)], record("a", 0, 0.0, 96)))
    assert """Restart them, or send --extra-body '{"cache_salt": "NAME"}'""" in sentence
    assert sentence.endswith("Another --seed does not help: the texts stay the same.")


def test_one_prompt_is_one():
    figures = found([talk("a", (span(5, 100),))], record("a", 0, 0.0, 96))
    assert "warm: of the one prompt that begins like none before it in this run, 96 of 100 tokens" in said(figures)


def test_the_words_of_a_chat_template_are_no_warm_cache():
    assert said(found([talk("a", "words " * 50)], record("a", 0, 0.0, 9))) == ""


@pytest.mark.parametrize(
    "one, other, alike", [("x" * 70 + "a", "x" * 70 + "b", True), ("a" + "x" * 70, "b" + "x" * 70, False)]
)
def test_texts_begin_alike_by_their_first_words(one, other, alike):
    assert (warm.beginning(talk("a", one)) == warm.beginning(talk("b", other))) is alike


def test_tools_stand_before_the_first_message():
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    one, other = Conversation("a", talk("a", "x").turns, tools), Conversation("b", talk("b", "y").turns, tools)
    assert warm.beginning(one) == warm.beginning(other)


def test_engines_that_report_nothing_leave_it_open():
    talks = [talk("a", "x"), talk("b", "y")]
    assert found(talks, record("a", 0, 0.0, None), record("b", 0, 1.0, 50, error="closed")) is None
    assert said(None) == ""
