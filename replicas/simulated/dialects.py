"""The formats of answers in each API: chat completions, completions, responses and messages, whole or as a stream.

A `Dialect` makes the bytes of an answer; the server sends them.
"""

import base64
import math
import random
import struct
import time

import orjson

from .runner import Generation

DONE = b"data: [DONE]\n\n"


def event(data: dict, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = b"event: %b\n" % name.encode() if name else b""
    return b"%bdata: %b\n\n" % (head, orjson.dumps(data))


class Dialect:
    """The answer to one request, in the format of one API.

    `whole` makes the answer in one piece. A stream is made by `announce`, then for each sequence `begin` and `tokens`
    (its tokens from `start` to `end`), and `close` after the last sequence has ended.
    `body`: the request. `show_cached`: usage has the number of cached tokens. `n`: sequences for each prompt.
    """

    def __init__(self, id: str, model: str, body: dict, show_cached: bool, n: int = 1):
        self.id, self.model, self.body, self.show_cached, self.n = id, model, body, show_cached, n
        self.created = int(time.time())
        options = body.get("stream_options") or {}
        self.include_usage = bool(options.get("include_usage")) if isinstance(options, dict) else False
        self.token_ids = bool(body.get("return_token_ids"))

    def announce(self) -> bytes:
        """Return the bytes that a stream sends before anything is computed."""
        return b""

    def begin(self, generation: Generation, index: int) -> bytes:
        """Return the bytes that precede a sequence's first token; `index`: the sequence's number in the answer."""
        return b""

    def error(self, body: dict) -> bytes:
        """Return the event that ends a failed stream; `body`: the error object that an answer without stream has."""
        return event(body)

    def usage(self, generations: list[Generation], streamed: bool = False) -> dict:
        """Return vLLM's usage object. A prompt counts once, however many sequences (`n`) answer it.

        As in vLLM (seen with 0.28), `cached_tokens` is the count of a single sequence. In a stream this is the sequence
        that began first. In a whole answer, it is whichever sequence of the last prompt ended last.
        """
        sent = sum(generation.sent for generation in generations)
        prompts = generations[:: self.n]
        prompt = sum(len(generation.prompt) for generation in prompts)
        if streamed:
            cached = min(generations, key=lambda one: one.begun).cached
        else:
            cached = max(reversed(generations[-self.n :]), key=lambda one: one.last).cached
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + sent, "completion_tokens": sent}
        return counts | {"prompt_tokens_details": {"cached_tokens": cached} if self.show_cached else None}


class _OpenAI(Dialect):
    """The base of the formats of chat completions and completions.

    A subclass sets `object` and `chunk`: the value of the field "object" in a whole answer, and in an event of a
    stream. Its `_said` returns the fields of a choice that have the text.
    """

    object = chunk = ""

    def _frame(self, object: str, choices: list, **more) -> dict:
        head = {"id": self.id, "object": object, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}

    def _prompt(self, generation: Generation) -> dict:
        return {"prompt_token_ids": generation.prompt.tolist()} if self.token_ids else {}

    def _choice(self, generation: Generation, index: int, start: int = 0, end: int | None = None) -> dict:
        """Return one choice of an answer, with the tokens from `start` to `end`.

        If `end` is None, it is a choice of a whole answer, with all tokens; else it is one of a stream. `index`: the
        number of the choice.
        """
        last, text = end in (None, len(generation.ids)), "".join(generation.pieces[start:end])
        return {
            "index": index,
            **self._said(text, end is not None),
            "logprobs": None,
            "finish_reason": generation.reason if last else None,
            "stop_reason": generation.stop if last else None,
            "token_ids": generation.ids[start:end] if self.token_ids else None,
        }

    def tokens(self, generation: Generation, index: int, start: int, end: int) -> bytes:
        return event(self._frame(self.chunk, [self._choice(generation, index, start, end)]))

    def error(self, body: dict) -> bytes:
        return event(body) + DONE  # as in vLLM

    def close(self, generations: list[Generation]) -> bytes:
        usage = {"usage": self.usage(generations, streamed=True)}
        return (event(self._frame(self.chunk, [], **usage)) if self.include_usage else b"") + DONE

    def whole(self, generations: list[Generation]) -> dict:
        choices = [self._choice(generation, index) for index, generation in enumerate(generations)]
        return self._frame(self.object, choices, usage=self.usage(generations))


class Chat(_OpenAI):
    object, chunk = "chat.completion", "chat.completion.chunk"

    def begin(self, generation: Generation, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return event(self._frame(self.chunk, [choice], **self._prompt(generation)))

    def _said(self, text: str, streamed: bool) -> dict:
        if streamed:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": [], "reasoning": None}}

    def whole(self, generations: list[Generation]) -> dict:
        return super().whole(generations) | self._prompt(generations[0])


class Completion(_OpenAI):
    object = chunk = "text_completion"

    def _said(self, text: str, streamed: bool) -> dict:
        return {"text": text}

    def _choice(self, generation: Generation, index: int, start: int = 0, end: int | None = None) -> dict:
        choice = super()._choice(generation, index, start, end)
        return choice if start else choice | self._prompt(generation)


class Responses(Dialect):
    """The format of OpenAI's Responses API, whose streams have named events, numbered in sequence."""

    def __init__(self, *args):
        super().__init__(*args)
        self._number = 0
        self._where = {"item_id": "msg_" + self.id.removeprefix("resp_"), "output_index": 0, "content_index": 0}

    def _event(self, name: str, **more) -> bytes:
        data = {"type": name, "sequence_number": self._number, **more}
        self._number += 1
        return event(data, name)

    def _response(self, status: str, output: list, usage: dict | None) -> dict:
        head = {"id": self.id, "object": "response", "created_at": self.created, "model": self.model}
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        asked = {name: self.body.get(name) for name in ("instructions", "metadata")}
        asked |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": self.body.get("tools") or []}
        told = {"status": status, "output": output, "usage": usage, "error": None, "incomplete_details": why}
        return {**head, **told, **asked}

    def _item(self, status: str, content: list) -> dict:
        head = {"id": self._where["item_id"], "type": "message", "role": "assistant"}
        return {**head, "status": status, "content": content}

    @staticmethod
    def _part(text: str) -> dict:
        return {"type": "output_text", "text": text, "annotations": []}

    def whole(self, generations: list[Generation]) -> dict:
        (generation,) = generations[:1]
        status = "completed" if generation.reason == "stop" else "incomplete"
        counted = self.usage([generation])
        details = counted["prompt_tokens_details"] or {"cached_tokens": 0}
        usage = {"input_tokens": counted["prompt_tokens"], "input_tokens_details": details}
        usage |= {"output_tokens": counted["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0}}
        usage["total_tokens"] = counted["total_tokens"]
        return self._response(status, [self._item(status, [self._part("".join(generation.pieces))])], usage)

    def announce(self) -> bytes:
        started = self._response("in_progress", [], None)
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def error(self, body: dict) -> bytes:
        """Return OpenAI's error event.

        vLLM 0.32 breaks the stream off instead, as its error does not fit the type that it has for events.
        """
        error = body["error"]
        return self._event("error", code=str(error["code"]), message=error["message"], param=error["param"])

    def begin(self, generation: Generation, index: int) -> bytes:
        item = self._item("in_progress", [])
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._event("response.content_part.added", **self._where, part=self._part(""))

    def tokens(self, generation: Generation, index: int, start: int, end: int) -> bytes:
        delta = "".join(generation.pieces[start:end])
        return self._event("response.output_text.delta", **self._where, delta=delta, logprobs=[])

    def close(self, generations: list[Generation]) -> bytes:
        text, done = "".join(generations[0].pieces), self.whole(generations)
        (item,) = done["output"]
        return (
            self._event("response.output_text.done", **self._where, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._where, part=item["content"][0])
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event("response.completed", response=done)
        )


class Messages(Dialect):
    """The format of Anthropic's Messages API.

    In its usage, `input_tokens` excludes cached tokens, which have a field of their own. vLLM 0.28 and 0.32 also
    exclude newly stored tokens, which they report as `cache_creation_input_tokens`.
    """

    def _message(self, generation: Generation, content: list, sent: int, ended: dict) -> dict:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **ended, "usage": self._usage(generation, sent)}

    def _usage(self, generation: Generation, sent: int) -> dict:
        usage = {"input_tokens": len(generation.prompt), "output_tokens": sent}
        if self.show_cached:
            usage["input_tokens"] -= generation.cached
            usage["cache_read_input_tokens"] = generation.cached
        return usage

    @staticmethod
    def _ended(generation: Generation) -> dict:
        reason = "end_turn" if generation.reason == "stop" else "max_tokens"
        return {"stop_reason": reason if generation.stop is None else "stop_sequence", "stop_sequence": generation.stop}

    @staticmethod
    def _event(name: str, **more) -> bytes:
        return event({"type": name, **more}, name)

    def error(self, body: dict) -> bytes:
        """Return an error event; vLLM 0.32 gives every error the type `internal_error`."""
        return self._event("error", error={"type": "internal_error", "message": body["error"]["message"]})

    def begin(self, generation: Generation, index: int) -> bytes:
        message = self._message(generation, [], 0, {"stop_reason": None, "stop_sequence": None})
        started = self._event("message_start", message=message)
        return started + self._event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def tokens(self, generation: Generation, index: int, start: int, end: int) -> bytes:
        delta = {"type": "text_delta", "text": "".join(generation.pieces[start:end])}
        return self._event("content_block_delta", index=0, delta=delta)

    def close(self, generations: list[Generation]) -> bytes:
        generation, stopped = generations[0], self._event("content_block_stop", index=0)
        usage = self._usage(generation, generation.sent)
        delta = self._event("message_delta", delta=self._ended(generation), usage=usage)
        return stopped + delta + self._event("message_stop")

    def whole(self, generations: list[Generation]) -> dict:
        generation = generations[0]
        content = [{"type": "text", "text": "".join(generation.pieces)}]
        return self._message(generation, content, generation.sent, self._ended(generation))


def embeddings(id: str, model: str, generations: list[Generation], size: int, encoding: str | None) -> dict:
    """Return an answer of /v1/embeddings: for each prompt a unit vector of `size` that depends on its ids alone.

    `encoding`: "base64", or None for a list of numbers.
    """
    data = []
    for index, generation in enumerate(generations):
        rng = random.Random(generation.prompt.tobytes())
        vector = [rng.gauss(0, 1) for _ in range(size)]
        length = math.hypot(*vector)
        vector = [number / length for number in vector]
        if encoding == "base64":
            vector = base64.b64encode(struct.pack(f"<{size}f", *vector)).decode()
        data.append({"index": index, "object": "embedding", "embedding": vector})
    prompt = sum(len(generation.prompt) for generation in generations)
    usage = {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0, "prompt_tokens_details": None}
    return {"id": id, "object": "list", "created": int(time.time()), "model": model, "data": data, "usage": usage}
