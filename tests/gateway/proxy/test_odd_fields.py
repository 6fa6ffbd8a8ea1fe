"""Whatever a field of a body holds, the gateway passes the request on or says what is wrong with it; it never fails."""

import json

import pytest

from gateway.prompt.pipeline import Pipeline
from policies import NAMES
from replicas.simulated.model import sim_model_dir

from .replies import answers, post
from .stack import stack

SAYS = b"All the world's a stage. " * 20
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SAYS.decode()}]},
    "/v1/completions": {"prompt": SAYS.decode()},
    "/v1/responses": {"input": SAYS.decode()},
    "/v1/messages": {"messages": [{"role": "user", "content": SAYS.decode()}]},
    "/v1/embeddings": {"input": SAYS.decode()},
}
FIELDS = "max_tokens max_completion_tokens max_output_tokens n best_of stream truncate_prompt_tokens".split()
VALUES = (0, False, True, -0.0, -1, 1, 2**63, 10**30, 1.5, "", "x", [], {}, [{}], None)
ANSWER = b'{"choices":[{"index":0,"finish_reason":"stop"}],"output":[],"content":[],"data":[],"object":"x"}'


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline(sim_model_dir(), "m", 16)


@pytest.mark.parametrize("policy", NAMES)
async def test_a_field_of_another_type_or_size_is_passed_on_or_refused_in_words(policy, pipeline):
    async with stack(answers(ANSWER), answers(ANSWER), policy=policy, pipeline=pipeline) as gateway:
        for path, body in BODIES.items():
            for field in FIELDS:
                talker = await gateway.talk()
                for value in VALUES:
                    said = json.dumps({"model": "m", **body, field: value}).encode()
                    status, _, answer = await talker.ask(post(said, path.encode()))
                    assert status in (200, 400), (path, field, value, status, answer)
                    assert status == 200 or json.loads(answer)["error"]["message"]
        assert gateway.idle()


async def test_a_prompt_alone_may_be_asked_for(pipeline):
    """`max_tokens: 0` with `echo`, as evaluations ask for the log probabilities of a text."""
    async with stack(answers(ANSWER), policy="least_time", pipeline=pipeline) as gateway:
        talker = await gateway.talk()
        said = {"model": "m", "prompt": SAYS.decode(), "max_tokens": 0, "echo": True, "logprobs": 1}
        assert (await talker.ask(post(said, b"/v1/completions")))[0] == 200
