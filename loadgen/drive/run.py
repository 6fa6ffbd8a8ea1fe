"""Run a load: send each conversation's turns when they are due and collect the records.

Open loop: conversations begin at their scheduled times. Closed loop (`users`): each user begins a conversation when the
user's previous one has ended, so that a slow server gets fewer requests. In both, each record states how much later
than due its request was sent. The generator or its limit `max_concurrency` causes this delay, and not the server.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import orjson

from loadgen.drive.client import Client
from loadgen.drive.records import Load, Record
from loadgen.workload import synthetic
from loadgen.workload.conversations import Conversation, Message, Turn

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LEAD_SECONDS = 0.05  # a first request's body is built this long before it is due; 12,000 tokens take 0.5 ms


@dataclass(slots=True)
class Asking:
    """What all requests of a run have in common: model, endpoint, and how messages become a request body."""

    model: str
    endpoint: str = CHAT
    completions: bool = False  # the body carries `prompt` rather than `messages`
    engine_replies: bool = False  # conversations continue with the engine's replies, not with those in the load's file
    ignore_eos: bool = False
    extra: Mapping[str, object] = field(default_factory=dict)  # fields merged in last; None removes a field
    salt: int = 0  # seed of the tokens made up for spans (parts of a prompt without text)
    vocabulary: int = synthetic.VOCABULARY  # upper bound of these tokens' ids

    def put(self, message: Message) -> Message:
        """Return the message with its spans (tokens without text) as text, or as token ids for the completions API."""
        if self.completions and isinstance(spans := message.get("content"), tuple):
            return {**message, "content": synthetic.token_ids(spans, self.salt, self.vocabulary)}
        return synthetic.in_words(message, self.salt)

    def body(self, messages: list[Message], turn: Turn, extra: Mapping[str, object]) -> bytes:
        """Return the JSON request body for `turn`.

        `messages`: all messages of the conversation up to and including those of this turn; `extra`: request fields
        that the conversation sets, such as `tools`.
        """
        said: dict[str, object] = {"model": self.model}
        contents = [message.get("content") for message in messages]
        if self.completions and any(isinstance(content, np.ndarray) for content in contents):
            said["prompt"] = np.concatenate(contents)
        elif self.completions:
            said["prompt"] = "\n\n".join(str(content or "") for content in contents)
        else:
            said["messages"] = messages
        said |= {"max_tokens": turn.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            said["ignore_eos"] = True
        said |= {**extra, **self.extra}
        said = {key: value for key, value in said.items() if value is not None}
        return orjson.dumps(said, option=orjson.OPT_SERIALIZE_NUMPY)

    def answer(self, turn: Turn, record: Record) -> Message:
        """Return the assistant message that continues the conversation: the engine's reply or that of the load's file.

        A reply in the file that calls tools is always kept, because the tool results that follow refer to its calls.
        """
        if turn.reply is not None and (not self.engine_replies or turn.reply.get("tool_calls")):
            return self.put(turn.reply)
        return {"role": "assistant", "content": record.text}


class Run(Load):
    """A load that is sent to one server over HTTP."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        starts: Sequence[float],
        client: Client,
        asking: Asking,
        max_concurrency: int | None = None,
        users: int | None = None,
    ):
        super().__init__(conversations, starts, max_concurrency, users)
        self.client, self.asking = client, asking
        self.inflight: dict[int, Record] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    @property
    def connections(self) -> int:
        return self.client.opened

    async def go(self) -> list[Record]:
        """Send the load to its end and return the records."""
        gc.collect()
        gc.freeze()  # prompts are many and long-lived; a full collection during the run would delay sends
        cpu, self.began = time.process_time(), perf_counter()
        watch = asyncio.create_task(self._watch_itself())
        try:
            async with asyncio.TaskGroup() as group:
                if self.users is None:
                    self._spawn(group, self._arrivals(group))
                waiting = iter(self.conversations)
                for _ in range(self.users or 0):
                    self._spawn(group, self._user(group, waiting))
        finally:
            watch.cancel()
            gc.unfreeze()
        self.ended, self.cpu_seconds = perf_counter(), time.process_time() - cpu
        return self.done

    def stop(self) -> None:
        """End the run early: cancel requests in flight, send no further ones, and keep the records so far."""
        self.interrupted = True
        for task in self._tasks:
            task.cancel()

    def _spawn(self, group: asyncio.TaskGroup, coroutine: Coroutine[None, None, None]) -> None:
        task = group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_itself(self) -> None:
        while True:
            wall, cpu = perf_counter(), time.process_time()
            await asyncio.sleep(1)
            self.busiest_second = max(self.busiest_second, (time.process_time() - cpu) / (perf_counter() - wall))

    async def _arrivals(self, group: asyncio.TaskGroup) -> None:
        for conversation, start in zip(self.conversations, self.starts, strict=True):
            due = self.began + start
            if (wait := due - _LEAD_SECONDS - perf_counter()) > 0:
                await asyncio.sleep(wait)
            self._spawn(group, self._converse(group, conversation, due, []))

    async def _user(self, group: asyncio.TaskGroup, waiting: Iterator[Conversation]) -> None:
        for conversation in waiting:
            await self._converse(group, conversation, perf_counter(), [])

    async def _converse(
        self, group: asyncio.TaskGroup, conversation: Conversation, due: float, messages: list[Message]
    ) -> None:
        """Send the turns of a conversation one after the other; the first one is sent at time `due`.

        `messages`: the messages before the first turn; those of each turn and its reply are appended to the list.
        Conversations that fork off from a turn begin with a copy of the messages so far and run concurrently.
        """
        for number, turn in enumerate(conversation.turns):
            messages += map(self.asking.put, turn.messages)
            body = self.asking.body(messages, turn, conversation.extra)
            if (wait := due - perf_counter()) > 0:
                await asyncio.sleep(wait)
            record = await self._ask(body, Record(conversation.id, number, due, _last_words(turn)))
            if record.error and (self.asking.engine_replies or turn.reply is None):
                return  # without a reply the conversation cannot continue
            messages.append(self.asking.answer(turn, record))
            for fork in turn.forks:
                self._spawn(group, self._converse(group, fork, record.last + fork.turns[0].think, list(messages)))
            if number + 1 < len(conversation.turns):
                due = record.last + conversation.turns[number + 1].think

    async def _ask(self, body: bytes, record: Record) -> Record:
        self.inflight[id(record)] = record
        try:
            async with self._slots:
                await self.client.ask(self.asking.endpoint, body, record)
        finally:
            del self.inflight[id(record)]
        self.done.append(record)
        return record


def _last_words(turn: Turn) -> str:
    content = turn.messages[-1].get("content")
    return content if isinstance(content, str) else ""
