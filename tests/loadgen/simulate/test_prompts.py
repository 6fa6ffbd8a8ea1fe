"""What a simulation hashes is what a live run sends, token for token."""

import json
import random

import numpy as np
import pytest

from cachemap.hashing import chain_seed, hash_blocks
from loadgen.drive.run import COMPLETIONS, Asking
from loadgen.simulate.prompts import Prompts, Said
from loadgen.workload import generators, traces
from replicas.simulated.model import sim_model_dir
from replicas.simulated.tokens import Tokens

SALT, SEED = 5, chain_seed("simulated", 16)
LOOK = {"name": "look", "description": "Look it up.", "parameters": {"type": "object"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"what": "bag"}'}}
CHAT = {
    "tools": [{"type": "function", "function": LOOK}],
    "messages": [
        {"role": "system", "content": "Be brief. " * 30},
        {"role": "user", "content": "Where is my bag? " * 20},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "Lost in Lyon. " * 20},
        {"role": "assistant", "content": "In Lyon, I am afraid."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    ],
}


def play(prompts, conversation):
    """(request, what was said before it) of each turn."""
    said = Said()
    for turn in conversation.turns:
        said, request = prompts.ask(said, turn, conversation.extra)
        yield turn, request
        said = prompts.answer(said, turn)


@pytest.mark.parametrize("generator", [generators.chat, generators.agents, generators.rag])
def test_made_up_loads_are_the_token_ids_that_are_sent(generator):
    asking = Asking("sim", COMPLETIONS, True, salt=SALT)
    for conversation in generator(random.Random(1), 8):
        messages = []
        for turn, request in play(Prompts(16, SALT, 32_000), conversation):
            messages += map(asking.put, turn.messages)
            ids = np.concatenate([message["content"] for message in messages])
            assert request.tokens == len(ids) and request.output == turn.max_tokens and not request.text
            assert request.hashes == hash_blocks(ids.astype("<u4").tobytes(), 16, SEED)
            if turn.reply:
                messages.append(asking.put(turn.reply))


def test_text_is_what_the_bundled_model_makes_of_the_messages(tmp_path):
    model = Tokens(sim_model_dir())
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    (conversation,) = traces.conversation_file(tmp_path / "chat.json", None, None, 0.0, random.Random(1))
    said = []
    for turn, request in play(Prompts(16, SALT, 32_000), conversation):
        said += turn.messages
        ids = np.array(model.chat({"messages": said, "tools": CHAT["tools"]}), np.uint32)
        assert request.tokens == len(ids) and request.text
        assert request.hashes == hash_blocks(ids.tobytes(), 16, SEED)
        said.append(turn.reply)
    assert len(conversation.turns) == 3


def test_a_reply_is_found_again_where_it_is_the_engines_own():
    conversation = generators.chat(random.Random(1), 6, turns=6, range_ratio=0.0)[0]
    for engine_replies in (False, True):
        (_, first), (turn, second), *_ = play(Prompts(16, SALT, 32_000, engine_replies), conversation)
        assert len(first.all_hashes) == (first.tokens + first.output) // 16
        assert first.all_hashes[: len(first.hashes)] == first.hashes == second.hashes[: len(first.hashes)]
        goes_on = second.hashes[: len(first.all_hashes)] == first.all_hashes
        assert goes_on == engine_replies


def test_no_two_replies_that_nobody_sends_again_share_blocks():
    prompts = Prompts(16, SALT, 32_000)
    one, other = (prompts.ask(Said(), generators.chat(random.Random(1), 3)[0].turns[0], {})[1] for _ in range(2))
    assert one.hashes == other.hashes and one.all_hashes[len(one.hashes) :]
    assert not set(one.all_hashes[len(one.hashes) :]) & set(other.all_hashes[len(other.hashes) :])
