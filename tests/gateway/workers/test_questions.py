"""What the admin side asks of workers, and what becomes of answers that nobody waits for any more."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.dispatch.life import Failure
from gateway.workers.questions import Questions

DECIDED = {"told": {"id": "0-1", "replica": "a:1", "candidates": ["a:1"], "lease_seconds": 60.0}}


@pytest.fixture
def asked():
    """(questions to one worker, what was sent to it, the worker)."""
    sent: list[dict] = []
    member = SimpleNamespace(index=0, live=True, channel=SimpleNamespace(send=sent.append))
    return Questions(SimpleNamespace(live=[member])), sent, member


def ask(questions: Questions) -> asyncio.Task:
    return asyncio.ensure_future(questions.decide("/v1/completions", b"{}", {}, (), 60.0))


async def test_an_answer_reaches_who_asked(asked):
    questions, sent, member = asked
    task = ask(questions)
    await asyncio.sleep(0)
    questions.answered(member, sent[0]["number"], DECIDED)
    assert await task == DECIDED["told"] and [one["what"] for one in sent] == ["decide"]


async def test_a_decision_for_somebody_who_has_left_is_ended(asked):
    questions, sent, member = asked
    task = ask(questions)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    questions.answered(member, sent[0]["number"], DECIDED)
    assert [(one["what"], one["arguments"].get("id")) for one in sent[1:]] == [("done", "0-1")]
    questions.answered(member, sent[1]["number"], {"told": {"id": "0-1", "done": True}})
    assert len(sent) == 2


async def test_a_decision_that_comes_too_late_is_ended(asked, monkeypatch):
    monkeypatch.setattr("gateway.workers.questions.ANSWER_SECONDS", 0.0)
    questions, sent, member = asked
    with pytest.raises(Failure, match="gave no answer"):
        await ask(questions)
    questions.answered(member, sent[0]["number"], DECIDED)
    assert sent[-1]["what"] == "done"


async def test_failures_that_come_late_need_nothing(asked):
    questions, sent, member = asked
    questions.answered(member, 7, {"failure": [503, "no replica is ready", {}]})
    assert not sent
