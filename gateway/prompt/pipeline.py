"""The pipeline that turns a request's body into a Prompt: parse, render, tokenize, hash blocks.

It does no I/O, reads a clock only for templates that print the date (`render.clock`), and may be called by several
threads. Only faults of the client raise errors. A template or tokenizer may fail, or the prompt may depend on something
that only the engine knows. Then the block hashes are exact only up to that point, or not at all, and the rest is
*matched as text* (`guesses`): its blocks are hashed from the request's text, so that at least a repetition of the same
text is routed to the same replica. `Prompt.note` then says why.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import date
from typing import Any

from cachemap import chain_seed, hash_blocks
from cachemap.hashing import named_ahead

from ..errors import ApiError, bad
from .api.anthropic import from_messages
from .api.conversation import Multimodal, Rounded, Unknown, Unroutable, refuse_deep_arguments
from .api.openai import (
    UNKNOWN_CONTEXT,
    Chat,
    boolean,
    forwarded_ids,
    from_chat,
    from_embeddings,
    integer,
    may_cut,
    most_ids,
    packed,
    parse,
    parse_exactly,
    prompts_of,
    read_options,
)
from .api.responses import from_items, from_responses
from .features import TOOLS
from .forward import LEAST_TOKENS, PLAIN_FIELDS, ROLES, is_steered, kind_of
from .guesses import fill_by_text, fill_partly, written
from .offload import TakesLong
from .prompt import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, NO_PREFILL, RESPONSES, Prompt
from .reader import ModelReader
from .render.renderer import Renderer
from .render.template import TemplateError
from .tokens.prefixes import Found
from .tokens.tiktoken_files import with_sorted_keys
from .tokens.tokenizer import TooLong

# Bytes. A larger body is never prepared on the event loop, and a smaller one only if it does not turn out to take long
# (offload.py). Prose never seen before costs about 9 us per kB on a 2-core cloud machine with Qwen3's template and
# tokenizer (tokens 3.7, hashes 2, JSON 0.7). Most of a long conversation was seen before, and 32 kB of it take 115 us.
OFFLOAD_BYTES = 40 * 1024
# The number of threads for long prompts. Each has a tokenizer cache of 30 MB, and competes with the event loop for the
# interpreter. There is more than one because a prompt of a million tokens takes 50 ms, or seconds without fastokens.
OFFLOAD_THREADS = 2
# How long a thread may hold the interpreter when the event loop waits for it (Python's default: 5 ms). The longest
# uninterrupted step in preparing 100,000 tokens is reading the JSON, which takes 0.4 ms.
SWITCH_SECONDS = 0.0005
# Returns the error for a parsed body that is to be refused, or None for a body that is accepted.
Refusal = Callable[[Mapping[str, Any]], ApiError | None]
_LONGEST_NOTE = 500
_CONVERSATIONS = frozenset({CHAT, RESPONSES, MESSAGES})


class _Inexact(Exception):
    """Raised for a prompt that the engine may tokenize differently from the gateway; the text says why."""


class Pipeline(ModelReader):
    """The pipeline of one model: turns the bodies of its requests into Prompts."""

    def prepare(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        adapters: Collection[str] = (),
        refusal: Refusal | None = None,
    ) -> Prompt:
        """Return the Prompt of one request.

        `path`: one of PROMPT_PATHS. `body`: the request body, not yet parsed. `headers`: the request headers, with
        lower-case names. `adapters`: the names of the LoRA adapters that are served. `refusal`: returns the error for a
        parsed body that is to be refused, or None.

        Raises ApiError for faults of the client, the error that `refusal` returns, and, on the event loop, TakesLong
        for a prompt that has to be prepared in a thread.
        """
        request, unusual = parse(body, self._max_model_len or UNKNOWN_CONTEXT)
        if refusal is not None and (error := refusal(request)) is not None:
            raise error
        return self.prepare_parsed(path, body, request, unusual, headers, adapters)

    def prepare_parsed(
        self,
        path: str,
        body: bytes,
        request: dict[str, Any],
        unusual: str,
        headers: Mapping[str, str] | None,
        adapters: Collection[str],
    ) -> Prompt:
        """Return the Prompt of a request whose body is parsed already.

        `request`: the parsed body, which stays unchanged; `unusual`: the note on its JSON that `parse` returned, or "".
        The other arguments and the errors are those of `prepare`.
        """
        made_by, limit, alike = self.made_by, self._max_model_len, self._quirks.refuses_alike
        # Engines that write this model's conversations without a template accept any output limit and reduce it to what
        # the context leaves.
        clamps = (self._program.as_received and path in _CONVERSATIONS) or not alike
        prompt = read_options(path, request, headers, adapters, None if clamps else limit)
        if clamps and limit is not None and (prompt.max_tokens or 0) > limit:
            prompt.max_tokens = limit
        prompt.made_by, prompt.space, prompt.block_size = made_by, self.space, self._block_size
        prompt.looks_ahead = self.looks_ahead
        if path in NO_PREFILL:
            refuse_deep_arguments(request)
            prompt.mode, prompt.note = "load", "needs no prefill"
            return prompt
        try:
            if unusual:
                raise Unroutable(unusual)
            if self._files is None:
                return self._as_text(prompt, request, "no tokenizer: prompts are matched as text")
            try:
                self._fill(prompt, request, body)
            except Rounded:
                self._fill(prompt, parse_exactly(body), body)
        except _Inexact as inexact:
            prompt.made = self._counted(prompt, request, body) if prompt.doubted else None
            return self._unless_too_deep(prompt, request, body, str(inexact))
        except ApiError as error:
            if alike:
                raise
            return self._as_text(prompt, request, f"left to the engine, though {error.message}")
        except TakesLong:
            raise
        except TooLong as error:
            if "truncate_prompt_tokens" in request or "truncation" in request:
                return self._unlike(prompt, request, body, error)
            if alike and not prompt.doubted:
                raise self._too_long(path, f"at least {error.tokens}") from None
            return self._as_text(prompt, request, f"at least {error.tokens} tokens, more than its context")
        except Exception as error:  # a template, or the tokenizer, may fail in any way
            return self._unlike(prompt, request, body, error)
        if limit is not None and len(prompt.token_ids) > 4 * limit and alike:
            if not prompt.doubted:
                raise self._too_long(path, str(len(prompt.token_ids) // 4))
            prompt.made = len(prompt.token_ids) // 4
            return self._unlike(prompt, request, body, Unroutable("an engine counted such a body otherwise"))
        return prompt

    def made(self, path: str, body: bytes, day: date | None = None) -> list[int]:
        """Return the token ids that the gateway makes of a conversation, or [] if it cannot make all of them.

        The ids are returned even if an engine is known to make other ids. `day`: the date that the template prints;
        None: today, by the engines' clocks.
        """
        request, unusual = parse(body)
        prompt = read_options(path, request, None, (), None)
        try:
            if not unusual and self.tokenizer is not None:
                self._conversation(prompt, request, body, 0, day)
        except Exception:  # any fault of the request or of the template
            return []
        return memoryview(prompt.token_ids).cast("I").tolist() if prompt.mode == "exact" else []

    def _counted(self, prompt: Prompt, request: dict[str, Any], body: bytes) -> int | None:
        """Return the gateway's token count of a body that is routed by its text, or None if it cannot be computed.

        The body is routed by its text, not by its tokens, because an engine has reported another token count than the
        gateway's for it or for a similar body. If the engine now reports the count returned here, the gateway uses its
        own tokens for such bodies again.
        """
        trial = replace(prompt)
        try:
            self._fill(trial, request, body)
        except TakesLong:
            raise
        except Exception:  # any fault is left to the engine to report
            return None
        return trial.tokens if trial.mode in ("exact", "media") else None

    def _too_long(self, path: str, tokens: str) -> ApiError:
        return ApiError(
            400,
            f"this model's maximum context length is {self.max_model_len} tokens, but the prompt has {tokens}: shorten it",
            param="messages" if path in _CONVERSATIONS else "prompt",
            code="context_length_exceeded",
        )

    def _fill(self, prompt: Prompt, request: dict[str, Any], body: bytes) -> None:
        """Set the token ids, the block hashes and `kind`, which says how engines render such bodies, of `prompt`.

        `request`: the parsed body. Raises _Inexact or Unknown if the engine's tokens are not certain, Rounded if
        parsing may have rounded a long integer in `request`, and any error of rendering and tokenizing.
        """
        adapter, salt, path = prompt.adapter, request.get("cache_salt"), prompt.path
        seed = None if salt else self._seeds.get(adapter)
        if seed is None:
            seed = chain_seed(self.served_name, self._block_size, adapter, salt)
            if not salt:
                self._seeds[adapter] = seed
        prompt.seed, roles, ids = seed, None, None
        if path == EMBEDDINGS and request.get("padding") not in (None, "do_not_pad"):
            raise Unroutable("a prompt that is padded")
        if path not in _CONVERSATIONS and not (path == EMBEDDINGS and "messages" in request):
            self._plain_prompt(prompt, request, seed)
        else:
            if not self._certain or "kv_transfer_params" in request:
                ids = self._ids_given(prompt, request)
            if ids is not None:
                prompt.token_ids, prompt.hashes, prompt.tokens = ids, self._hashed(ids, seed), len(ids) // 4
            else:
                roles = self._conversation(prompt, request, body, seed)
        if self.looks_ahead and prompt.token_ids:
            prompt.hashes = named_ahead(prompt.hashes, prompt.token_ids, self._block_size, self.looks_ahead)
        fields = PLAIN_FIELDS.get(path)
        if fields is None:
            return
        is_long = prompt.tokens >= LEAST_TOKENS
        is_known = path == COMPLETIONS or (roles is not None and ROLES.issuperset(roles))
        if is_long or not (is_known and request.keys() <= fields):
            template = "tool_use" if request.get("tools") and "tool_use" in self.renderers else "default"
            kind = kind_of(path, request, template, roles)
            prompt.kind = kind if is_long else ""
            prompt.steered = kind if is_steered(kind) else None
        if is_known and roles is not None and prompt.steered is None and prompt.features is None:
            prompt.features = (TOOLS, *roles) if request.get("tools") else roles

    def _ids_given(self, prompt: Prompt, request: dict[str, Any]) -> bytes | None:
        """Return the token ids that a request holds in place of its messages, or None if it holds none.

        Raises _Inexact if it is not certain that the engine makes the same tokens as the gateway.
        """
        is_chat = prompt.path == CHAT
        field = self._quirks.ids_field if is_chat else ""
        given = request.get(field) if field else None
        if given == []:
            raise _Inexact(f"an empty list of {field}: whether the engine then uses the messages is not known")
        ids = packed(given, field) if isinstance(given, list) else None
        is_read = "kv_transfer_params" in request and not (self._program.as_received and prompt.path == RESPONSES)
        if ids is None and is_read:
            ids = forwarded_ids(request, self._quirks.forwards_past_media)
        if not self._certain and (why := self._why_inexact(prompt, request, True, ids is None or not is_chat)):
            raise _Inexact(why)
        return ids

    def _conversation(
        self, prompt: Prompt, request: dict[str, Any], body: bytes, seed: int, day: date | None = None
    ) -> tuple[str, ...] | None:
        """Render and tokenize a conversation, and set the tokens and block hashes of `prompt`.

        Returns the roles of the messages if each message consists of a role and a text only, else None. `seed`: the
        hash that the chain of block hashes starts from. `day`: the date that the template prints; None: today, by the
        engines' clocks.
        """
        chat = self._chat(prompt.path, request)
        chat.body, chat.at = body, self.clock.on(day) if day is not None else None
        if self._sorts_tools:
            chat.tools = with_sorted_keys(chat.tools)
        try:
            if chat.unknown is not None:
                chat.unknown.known = len(chat.messages)
                self._begin(prompt, chat, request, chat.unknown, seed)
                return None
            renderer = self._renderer(chat)
            if renderer.template.prints_date and (exact := renderer.before_the_date(chat)) is not None:
                self._before_the_date(prompt, chat, renderer, exact, seed)
                return None
            prompt.token_ids, prompt.hashes, prompt.rendered_chars = self._render(renderer, chat, seed)
        except Unknown as unknown:
            if isinstance(unknown, Multimodal) and chat.unknown is None and self.takes_media:
                renderer, rule = self._renderer(chat), self._quirks.media_identity
                try:
                    if renderer.is_certain():
                        context = self._max_model_len or UNKNOWN_CONTEXT
                        self.media.fill(prompt, chat, request, renderer, seed, rule, context)
                        return None
                except Unknown as other:
                    unknown = other
            self._begin(prompt, chat, request, unknown, seed)
            return None
        if "truncate_prompt_tokens" in request or "truncation" in request:
            keep = self._tokens_to_keep(prompt.path, request)
            cut = None if keep is None else self._truncated(prompt.token_ids, keep, request, prompt, chat.special)
            if cut not in (None, prompt.token_ids):
                prompt.token_ids, prompt.hashes = cut, self._hashed(cut, seed)
        prompt.tokens = len(prompt.token_ids) // 4
        return chat.roles

    def _chat(self, path: str, request: dict[str, Any]) -> Chat:
        # True: the engine writes the conversation by rules of its own, which read few fields besides the messages.
        as_received = self._program.as_received
        if as_received:
            if path == RESPONSES:
                return from_items(request)
            if path == EMBEDDINGS:
                raise Unroutable("embeddings of a conversation that is written by rules")
            own = request.get("chat_template_kwargs")
            if isinstance(own, dict) and ("reasoning_effort" in own or "tools" in own):
                raise Unroutable("the engine does not read these template variables for this model")
        if path == CHAT:
            chat = from_chat(request, self._quirks)
        elif path == RESPONSES:
            chat = from_responses(request, self._quirks)
        elif path == EMBEDDINGS:
            chat = from_embeddings(request)
        else:
            chat = from_messages(request, self._habits, self._quirks.rules_are_known)
        if as_received or self._program.makes_tokens:
            chat.special = False
        return chat

    def _renderer(self, chat: Chat) -> Renderer:
        renderer = self.renderers.get("tool_use") if chat.tools is not None else None
        renderer = renderer or self.renderers.get("default")
        if renderer is None:
            raise TemplateError(self.template_error or "the model has no chat template: give one with --chat-template")
        return renderer

    def _render(self, renderer: Renderer, chat: Chat, seed: int) -> Found:
        if not chat.special:
            return renderer.tokens(seed, chat)
        if self._lead is not None:
            return renderer.tokens(seed, chat, self._lead)
        text = renderer.text(chat)
        ids = self.tokenizer.encode(text, special=True)
        return Found(ids, self._hashed(ids, seed), len(text))

    def _before_the_date(self, prompt: Prompt, chat: Chat, renderer: Renderer, exact: str, seed: int) -> None:
        """Set the block hashes of a conversation whose rendered text is certain only up to a date or time in it.

        `exact`: the text before the date or time that the template prints. `seed`: the hash that the chain of block
        hashes starts from.
        """
        prompt.declined = True
        if renderer.template.prints_time:
            # The text from the time on differs in each prompt, so no replica has it cached, and it gets no block
            # hashes.
            fill_partly(prompt, chat, renderer, exact, b"", seed)
            prompt.tokens = max(prompt.tokens, len(chat.body) // 4)
            prompt.note = "the template prints the time of the day: exact up to there"
        else:
            fill_partly(prompt, chat, renderer, exact, written([chat.tools, *chat.messages]), seed)
            why = self._differences.days or "it may change just now"
            prompt.note = f"exact up to the date that the template prints, by text from there on: {why}"[:_LONGEST_NOTE]

    def _begin(self, prompt: Prompt, chat: Chat, request: dict[str, Any], unknown: Unknown, seed: int) -> None:
        """Set the block hashes of a conversation of which only the first messages can be rendered.

        The blocks of the later messages are hashed from the request's text. `unknown`: the error for the first message
        that cannot be rendered; its `known` is the number of messages before that one. If no part of the rendered text
        is certain, a copy of this error is raised. `seed`: the hash that the chain of block hashes starts from.
        """
        renderer, known, exact = self._renderer(chat), unknown.known, ""
        of_rest = chat.rest if chat.unknown is not None else ()
        while known and not may_cut(request):
            try:
                exact = renderer.known_beginning(chat, known, [*chat.messages[known:], *of_rest])
                break
            except Unknown as earlier:  # for example images
                known = min(earlier.known, known - 1)
        if not exact:
            # A copy is raised. `unknown` itself would form a reference cycle with this frame, which would keep the body
            # in memory until the next garbage collection.
            raise type(unknown)(*unknown.args)
        prompt.note = f"exact up to message {known}, by text from there on: {_said(unknown)}"[:_LONGEST_NOTE]
        prompt.declined = True
        if isinstance(unknown, Multimodal):
            prompt.media = "load"
        fill_partly(prompt, chat, renderer, exact, written([*chat.messages[known:], *of_rest]), seed)

    def _plain_prompt(self, prompt: Prompt, request: dict[str, Any], seed: int) -> None:
        """Set the tokens and block hashes of a `/v1/completions` or `/v1/embeddings` body that has no messages.

        The body holds one text, one list of token ids, or a list of either. `seed`: the hash that the chain of block
        hashes starts from. Raises ApiError, Unroutable, _Inexact, or what the tokenizer raises.
        """
        key = "prompt" if prompt.path == COMPLETIONS else "input"
        if request.get("suffix") is not None or request.get("prompt_embeds") is not None:
            raise Unroutable("a prompt that the engine completes itself")
        given = request.get(key)
        special = boolean(request.get("add_special_tokens", True), "add_special_tokens")
        if self.max_model_len is not None and "truncate_prompt_tokens" not in request:
            longest = most_ids(given)
            if longest > self.max_model_len:
                raise self._too_long(prompt.path, str(longest))
        prompts = prompts_of(given, key)
        is_text = isinstance(prompts[0], str)
        if self._files.no_tokenizer and is_text:
            raise Unroutable(self._files.no_tokenizer)
        if not self._certain and (why := self._why_inexact(prompt, request, False, is_text)):
            raise _Inexact(why)
        ids = self.tokenizer.encode_each(prompts, special) if is_text else prompts
        keep = request.get("truncate_prompt_tokens")
        if keep is not None:
            ids = [self._truncated(one, keep, request, prompt, special and is_text) for one in ids]
        prompt.rendered_chars = sum(map(len, prompts)) if is_text else 0
        prompt.token_ids = max(ids, key=len)
        prompt.tokens = sum(map(len, ids)) // 4
        prompt.hashes = self._hashed(prompt.token_ids, seed)
        if len(ids) > 1:
            # The engine computes at least the last token of a prompt. `tokens` does not show which block that is in,
            # because it is the sum over all prompts, so the block is left out here. Otherwise a replica that has the
            # longest prompt cached completely would be credited with this block.
            prompt.hashes = prompt.hashes[: (len(prompt.token_ids) // 4 - 1) // self.block_size]
            prompt.copies = prompt.n * len(ids) if all(one == ids[0] for one in ids) else 0

    def _hashed(self, ids: bytes, seed: int) -> array[int]:
        return array("Q", hash_blocks(ids, self.block_size, seed))

    # --- truncation

    def _tokens_to_keep(self, path: str, request: dict[str, Any]) -> Any:
        """Return the number of tokens to which the request asks to truncate a conversation, or None if it does not.

        -1 stands for as many tokens as the context has room for. The value of `truncate_prompt_tokens` is returned
        unchecked.
        """
        if path == RESPONSES:
            return -1 if request.get("truncation", "disabled") != "disabled" else None
        return None if self._program.as_received or path == MESSAGES else request.get("truncate_prompt_tokens")

    def _truncated(self, ids: bytes, keep: Any, request: dict[str, Any], prompt: Prompt, special: bool) -> bytes:
        """Return a prompt's token ids, truncated as the request's `truncate_prompt_tokens` asks.

        `ids`: token ids as uint32 bytes. `keep`: the number of tokens to keep; -1: as many as fit into the context
        together with the output. `special`: the tokenizer has added special tokens around the text. Sets `prompt.cut`
        if any tokens are cut off. Raises ApiError or Unroutable.

        As in vLLM, tokens are cut off at the side that the request's `truncation_side` names, special tokens included.
        If it names none, the special tokens are kept, and the text between them is cut on the left, for embeddings on
        the right.
        """
        given = request.get("truncation_side")
        keep = integer(keep)
        if keep is None or keep < -1 or given not in (None, "left", "right"):
            raise bad(
                "'truncate_prompt_tokens' must be an integer of at least -1 and 'truncation_side' 'left' or 'right'",
                "truncate_prompt_tokens",
            )
        if keep == -1:
            if self.max_model_len is None:
                raise Unroutable("truncation to a context length that is not known")
            keep = self.max_model_len - self._room(prompt)
        if 4 * keep >= len(ids):
            return ids
        prompt.cut = True
        before, after = self.tokenizer.added_around() if special and given is None else (0, 0)
        if keep < before + after:
            raise Unroutable("truncation to less than the special tokens")
        start, end, kept = 4 * before, len(ids) - 4 * after, 4 * (keep - before - after)
        left = (given or ("right" if prompt.path == EMBEDDINGS else "left")) == "left"
        return ids[:start] + (ids[end - kept : end] if left else ids[start : start + kept]) + ids[end:]

    def _room(self, prompt: Prompt) -> int:
        """Return the number of tokens that truncation to the context length leaves for the output."""
        if prompt.path == EMBEDDINGS:
            return 0
        wanted = prompt.max_tokens
        if wanted is None:
            wanted = 16 if prompt.path == COMPLETIONS else int(self._quirks.leaves_one)
        return wanted if self._quirks.truncates_to_output else min(1, wanted)

    # --- requests whose tokens are not known

    def _as_text(self, prompt: Prompt, request: dict[str, Any], why: str) -> Prompt:
        refuse_deep_arguments(request)
        prompt.note = why
        fill_by_text(prompt, request, self.served_name, self._given(request))
        return prompt

    def _unlike(self, prompt: Prompt, request: dict[str, Any], body: bytes, error: Exception) -> Prompt:
        """Set the block hashes from the request's text, because its tokens cannot be computed, and return the prompt.

        `error`: the error of rendering or tokenizing. Its text becomes `prompt.note`.
        """
        prompt.token_ids, prompt.declined = b"", True
        if isinstance(error, Multimodal):
            prompt.media = "load"
        return self._unless_too_deep(prompt, request, body, _said(error)[:_LONGEST_NOTE])

    def _unless_too_deep(self, prompt: Prompt, request: dict[str, Any], body: bytes, note: str) -> Prompt:
        """Set the block hashes from the request's text and return the prompt; `note`: why its tokens are not known.

        A request that is nested too deeply to be dumped as text gets no block hashes, so it is routed by load, with 4
        bytes of its body counted as one token.
        """
        try:
            return self._as_text(prompt, request, note)
        except (ValueError, RecursionError):
            prompt.mode, prompt.note, prompt.hashes, prompt.tokens = "load", note, (), len(body) // 4
            return prompt


def _said(error: Exception) -> str:
    if isinstance(error, Multimodal):
        return f"media in the prompt ({error})"
    return str(error) if isinstance(error, (Unroutable, TemplateError)) else f"{type(error).__name__}: {error}"
