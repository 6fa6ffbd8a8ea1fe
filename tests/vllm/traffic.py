"""Conversations with shared prefixes, driven through a gateway: what was predicted to be cached, and what was.

A talk has one way of asking (chat, chat as a stream, text or token ids to complete), one model or adapter, maybe a
tenant's salt, and one of few instructions at its start. It grows with each answer; when it is long, another begins.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

from ..gateway.running import Running
from .witness import Witness

WORDS = (
    "the a of to and block cache token prefix route holds when engine it asks long short then why answer seven".split()
)
WAYS = ("chat", "stream", "text", "ids")
# How long before a request was sent the map may have last been right: events lie in queues and sockets for a few
# milliseconds, for longer on a machine that has other work.
LATE_SECONDS = 0.5
LONGEST = 900  # tokens of a talk; after that another one begins


@dataclass
class Outcome:
    """One answered request, in tokens."""

    way: str
    model: str
    salt: str | None
    choices: int
    replica: str
    prompt: int
    predicted: int
    cached: int
    ids: list[int] = field(repr=False)  # of the prompt, as the engine says
    sent: float  # time.time()
    answered: float

    @property
    def equal(self) -> bool:
        return self.predicted == self.cached

    def held(self, witness: Witness, early: float = 0.0) -> set[int]:
        """Tokens of its prompt that the replica held, at some moment from `early` seconds before asking to the
        answer."""
        size = witness.block_size
        chains = witness.chains.of(self.ids, size, None if self.model == "tiny" else self.model, self.salt)
        most = (self.prompt - 1) // size  # the last token is always computed
        return {min(reach, most) * size for reach in witness.reaches(chains, self.sent - early, self.answered)}


class Talk:
    def __init__(self, dice: random.Random, way: str, model: str = "tiny", salt: str | None = None, choices: int = 1):
        self.dice, self.way, self.model, self.salt, self.choices = dice, way, model, salt, choices
        self.longest = LONGEST
        root = f"Instruction {dice.randrange(3)}. " + " ".join(WORDS) * 4
        self.messages = [{"role": "system", "content": root}]
        self.text, self.ids = root, []
        self.tokens = 0

    @property
    def over(self) -> bool:
        return self.tokens > self.longest

    def words(self, least: int, most: int) -> str:
        return " ".join(self.dice.choices(WORDS, k=self.dice.randint(least, most)))

    def ask(self) -> tuple[str, dict]:
        """The next request's path and body."""
        # no seed: vLLM 0.32 on a CPU dies of one when a prompt is computed in parts (torch has no set_offset there)
        body = {
            "model": self.model,
            "max_tokens": self.dice.choice((1, 4, 20, 40)),
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body |= {"cache_salt": self.salt} if self.salt else {}
        body |= {"n": self.choices} if self.choices > 1 else {}
        if self.way in ("chat", "stream"):
            self.messages.append({"role": "user", "content": self.words(20, 90)})
            body["messages"] = self.messages
            if self.way == "stream":
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            return "/v1/chat/completions", body
        if self.way == "text":
            self.text += " " + self.words(20, 90)
            return "/v1/completions", body | {"prompt": self.text}
        if not self.ids:
            return "/v1/completions", body | {"prompt": self.text}
        self.ids += [self.dice.randrange(300, 1000) for _ in range(self.dice.randint(20, 90))]
        return "/v1/completions", body | {"prompt": self.ids}

    def hear(self, answers: list[dict]) -> None:
        """Go on from what was answered: one object, or a stream's chunks."""
        first = [choice for one in answers for choice in one["choices"] if choice["index"] == 0]
        if self.way in ("chat", "stream"):
            said = "".join((choice.get("message") or choice.get("delta"))["content"] or "" for choice in first)
            self.messages.append({"role": "assistant", "content": said})
        elif self.way == "text":
            self.text += first[0]["text"]
        else:  # what was generated is in the cache as these very tokens
            self.ids = first[0]["prompt_token_ids"] + first[0]["token_ids"]


async def turn(gateway: Running, talk: Talk) -> Outcome:
    """One request of a talk, sent and judged."""
    path, body = talk.ask()
    sent = time.time()
    response = await gateway.client.post(path, json=body)
    answered = time.time()
    assert response.status_code == 200, response.text
    if talk.way == "stream":
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        answers = [json.loads(line) for line in lines]
    else:
        answers = [response.json()]
    talk.hear(answers)
    usage = answers[-1]["usage"]
    ids = answers[0].get("prompt_token_ids") or answers[0]["choices"][0]["prompt_token_ids"]
    talk.tokens = usage["total_tokens"]
    return Outcome(
        talk.way, talk.model, talk.salt, talk.choices, response.headers["x-hitherto-replica"], usage["prompt_tokens"],
        int(response.headers["x-hitherto-cached-tokens"]), usage["prompt_tokens_details"]["cached_tokens"],
        ids, sent, answered,
    )  # fmt: skip


async def drive(
    gateway: Running, requests: int, make, talks: int = 12, clients: int = 1, seed: int = 1, between=None
) -> list[Outcome]:
    """`clients` at a time take turns in `talks` conversations, each made by `make(dice)`, until `requests` are
    answered. `between(outcome)` is awaited after each."""
    dice = random.Random(seed)
    idle = [make(dice) for _ in range(talks)]
    outcomes: list[Outcome] = []
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            talk = idle.pop(dice.randrange(len(idle)))
            outcomes.append(outcome := await turn(gateway, talk))
            idle.append(make(dice) if talk.over else talk)
            if between:
                await between(outcome)

    await asyncio.gather(*(client() for _ in range(clients)))
    return outcomes


def plain(dice: random.Random) -> Talk:
    """A talk with the base model, of any way."""
    return Talk(dice, dice.choice(WAYS))


def mixed(dice: random.Random) -> Talk:
    """A talk of any way, model, adapter and tenant."""
    return Talk(dice, dice.choice(WAYS), dice.choice(("tiny", "red", "blue")), dice.choice((None, "a", "b")))


def unsalted(dice: random.Random) -> Talk:
    """A talk of any way, model and adapter."""
    return Talk(dice, dice.choice(WAYS), dice.choice(("tiny", "red", "blue")))


async def events(gateway: Running) -> dict[str, float]:
    """The gateway's counts of events, of all replicas together."""
    counts: dict[str, float] = {}
    for line in (await gateway.admin.get("/metrics")).text.splitlines():
        if line.startswith("hitherto_event_"):
            name = line.removeprefix("hitherto_event_").partition("_total")[0]
            counts[name] = counts.get(name, 0) + float(line.rpartition(" ")[2])
    return counts


async def caught_up(gateway: Running, witness: Witness, seconds: float = 10) -> None:
    """Until the gateway's map has as many blocks of the replica as the engine, by all its events, has."""
    async with asyncio.timeout(seconds):
        while True:
            # a thread of the engine's tells of a step's blocks, perhaps after it has answered
            await asyncio.to_thread(witness.settled, 0.03)
            (found,) = [one for one in (await gateway.status())["replicas"] if one["url"] == witness.url]
            if found["map_blocks"] == witness.held:
                return


def share_equal(outcomes: list[Outcome]) -> float:
    return sum(one.equal for one in outcomes) / len(outcomes)


def wrong(outcomes: list[Outcome]) -> str:
    """The mispredicted ones, for a failed assertion."""
    found = [one for one in outcomes if not one.equal]
    return f"{len(found)} of {len(outcomes)}:\n" + "\n".join(map(str, found[:20]))
