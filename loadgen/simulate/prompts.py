"""KV block hashes of conversations: of each request's prompt, and of the prompt with its reply.

Spans (tokens without text) become the token ids that a live run sends (`synthetic` makes them). Text is rendered and
tokenized message by message with the bundled simulated model. This is exact, because the model's chat template
concatenates the messages. A conversation is hashed incrementally: earlier messages are never hashed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from cachemap.hashing import TOKEN_BYTES, chain_seed, hash_blocks
from loadgen.options import BadInput
from loadgen.workload import synthetic
from loadgen.workload.conversations import Message, Span, spans_of
from loadgen.workload.conversations import Turn as Asked
from replicas.simulated.model import sim_model_dir
from replicas.simulated.tokens import Tokens

from .turns import Turn

_OUR_REPLIES = 1 << 64  # above all hashes: from here on blocks are numbered whose reply no later prompt contains


class Said(NamedTuple):
    """The messages of a conversation so far, as KV block hashes."""

    hashes: list[int] = []  # noqa: RUF012  of the full blocks; never changed in place
    tail: bytes = b""  # token ids after the last full block
    tokens: int = 0  # of all messages


class Prompts:
    """A maker of the prompts of a load, as KV block hashes.

    `salt`, `vocabulary`: seed and upper bound of made-up token ids. With `engine_replies`, engines give the replies
    that the load's file has, so that the next prompt of a conversation finds the reply in the cache. Without it, a
    reply in the file becomes part of the next prompt although the engine replied with `max_tokens` other tokens, as in
    `loadgen run`.
    """

    def __init__(self, block_size: int, salt: int, vocabulary: int, engine_replies: bool = False) -> None:
        self._size, self._salt, self._vocabulary = block_size, salt, vocabulary
        self._engine_replies = engine_replies
        self._seed = chain_seed("simulated", block_size)
        self._replies = 0
        # kept, as system prompts recur; 256 of them with 1,000 tokens each take a megabyte
        self._opening = lru_cache(256)(lambda span: self._more(Said(), self._tokens((span,))))

    def ask(self, said: Said, turn: Asked, extra: dict[str, object], goes_on: bool = True) -> tuple[Said, Turn]:
        """Return the conversation `said` with the messages of this turn added, and the request for the turn's reply.

        `extra`: further fields of the request, such as `tools`; `goes_on`: whether a later prompt contains the reply.
        """
        text = any(not isinstance(message.get("content"), tuple) for message in turn.messages)
        said = self._with(said, turn, text, extra)
        prompt = self._more(said, self._model.assistant) if text else said
        if self.says(turn) and (goes_on or turn.reply is not None):
            after = self._more(said, self._reply(turn, text))
            output, all_hashes = max(1, after.tokens - prompt.tokens), after.hashes
        else:
            output = turn.max_tokens
            full = (prompt.tokens + output) // self._size
            self._replies += 1
            own = _OUR_REPLIES + (self._replies << 20)
            all_hashes = prompt.hashes + list(range(own, own + full - len(prompt.hashes)))
        return said, Turn(prompt.hashes, prompt.tokens, output, all_hashes, turn.think, text, turn.limit)

    def _with(self, said: Said, turn: Asked, text: bool, extra: dict[str, object]) -> Said:
        if text:
            return self._more(said, self._ids(turn.messages, text, not said.tokens, extra))
        spans = list(spans_of(turn.messages))
        if not said.tokens and len(spans) > 1 and isinstance(spans[0].ids, tuple):
            said = self._opening(spans.pop(0))
        return self._more(said, self._tokens(spans))

    def says(self, turn: Asked) -> bool:
        """Return whether the next prompt has the engine's own reply to this turn.

        It does with `engine_replies`, and where the load's file has no reply. Otherwise it has the file's reply.
        """
        return self._engine_replies or turn.reply is None

    def answer(self, said: Said, turn: Asked) -> Said:
        """Return the conversation `said` with the reply of this turn added."""
        return self._more(said, self._reply(turn, isinstance(turn.messages[-1].get("content"), str)))

    def _reply(self, turn: Asked, text: bool) -> np.ndarray:
        if turn.reply is not None:
            return self._ids([turn.reply], text, False, {})
        # no text of the reply is known, so it gets tokens that no other prompt has
        name = xxh3_64_intdigest(repr(turn.messages).encode()) | 1 << 63
        ids = self._tokens((Span((name,), turn.max_tokens, turn.max_tokens),))
        return np.concatenate((self._model.assistant, ids, self._model.end)) if text else ids

    def _ids(self, messages: Sequence[Message], text: bool, first: bool, extra: dict[str, object]) -> np.ndarray:
        if not text:
            return self._tokens(spans_of(messages))
        return self._model.ids([synthetic.in_words(message, self._salt) for message in messages], first, extra)

    def _tokens(self, spans: Iterable[Span]) -> np.ndarray:
        return synthetic.token_ids(spans, self._salt, self._vocabulary)

    def _more(self, said: Said, ids: np.ndarray) -> Said:
        data = said.tail + ids.tobytes()
        new = hash_blocks(data, self._size, said.hashes[-1] if said.hashes else self._seed)
        return Said(
            said.hashes + new if new else said.hashes,
            data[len(new) * self._size * TOKEN_BYTES :],
            said.tokens + len(ids),
        )

    @cached_property
    def _model(self) -> _Model:
        return _Model()


class _Model:
    """The bundled model's chat template and tokenizer, used only for loads of text, because loading takes a second."""

    def __init__(self) -> None:
        try:
            self._tokens = Tokens(sim_model_dir())
        except OSError as error:
            raise BadInput(str(error)) from None
        bare = self._render([{"role": "user", "content": ""}])
        self.assistant = self._render([{"role": "user", "content": ""}], add_generation_prompt=True)[len(bare) :]
        self.end = np.array([self._tokens.eos_id], np.uint32)

    def ids(self, messages: list[Message], first: bool, extra: dict[str, object]) -> np.ndarray:
        """Return the token ids that these messages add to a prompt.

        `first`: whether the prompt begins with them; only then are the start token and the `tools` of `extra` included.
        """
        return self._render(messages, tools=extra.get("tools")) if first else self._render(messages)[1:]

    def _render(self, messages: list[Message], add_generation_prompt: bool = False, **body: object) -> np.ndarray:
        ids = self._tokens.chat({"messages": messages, "add_generation_prompt": add_generation_prompt, **body})
        return np.array(ids, np.uint32)
