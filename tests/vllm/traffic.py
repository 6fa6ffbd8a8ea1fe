"""Conversations with shared prefixes, driven through a gateway: what was predicted to be cached, and what was.

A talk has one way of asking (chat, chat as a stream, text or token ids to complete), one model or adapter, maybe a
tenant's salt, and one of few instructions at its start. It grows with each answer; when it is long, another begins.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import httpx

from ..gateway.running import Running, predicted
from ..gateway.test_continue import events
from .witness import Witness

WORDS = (
    "the a of to and block cache token prefix route holds when engine it asks long short then why answer seven".split()
)
WAYS = ("chat", "stream", "text", "ids")
# How long before a request was sent the map may have last been right: events lie in queues and sockets for a few
# milliseconds, for longer on a machine that has other work.
LATE_SECONDS = 0.5


def cached(answer: httpx.Response) -> int:
    """The cached tokens that an engine reports, in any API."""
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return (details["cached_tokens"] if details else usage.get("cache_read_input_tokens")) or 0


def prompt_tokens(answer: httpx.Response) -> int:
    """The tokens of a prompt that an engine reports, in any API."""
    usage = answer.json()["usage"]
    whole = usage.get("prompt_tokens") or usage["input_tokens"]
    return whole + sum(usage.get(f"cache_{how}_input_tokens") or 0 for how in ("read", "creation"))


@dataclass
class Outcome:
    """One answered request, in tokens."""

    way: str
    model: str
    salt: str | None
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


@dataclass
class Talk:
    """A conversation; after `longest` tokens another one begins."""

    dice: random.Random
    way: str
    model: str
    salt: str | None
    choices: int
    longest: int
    ids: list[int] = field(default_factory=list)
    tokens: int = 0

    def __post_init__(self):
        self.text = f"Instruction {self.dice.randrange(3)}. " + " ".join(WORDS) * 4
        self.messages = [{"role": "system", "content": self.text}]

    def ask(self) -> tuple[str, dict]:
        """The next request's path and body."""
        # no seed: vLLM 0.32 on a CPU dies of one when a prompt is computed in parts (torch has no set_offset there)
        body = {"model": self.model, "max_tokens": self.dice.choice((1, 4, 20, 40)), "ignore_eos": True}
        body |= {"return_token_ids": True, "n": self.choices} | ({"cache_salt": self.salt} if self.salt else {})
        words = " ".join(self.dice.choices(WORDS, k=self.dice.randint(20, 90)))
        if self.way in ("chat", "stream"):
            self.messages.append({"role": "user", "content": words})
            body["messages"] = self.messages
            if self.way == "stream":
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            return "/v1/chat/completions", body
        if self.way == "text":
            self.text += " " + words
        elif self.ids:
            self.ids += [self.dice.randrange(300, 1000) for _ in range(self.dice.randint(20, 90))]
        return "/v1/completions", body | {"prompt": self.ids or self.text}

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


def talking(models=("tiny",), salts=(None,), ways=WAYS, choices=1, longest=900) -> Callable[[random.Random], Talk]:
    """What makes talks of any of these models or adapters, tenants' salts and ways."""
    return lambda dice: Talk(dice, dice.choice(ways), dice.choice(models), dice.choice(salts), choices, longest)


MODELS = ("tiny", "red", "blue")
plain, mixed = talking(), talking(MODELS, (None, "a", "b"))


async def turn(gateway: Running, talk: Talk) -> Outcome:
    """One request of a talk, sent and judged."""
    path, body = talk.ask()
    sent = time.time()
    response = await gateway.client.post(path, json=body)
    answered = time.time()
    assert response.status_code == 200, response.text
    if talk.way == "stream":
        *answers, last = events(response.text)
        assert last == "[DONE]"
    else:
        answers = [response.json()]
    talk.hear(answers)
    usage = answers[-1]["usage"]
    ids = answers[0].get("prompt_token_ids") or answers[0]["choices"][0]["prompt_token_ids"]
    talk.tokens = usage["total_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Outcome(
        talk.way, talk.model, talk.salt, response.headers["x-hitherto-replica"], usage["prompt_tokens"],
        predicted(response), cached, ids, sent, answered,
    )  # fmt: skip


async def drive(
    gateway: Running, requests: int, make=plain, talks: int = 12, clients: int = 1, seed: int = 1, between=None
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
            idle.append(make(dice) if talk.tokens > talk.longest else talk)
            if between:
                await between(outcome)

    await asyncio.gather(*(client() for _ in range(clients)))
    return outcomes


async def exactly(gateway: Running, requests: int, make=plain, *, witnesses: Iterable[Witness], **options):
    """`drive`, and after each answer wait until its replica's events have come: then each prediction is exact."""
    of_replica = {witness.id: witness for witness in witnesses}
    outcomes = await drive(
        gateway, requests, make, **options, between=lambda one: caught_up(gateway, of_replica[one.replica])
    )
    assert share_equal(outcomes) == 1, wrong(outcomes)
    return outcomes


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
    over = sum(one.predicted > one.cached for one in found)
    return f"{len(found)} of {len(outcomes)}, {over} of them over:\n" + "\n".join(map(str, found[:20]))
