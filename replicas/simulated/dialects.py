"""The API formats of answers: chat completions, completions, responses and messages, whole or as a stream.

A dialect makes bytes, the server sends them. A streamed token is two prepared byte strings around the token's JSON
text: with hundreds of streams a JSON encoder per token would cost more than the engine itself.
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
    """One request's answer in one API.

    `begin` (of a sequence), `tokens` (its tokens start..end) and `close` (after the last sequence ended) make a stream;
    `whole` is the answer in one piece. Each subclass has all four.
    """

    def __init__(self, id: str, model: str, body: dict, show_cached: bool, n: int = 1):
        self.id, self.model, self.body, self.show_cached, self.n = id, model, body, show_cached, n
        self.created = int(time.time())
        options = body.get("stream_options") or {}
        self.include_usage = bool(options.get("include_usage")) if isinstance(options, dict) else False
        self.token_ids = bool(body.get("return_token_ids"))

    def announce(self) -> bytes:
        """Return what a stream sends before anything is computed."""
        return b""

    def error(self, body: dict) -> bytes:
        """Return the event that ends a failed stream; `body`: the error as it would be in an answer of its own."""
        return event(body)

    def usage(self, generations: list[Generation], streamed: bool = False) -> dict:
        """Return vLLM's usage object; a prompt with `n` sequences counts once.

        The cached tokens are those of one sequence: in a stream the first that answered, else the one of the last
        prompt that ended last (seen with 0.28).
        """
        sent = sum(generation.sent for generation in generations)
        prompts = generations[:: self.n]
        prompt = sum(len(generation.prompt) for generation in prompts)
        if streamed:
            cached = min(generations, key=lambda one: one.begun).cached
        else:
            cached = max(reversed(generations[-self.n :]), key=lambda one: one.last).cached
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + sent,
            "completion_tokens": sent,
            "prompt_tokens_details": {"cached_tokens": cached} if self.show_cached else None,
        }


class _OpenAI(Dialect):
    """The common part of chat completions and completions.

    A subclass has `object`, `chunk_object`, `field` (the bytes around a token's JSON text within a choice), `_text` (a
    text in a streamed choice) and `_said` (the whole text).
    """

    def _frame(self, choices: list, **more) -> dict:
        return {
            "id": self.id,
            "object": self.chunk_object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def __init__(self, *args):
        super().__init__(*args)
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def _prepared(self, index: int) -> tuple[bytes, bytes]:
        frame = orjson.dumps(self._frame([]))[:-2]  # up to and including the [ of choices
        return (
            b'data: %b{"index":%d,%b' % (frame, index, self.field[0]),
            self.field[1] + b',"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n',
        )

    def tokens(self, generation: Generation, index: int, start: int, end: int) -> bytes:
        if self.token_ids or end == len(generation.ids):
            return self._chunk(generation, index, start, end)
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = self._prepared(index)
        return b"%b%b%b" % (around[0], orjson.dumps("".join(generation.pieces[start:end])), around[1])

    def _chunk(self, generation: Generation, index: int, start: int, end: int, **more) -> bytes:
        last = end == len(generation.ids)
        choice = {
            "index": index,
            **self._text("".join(generation.pieces[start : None if last else end])),
            "logprobs": None,
            "finish_reason": generation.reason if last else None,
            "stop_reason": generation.stop if last else None,
            "token_ids": generation.ids[start:end] if self.token_ids else None,
            **more,
        }
        return event(self._frame([choice]))

    def error(self, body: dict) -> bytes:
        return event(body) + DONE  # as in vLLM

    def close(self, generations: list[Generation]) -> bytes:
        if self.include_usage:
            return event(self._frame([], usage=self.usage(generations, streamed=True))) + DONE
        return DONE

    def whole(self, generations: list[Generation]) -> dict:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(generation, index) for index, generation in enumerate(generations)],
            "usage": self.usage(generations),
            **self._more(generations),
        }

    def _choice(self, generation: Generation, index: int) -> dict:
        return {
            "index": index,
            **self._said("".join(generation.pieces)),
            "logprobs": None,
            "finish_reason": generation.reason,
            "stop_reason": generation.stop,
            "token_ids": generation.ids if self.token_ids else None,
        }

    def _more(self, generations: list[Generation]) -> dict:
        return {}


class Chat(_OpenAI):
    object, chunk_object = "chat.completion", "chat.completion.chunk"
    field = (b'"delta":{"content":', b"}")

    def begin(self, generation: Generation, index: int) -> bytes:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        more = {"prompt_token_ids": generation.prompt.tolist()} if self.token_ids else {}
        return event(self._frame([choice], **more))

    def _text(self, text: str) -> dict:
        return {"delta": {"content": text}}

    def _said(self, text: str) -> dict:
        return {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": [], "reasoning": None}}

    def _more(self, generations: list[Generation]) -> dict:
        return {"prompt_token_ids": generations[0].prompt.tolist()} if self.token_ids else {}


class Completion(_OpenAI):
    object = chunk_object = "text_completion"
    field = (b'"text":', b"")

    def begin(self, generation: Generation, index: int) -> bytes:
        return b""

    def _text(self, text: str) -> dict:
        return {"text": text}

    _said = _text

    def tokens(self, generation: Generation, index: int, start: int, end: int) -> bytes:
        if not self.token_ids or start:
            return super().tokens(generation, index, start, end)
        return self._chunk(generation, index, 0, end, prompt_token_ids=generation.prompt.tolist())

    def _choice(self, generation: Generation, index: int) -> dict:
        prompt = {"prompt_token_ids": generation.prompt.tolist()} if self.token_ids else {}
        return super()._choice(generation, index) | prompt


class Responses(Dialect):
    """OpenAI's Responses: named events, numbered in sequence."""

    def __init__(self, *args):
        super().__init__(*args)
        self._number = 0
        self._item = "msg_" + self.id.removeprefix("resp_")

    def _event(self, name: str, **more) -> bytes:
        data = {"type": name, "sequence_number": self._number, **more}
        self._number += 1
        return event(data, name)

    def _response(self, status: str, output: list, counted: dict | None) -> dict:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "output": output,
            "usage": counted,
            "error": None,
            "incomplete_details": None,
            "instructions": self.body.get("instructions"),
            "metadata": self.body.get("metadata"),
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": self.body.get("tools") or [],
            "top_p": 1.0,
            "max_output_tokens": self.body.get("max_output_tokens"),
            "previous_response_id": None,
        }

    def _message(self, status: str, text: str | None) -> dict:
        content = [] if text is None else [{"type": "output_text", "text": text, "annotations": [], "logprobs": None}]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _done(self, generation: Generation) -> dict:
        whole = generation.reason == "stop"
        status = "completed" if whole else "incomplete"
        counted = self.usage([generation])
        details = {"cached_tokens": generation.cached if self.show_cached else 0}
        response = self._response(
            status,
            [self._message(status, "".join(generation.pieces))],
            {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": details,
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
        )
        if not whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def announce(self) -> bytes:
        started = self._response("in_progress", [], None)
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def error(self, body: dict) -> bytes:
        """Return OpenAI's error event.

        vLLM 0.32 breaks the stream off instead, as its own error does not fit its event type.
        """
        error = body["error"]
        return self._event("error", code=str(error["code"]), message=error["message"], param=error["param"])

    def begin(self, generation: Generation, index: int) -> bytes:
        where = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return self._event(
            "response.output_item.added", output_index=0, item=self._message("in_progress", None)
        ) + self._event(
            "response.content_part.added", **where, part={"type": "output_text", "text": "", "annotations": []}
        )

    def tokens(self, generation: Generation, index: int, start: int, end: int) -> bytes:
        return self._event(
            "response.output_text.delta",
            item_id=self._item,
            output_index=0,
            content_index=0,
            delta="".join(generation.pieces[start:end]),
            logprobs=[],
        )

    def close(self, generations: list[Generation]) -> bytes:
        text, done = "".join(generations[0].pieces), self._done(generations[0])
        where = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return (
            self._event("response.output_text.done", **where, text=text, logprobs=[])
            + self._event("response.content_part.done", **where, part=done["output"][0]["content"][0])
            + self._event("response.output_item.done", output_index=0, item=done["output"][0])
            + self._event("response.completed", response=done)
        )

    def whole(self, generations: list[Generation]) -> dict:
        return self._done(generations[0])


class Messages(Dialect):
    """Anthropic's Messages; `input_tokens` exclude cached tokens, which have a field of their own.

    vLLM 0.28 and 0.32 also exclude newly stored tokens, as `cache_creation_input_tokens`.
    """

    def _usage(self, generation: Generation, sent: int) -> dict:
        if not self.show_cached:
            return {"input_tokens": len(generation.prompt), "output_tokens": sent}
        return {
            "input_tokens": len(generation.prompt) - generation.cached,
            "output_tokens": sent,
            "cache_read_input_tokens": generation.cached,
        }

    @staticmethod
    def _stop(generation: Generation) -> str:
        if generation.stop is not None:
            return "stop_sequence"
        return "end_turn" if generation.reason == "stop" else "max_tokens"

    def error(self, body: dict) -> bytes:
        """Return an error event; vLLM 0.32 gives every error the type `internal_error`."""
        return event(
            {"type": "error", "error": {"type": "internal_error", "message": body["error"]["message"]}}, "error"
        )

    def begin(self, generation: Generation, index: int) -> bytes:
        message = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(generation, 0),
        }
        return event({"type": "message_start", "message": message}, "message_start") + event(
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            "content_block_start",
        )

    def tokens(self, generation: Generation, index: int, start: int, end: int) -> bytes:
        text = "".join(generation.pieces[start:end])
        return event(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
            "content_block_delta",
        )

    def close(self, generations: list[Generation]) -> bytes:
        generation = generations[0]
        delta = {"stop_reason": self._stop(generation), "stop_sequence": generation.stop}
        return (
            event({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + event(
                {"type": "message_delta", "delta": delta, "usage": self._usage(generation, generation.sent)},
                "message_delta",
            )
            + event({"type": "message_stop"}, "message_stop")
        )

    def whole(self, generations: list[Generation]) -> dict:
        generation = generations[0]
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [{"type": "text", "text": "".join(generation.pieces)}],
            "stop_reason": self._stop(generation),
            "stop_sequence": generation.stop,
            "usage": self._usage(generation, generation.sent),
        }


def embeddings(id: str, model: str, generations: list[Generation], size: int, encoding: str | None) -> dict:
    """Return an embedding per prompt: a unit vector that depends on its ids alone."""
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
    return {
        "id": id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }
