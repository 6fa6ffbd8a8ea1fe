"""Runs a load: sends each conversation's turns when they are due and collects the records."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter

import orjson

from loadgen.client import Client
from loadgen.records import Record
from loadgen.workloads import Conversation, Message, Turn

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class Asking:
    """How a request is put, the same for all of a run."""

    model: str
    endpoint: str = CHAT
    completions: bool = False  # the body carries `prompt` rather than `messages`
    engine_replies: bool = False  # append what the engine answered, rather than what the file says
    ignore_eos: bool = False
    extra: Mapping[str, object] = field(default_factory=dict)  # merged last; None removes a field

    def body(self, messages: list[Message], turn: Turn, extra: Mapping[str, object]) -> bytes:
        said: dict[str, object] = {"model": self.model}
        if self.completions:
            said["prompt"] = "\n\n".join(str(message.get("content") or "") for message in messages)
        else:
            said["messages"] = messages
        said |= {"max_tokens": turn.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            said["ignore_eos"] = True
        said |= {**extra, **self.extra}
        return orjson.dumps({key: value for key, value in said.items() if value is not None})

    def answer(self, turn: Turn, record: Record) -> Message:
        """What stands in the conversation after this turn.

        A reply of the file that calls tools is kept in any case: the tool results that follow name
        its calls.
        """
        if turn.reply is not None and (not self.engine_replies or turn.reply.get("tool_calls")):
            return turn.reply
        return {"role": "assistant", "content": record.text}


class Run:
    """One load against one server. A view may look at `done` and `inflight` while `go` runs."""

    def __init__(self, conversations: list[Conversation], starts: list[float], client: Client, asking: Asking,
                 max_concurrency: int | None = None):
        self.conversations, self.starts, self.client, self.asking = conversations, starts, client, asking
        self.total = sum(len(conversation.turns) for conversation in conversations)
        self.done: list[Record] = []
        self.inflight: dict[int, Record] = {}
        self.began = self.ended = 0.0
        self.cpu_seconds = 0.0
        self.interrupted = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.max_concurrency = max_concurrency
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    @property
    def not_sent(self) -> int:
        """Turns that never went out: their conversation had failed before, or the run was stopped."""
        return self.total - len(self.done) if self.ended else 0

    async def go(self) -> list[Record]:
        gc.collect()
        gc.freeze()  # prompts are many and stay; a full collection in mid-run would make sends late
        cpu, self.began = time.process_time(), perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks.add(group.create_task(self._start_all(group)))
        finally:
            gc.unfreeze()
        self.ended, self.cpu_seconds = perf_counter(), time.process_time() - cpu
        return self.done

    def stop(self) -> None:
        """End early, keeping what is known."""
        self.interrupted = True
        for task in self._tasks:
            task.cancel()

    async def _start_all(self, group: asyncio.TaskGroup) -> None:
        for conversation, start in zip(self.conversations, self.starts, strict=True):
            due = self.began + start
            if (wait := due - perf_counter()) > 0:
                await asyncio.sleep(wait)
            task = group.create_task(self._converse(conversation, due))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _converse(self, conversation: Conversation, due: float) -> None:
        messages: list[Message] = []
        for number, turn in enumerate(conversation.turns):
            messages += turn.messages
            body = self.asking.body(messages, turn, conversation.extra)
            if (wait := due - perf_counter()) > 0:
                await asyncio.sleep(wait)
            record = Record(conversation.id, number, due, _last_words(turn))
            self.inflight[id(record)] = record
            try:
                async with self._slots:
                    await self.client.ask(self.asking.endpoint, body, record)
            finally:
                del self.inflight[id(record)]
            self.done.append(record)
            if record.error and (self.asking.engine_replies or turn.reply is None):
                return  # there is no reply to go on from
            if number + 1 < len(conversation.turns):
                messages.append(self.asking.answer(turn, record))
                due = record.last + conversation.turns[number + 1].think


def _last_words(turn: Turn) -> str:
    content = turn.messages[-1].get("content")
    return content if isinstance(content, str) else ""
