"""Samples routing decisions as they are made, with their reasons, for the live page.

`Sampler.arm` installs the sampler as the observer of decisions. After one decision the sampler removes itself. At most
two decisions a second are thus explained, however many are made, and the others take no more time than without a
sampler.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, perf_counter, time
from typing import Any, NamedTuple

import orjson

from gateway.prompt import Prompt
from gateway.prompt.prompt import unread
from gateway.proxy.observers.shadow import Went
from gateway.proxy.placement.askers import Asker
from gateway.proxy.placement.placing import Acted, Placing
from policies import Evaluation
from policies.legs import Ways

from ..reasons import describe, legs_told, sentence

log = logging.getLogger("hitherto.admin")

SPAN = 900.0  # seconds that samples are kept
MOST_DECISIONS = 120
MOST_BLOCKS = 2048  # block hashes kept per prompt, for the tree of prefixes
MOST_BYTES = 4 * 2**20  # the most bytes of all samples together
LEAST_PAUSE, SHARE = 0.5, 0.005  # least seconds between two samples, and the most of the event loop's time
TEXT_CHARS, TEXT_BYTES = 2000, 256 * 2**10  # characters kept of a prompt's text; the largest body parsed for them


class Sample(NamedTuple):
    """The prefix of one sampled prompt.

    `at`: when it was sampled, in monotonic seconds. `space`: the number of its model's prompt format. `hashes`: the
    hashes of its first blocks, which have `block_size` tokens each. `text`: the beginning of its text, or "".
    """

    at: float
    space: int
    model: str
    block_size: int
    hashes: array[int]
    text: str

    @property
    def size(self) -> int:
        """The approximate memory that the sample takes, in bytes."""
        return 300 + 8 * len(self.hashes) + 4 * len(self.text) + 4 * len(self.model)


class Sampler:
    """The sampler of one gateway's routing decisions. `texts`: whether the beginnings of prompts' texts are kept."""

    def __init__(self, placing: Placing, texts: bool = False) -> None:
        self._placing, self._texts = placing, texts
        self.decisions: deque[dict[str, Any]] = deque(maxlen=MOST_DECISIONS)
        self.samples: deque[Sample] = deque()
        self._bytes = self._number = 0
        self._next = 0.0

    def arm(self, now: float) -> None:
        """Sample the next decision, unless the last sample is too recent. `now`: monotonic seconds."""
        if now >= self._next:
            self._placing.onlooker = self

    def disarm(self) -> None:
        self._placing.onlooker = self._placing.shadows

    def see(self, asker: Asker, evaluation: Evaluation, ways: Callable[[], Sequence[Ways]]) -> Acted | None:
        """Sample this decision; called as the observer of decisions (`placing.Onlooker`).

        Also passes the decision on to the policies in shadow mode, with `ways`, which returns the ways of splitting the
        request into two legs. Returns a function that the caller calls with the request's placement, or None.
        """
        self.disarm()
        begun, told = perf_counter(), None
        try:
            told = self._described(asker, evaluation)
        except Exception:  # the request must not suffer for it
            log.exception("a decision could not be explained")
        self._next = monotonic() + max(LEAST_PAUSE, (perf_counter() - begun) / SHARE)
        beyond = self._placing.shadows.see(asker, evaluation, ways) if self._placing.shadows is not None else None
        return partial(self._acted, asker, told, beyond) if told is not None else beyond

    def _described(self, asker: Asker, evaluation: Evaluation) -> dict[str, Any]:
        placing = self._placing
        prompt = asker.prompt or unread(asker.request.path, asker.model)
        demand, candidates = evaluation.demand, evaluation.candidates
        choice = placing.router.policy.choose(demand, candidates, explain=True)
        # The choice that was made is described, not the one computed here again: admission may have excluded replicas,
        # or a draw between equal ones may have decided.
        told = describe(
            placing.router.policy,
            prompt,
            evaluation._replace(choice=choice._replace(index=evaluation.choice.index)),
            placing.router.outputs,
        )
        return told | {"narrowed": evaluation.narrowed}

    def _acted(self, asker: Asker, told: dict[str, Any], beyond: Acted | None, went: Went) -> None:
        if beyond is not None:
            beyond(went)
        try:
            self._keep(asker, told, went)
        except Exception:
            log.exception("a decision could not be kept")

    def _keep(self, asker: Asker, told: dict[str, Any], went: Went) -> None:
        if not isinstance(went, int):
            told["legs"] = legs_told(went)
        else:
            told["legs"] = None
            if not told["replicas"][went]["chosen"]:
                told["shared"], told["choice"] = True, told["replicas"][went]["id"]
                for at, one in enumerate(told["replicas"]):
                    one["chosen"] = at == went
        legs, prompt = told.get("legs"), asker.prompt
        chosen = next(one for one in told["replicas"] if one["chosen"])
        body = asker.request.body if self._texts else b""
        text = text_in(body)
        self._number += 1
        self.decisions.append(
            {
                "number": self._number,
                "at": time(),
                "model": told["model"] or "",
                "path": told["path"],
                "tokens": told["tokens"],
                "held_tokens": told["tokens"] - chosen["uncached_tokens"],
                "replicas": [legs["prefill"], legs["decode"]] if legs else [told["choice"]],
                "sentence": sentence(told),
                "text": text if self._texts else None,
            }
        )
        if prompt is not None and len(prompt.hashes):
            self._add(prompt, text)

    def recent(self, now: float) -> list[Sample]:
        """Return the samples of the last SPAN seconds, the oldest first. `now`: monotonic seconds."""
        self._drop(now)
        return [*self.samples]

    def _drop(self, now: float) -> None:
        while self.samples and (self._bytes > MOST_BYTES or self.samples[0].at < now - SPAN):
            self._bytes -= self.samples.popleft().size

    def _add(self, prompt: Prompt, text: str) -> None:
        now = monotonic()
        hashes = array("Q", prompt.hashes[:MOST_BLOCKS])
        sample = Sample(now, prompt.space, prompt.adapter or prompt.model, prompt.block_size, hashes, text)
        self.samples.append(sample)
        self._bytes += sample.size
        self._drop(now)


def text_in(body: bytes) -> str:
    """Return the first TEXT_CHARS characters of the prompt in a request body; "" for a large or unreadable body."""
    if not 0 < len(body) <= TEXT_BYTES:
        return ""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    parts: list[str] = []
    _collect(fields, parts)
    return " ".join(parts)[:TEXT_CHARS]


def _collect(of: Any, parts: list[str]) -> None:
    """Append to `parts` the texts of the prompt in a parsed request body, in order.

    `of`: the body, or a part of it. Only the fields that APIs use for prompts are searched.
    """
    if isinstance(of, str):
        parts.append(of)
    elif isinstance(of, list):
        for one in of:
            _collect(one, parts)
    elif isinstance(of, dict):
        for name in ("system", "instructions", "messages", "prompt", "input", "content", "text"):
            if name in of:
                _collect(of[name], parts)
