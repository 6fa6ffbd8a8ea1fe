"""What is guessed from the text of a prompt does not count against what an engine's events say."""

import json

import pytest

from gateway.proxy.exactness.drift import WINDOW

from .replies import answers, post
from .stack import stack

TOLD = {"usage": {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 900}}}
USAGE = json.dumps({"object": "chat.completion", "choices": [], **TOLD}).encode()


class Events:
    """Of an engine that is followed well."""

    def __init__(self):
        self.resyncs = 0

    def resync(self):
        self.resyncs += 1

    def request_finished(self, blocks): ...


@pytest.mark.parametrize("events", [Events(), None], ids=["events", "none"])
async def test_only_a_map_of_guesses_is_mended_by_guesses(events):
    async with stack(answers(USAGE)) as s:
        (backend,) = s.proxy.backends.values()
        backend.intake = events
        talk = await s.talk()
        for number in range(2 * WINDOW):
            body = {"model": "m", "messages": [{"role": "user", "content": f"{number} word" * 100}]}
            assert (await talk.ask(post(body)))[0] == 200
        assert s.metrics.prompts.total(mode="text") == 2 * WINDOW
        assert (s.metrics.heals.total() > 0) == (events is None) and (events is None or events.resyncs == 0)
