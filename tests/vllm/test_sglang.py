"""SGLang's own code, from its wheel: what its radix trees find of prompts is what their events let the map predict, and
its /tokenize is what an engine is asked for when it is adopted."""

import asyncio
import json
import os
import random
import shutil
import subprocess
from array import array
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from cachemap import CacheMap, EventIntake, chain_seed, hash_blocks
from cachemap.events import records
from gateway.ops.comparison import TokenizerComparison
from gateway.prompt.pipeline import Pipeline
from replicas import Replica
from replicas.answer import Answer
from replicas.engines.sglang import SGLANG
from replicas.launch import ports

from ..gateway.http.talk import eventually
from .engines import ENVIRONMENT, folder
from .managers import asks, texts

pytestmark = [pytest.mark.exact, pytest.mark.timeout(300)]
CHAT = "/v1/chat/completions"
PARTS = Path(__file__).with_name("sglang_parts.py")
BLOCK, PROMPTS, LONGEST = 16, 300, 400
TOKENS = 2400  # of a tree: of the prompts that come some ten
# Salt and adapter of a request; SGLang keeps the caches of each apart.
SPACES = ((None, None), (None, None), ("blue", None), (None, "red"), ("blue", "red"))


class Parts:
    """The process that has SGLang's code, asked a line at a time."""

    def __init__(self, log: Path):
        self.log = log
        more = [str(folder() / name) for name in ("sglang", "vision")]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [folder() / "bin" / "python", PARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": ":".join(more)},
            )  # fmt: skip

    def ask(self, **line) -> dict:
        self.process.stdin.write(json.dumps(line) + "\n" if line else "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()[-3000:]
        return json.loads(answer)


@pytest.fixture(scope="module")
def parts(vllm, tmp_path_factory) -> Parts:
    if not (folder() / "sglang" / "sglang").is_dir():
        pytest.skip("needs SGLang's wheel in the environment of vLLM 0.32: tests/vllm/install.sh")
    found = Parts(tmp_path_factory.mktemp("sglang") / "log")
    yield found
    found.process.kill()
    found.process.communicate()


@contextmanager
def grown(parts: Parts, **job):
    """A tree of SGLang's that publishes on 127.0.0.1, and what it tells of itself."""
    live, replay = (f"tcp://127.0.0.1:{port}" for port in ports.pick(2, "127.0.0.1", set()))
    events = {"publisher": "zmq", "bind": True, "topic": "kv", "endpoint": live, "replay_endpoint": replay}
    try:
        yield parts.ask(part="tree", events=events, **job)
    finally:
        parts.ask()


@asynccontextmanager
async def following(told: dict, page: int):
    """A map and what fills it from the publisher that SGLang describes in `/server_info`."""
    info = {"page_size": page, "max_total_num_tokens": TOKENS, "kv_events": told["kv_events"]}
    none = Answer(404)
    answers = {"/server_info": Answer(200, json.dumps(info).encode()), "/get_server_info": none, "/metrics": none}
    source, said = SGLANG.event_sources(answers, "127.0.0.1").by_rank[0], SGLANG.told(answers)
    table = CacheMap(1 << 20)
    intake = EventIntake(
        table, table.attach("r", None, True), endpoint=source.endpoint, replay=source.replay, topic=source.topic,
        decode=SGLANG.event_decoder(records), model="m", block_size=said.block_size, page_size=said.page_size,
    )  # fmt: skip
    task = asyncio.create_task(intake.run())
    try:
        await eventually(lambda: intake.state == "live", 30)
        yield lambda ids, salt, adapter: predicted(table, intake, ids, salt, adapter), intake
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def predicted(table: CacheMap, intake: EventIntake, ids: list[int], salt: str | None, adapter: str | None) -> int:
    """How many tokens of a prompt the replica is believed to hold."""
    data, seed = array("I", ids).tobytes(), chain_seed("m", BLOCK, adapter, salt)
    hashes = hash_blocks(data, BLOCK, seed)
    return intake.reach(table.match(hashes, 0.0).confirmed[0], hashes, seed, memoryview(data))


@pytest.mark.parametrize(
    ("tree", "page", "eagle"),
    [("rust", 1, False), ("rust", 16, False), ("rust", 1, True), ("python", 1, False),
     ("RadixCache", 1, False), ("RadixCache", 16, False)],
)  # fmt: skip
async def test_each_prediction_is_what_the_tree_finds(parts, model, tree, page, eagle):
    """`rust` is what a server of 0.5.23 has unless its model needs another one. With EAGLE a token is found only if the
    one behind it is the same."""
    dice, written, compared, last = random.Random(7), texts(7, LONGEST + 60), [], []
    with grown(parts, folder=str(model), tree=tree, page=page, eagle=eagle, tokens=TOKENS) as made:
        assert made["name"] == {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}.get(tree, tree)
        async with following(made, page) as (predict, intake):
            for text, length, more in asks(7, PROMPTS, LONGEST):
                ids, (salt, adapter) = written[text][: length + more], dice.choice(SPACES)
                # the prompt's last token is always computed
                expected = predict(ids[: length - 1], salt, adapter)
                told = parts.ask(ids=ids, prompt=length - 1, salt=salt, adapter=adapter is not None)
                compared.append((expected, told["found"]))
                last = [*last[-40:], (ids, salt, adapter)]
                await eventually(lambda: intake.last_seq == told["published"] - 1, 30)
            assert [pair for pair in compared if pair[0] != pair[1]] == []
            assert not intake.problems and not intake.gaps and not intake.orphans
            assert intake.blocks_removed > 100, "hardly anything was evicted"
            believed = [predict(*one) for one in last]
        async with following(made, page) as (predict, intake):
            assert intake.replayed == told["published"], "SGLang's own record of what it published"
            assert [predict(*one) for one in last] == believed
    found = [found for _, found in compared]
    assert sum(one > BLOCK for one in found) > PROMPTS / 5 and (page == BLOCK or any(one % BLOCK for one in found))


# Unlike the model's own template it shows tools and calls, as most models' do.
TOOLS = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {"parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}, "name": "weather"}
ASKED = {"role": "user", "content": "Which way?"}
BODIES = (
    {"messages": [ASKED], "tools": [{"type": "function", "function": WEATHER}]},
    {"messages": [ASKED], "tools": [{"function": {"strict": True, **WEATHER, "description": "d"}, "type": "function"}]},
    {"messages": [ASKED], "tools": []},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in ("One", "Two", "Three")]}]},
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, ASKED]},
    {"messages": [ASKED, {"role": "assistant", "content": "Up."}, {"role": "user", "content": "Why?", "name": "me"}]},
)


@pytest.fixture(scope="module", params=["the model's", "one with tools"])
def tokenizing(request, parts, model, tmp_path_factory) -> tuple[Replica, Path]:
    folder = tmp_path_factory.mktemp("models") / "m"
    shutil.copytree(model, folder)
    if request.param != "the model's":
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TOOLS}))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    [port] = ports.pick(1, "127.0.0.1", set())
    parts.ask(part="tokenize", folder=str(folder), port=port)
    replica = Replica("r", f"http://127.0.0.1:{port}", "127.0.0.1", port, address="127.0.0.1")
    replica.incarnation, replica.models, replica.dialect = "1", {"tiny": None}, SGLANG
    return replica, folder


async def test_its_tokens_are_those_that_the_gateway_makes(tokenizing):
    replica, folder = tokenizing
    pipeline = Pipeline(folder, "tiny", BLOCK)
    pipeline.follow(SGLANG.version_quirks("0.5.23"))
    assert chat_mode(pipeline) == "text", "before SGLang has shown how it fills the template"
    comparison = TokenizerComparison(lambda: pipeline)
    comparison.compare(replica)
    while comparison._running:
        await asyncio.wait(comparison._running, timeout=10)
    assert replica.tokenizer == "the gateway's, tokenizer.json as it is; fills its chat template alike"
    assert chat_mode(pipeline) == "exact"
    async with httpx.AsyncClient(base_url=replica.url, timeout=30) as client:
        for body in BODIES:
            theirs = (await client.post("/tokenize", json=body)).json()
            assert theirs["tokens"] == pipeline.made(CHAT, json.dumps(body).encode()), body


def chat_mode(pipeline: Pipeline) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "How is the weather up there? " * 20}]}
    return pipeline.prepare(CHAT, json.dumps(body).encode()).mode
