"""Agents that share a system prompt keep apart, each with its replica, by the words that they send by themselves."""

import json

import pytest

from gateway.prompt.pipeline import Pipeline
from replicas.simulated.model import sim_model_dir

from .replies import answers, post
from .stack import stack

CHAT, MESSAGES, RESPONSES = b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"
SYSTEM = "You are an agent who writes programs. " * 40


def body(path: bytes, **fields) -> bytes:
    said = [{"role": "user", "content": SYSTEM}]
    return json.dumps({"model": "m", "max_tokens": 1, "input" if path == RESPONSES else "messages": said, **fields}).encode()  # fmt: skip


def in_header(name: bytes):
    return lambda agent, path: (body(path, user="the same for all"), b"%b: agent-%d\r\n" % (name, agent))


def in_body(**fields):
    return lambda agent, path: (body(path, **json.loads(json.dumps(fields).replace("AGENT", f"agent-{agent}"))), b"")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (MESSAGES, in_header(b"X-Claude-Code-Session-Id")),
        (MESSAGES, in_body(metadata={"user_id": "user_0_account_1_session_AGENT"})),
        (RESPONSES, in_header(b"session-id")),
        (RESPONSES, in_header(b"session_id")),
        (RESPONSES, in_header(b"thread-id")),
        (RESPONSES, in_body(prompt_cache_key="AGENT", safety_identifier="one person")),
        (CHAT, in_header(b"x-session-affinity")),
        (CHAT, in_header(b"x-litellm-session-id")),
        (CHAT, in_header(b"X-SMG-Routing-Key")),
        (CHAT, in_header(b"x-dynamo-session-id")),
        (CHAT, in_body(safety_identifier="AGENT", user="all")),
    ],
)
async def test_agents_with_one_system_prompt_are_spread_and_each_stays(path, said):
    async with stack(*[answers()] * 4, policy="consistent_hash", pipeline=Pipeline(sim_model_dir(), "m", 16)) as s:
        homes: dict[int, set[str]] = {}
        talk = await s.talk()
        for agent in [*range(12)] * 3:
            raw, header = said(agent, path)
            status, headers, _ = await talk.ask(post(raw, path, header))
            assert status == 200
            homes.setdefault(agent, set()).add(headers["x-hitherto-replica"])
        assert {len(home) for home in homes.values()} == {1}
        assert len(set.union(*homes.values())) > 1  # of one they would need a luck of 1 in 4 million
