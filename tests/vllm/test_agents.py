"""Sessions of coding agents over two engines: what is predicted is found, and it is most of what they say."""

import json

import pytest

from loadgen.demo.tiny_model import tiny_model

from ..gateway.prompt.reference import model_dir
from .bodies import MESSAGES, RESPONSES
from .engines import gateway, release, version
from .traffic import cached, caught_up, predicted, prompt_tokens

pytestmark = pytest.mark.exact

SESSIONS, TURNS = 4, 5
RULES = "You are a coding agent. Work in small steps, and test what you change. " * 12
SCHEMA = {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}


@pytest.fixture(scope="module")
def both(start_engine, tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("models") / "qwen3", model_dir("qwen3"))
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    return [engine.wait() for engine in [start_engine(*flags, model=folder, blocks=1024) for _ in range(2)]]


def told(session: int, turn: int) -> str:
    return f"In session {session} the command number {turn} wrote these lines. " * 12


def codex(session: int, turns: int) -> dict:
    items: list[dict] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"Mend number {session}."}]},
    ]
    for turn in range(turns):
        call, out = "function_call", "function_call_output"
        more = {"name": "shell", "arguments": json.dumps({"command": ["ls", str(turn)]})}
        if turn == 1:
            more = {"name": "look_up", "namespace": "mcp", "arguments": "{}"}
        if turn == 2 and version() >= (0, 32):
            call, out, more = "custom_tool_call", "custom_tool_call_output", {"name": "apply_patch", "input": "*** é"}
        thought = [{"type": "reasoning_text", "text": "So."}]
        items += [
            {"type": "reasoning", "id": f"rs_{turn}", "summary": [], "content": thought},
            {"type": call, "call_id": f"c{turn}", **more},
            {"type": out, "call_id": f"c{turn}", "output": told(session, turn)},
        ]
    tools = [
        {"type": "function", "name": "shell", "description": "Run it.", "parameters": SCHEMA, "strict": False},
        {"type": "custom", "name": "apply_patch", "description": "Patch a file."},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "namespace", "name": "mcp", "description": "Docs", "tools": [
            {"type": "function", "name": "look_up", "description": "Look it up.", "parameters": {"type": "object"}}]},
    ]  # fmt: skip
    return {"instructions": RULES, "tools": tools, "input": items, "store": False, "max_output_tokens": 2,
            "prompt_cache_key": f"codex-{session}"}  # fmt: skip


def claude(session: int, turns: int) -> dict:
    line = f"x-anthropic-billing-header: cc_version=2.1; cch={session}{turns};"
    messages: list[dict] = [{"role": "user", "content": [{"type": "text", "text": f"Mend number {session}."}]}]
    for turn in range(turns):
        found: list[dict] = [{"type": "text", "text": told(session, turn)}]
        if turn == 1:
            found = [{"type": "tool_reference", "tool_name": "Grep"}, {"type": "tool_reference", "tool_name": "Read"}]
        if turn == 2:
            found += [{"type": "search_result", "source": "s", "title": "t", "content": []}, {"type": "document"}]
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": found}
        messages += [
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "So.", "signature": "s"},
                                              {"type": "tool_use", "id": f"t{turn}", "name": "Bash", "input": {"n": turn}}]},
            {"role": "user", "content": [result]},
        ]  # fmt: skip
    messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    tools = [{"name": name, "description": name, "input_schema": SCHEMA} for name in ("Bash", "Grep", "Read")]
    system = [{"type": "text", "text": line}, {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}]
    return {"system": system, "tools": tools, "messages": messages, "max_tokens": 2,
            "metadata": {"user_id": f"user_session_{session}"}}  # fmt: skip


@pytest.mark.parametrize("path, session", [(RESPONSES, codex), (MESSAGES, claude)])
async def test_sessions_of_coding_agents(both, witness_of, path, session):
    witnesses = {engine.id: witness_of(engine) for engine in both}
    prompts = expected = found = 0
    async with gateway(*both) as process:
        for turn in range(TURNS):
            for one in range(SESSIONS):
                answer = await process.client.post(path, json={"model": "tiny", **session(one, turn)}, timeout=120)
                assert answer.status_code == 200, answer.text
                prompts, found = prompts + prompt_tokens(answer), found + cached(answer)
                expected += predicted(answer)
                await caught_up(process, witnesses[answer.headers["x-hitherto-replica"]])
    said = f"{expected:,} tokens predicted, {found:,} found of {prompts:,}"
    print(f"\nvLLM {release()} {path}, {SESSIONS} sessions of {TURNS} turns: {said}")
    assert expected == found > prompts / 2, said
