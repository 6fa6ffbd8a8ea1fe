"""Request body to Prompt: parse, render, tokenize, hash.

Pure CPU work without I/O or clock (but for a template that prints the date); safe to call
from several threads. Only the client's own faults are errors: when a template or tokenizer
fails, or the engine knows more about the prompt than its body says, the request is routed by
load and `Prompt.note` says why.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counting
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from cachemap import GuessedBlocks, chain_seed, hash_blocks

from ..errors import ApiError, bad
from .api.anthropic import Habits, from_messages, habits
from .api.conversation import Multimodal, Rounded, Unroutable, refuse_deep_arguments
from .api.items import from_items
from .api.openai import (
    UNKNOWN_CONTEXT,
    Chat,
    boolean,
    forwarded_ids,
    from_chat,
    from_embeddings,
    integer,
    most_ids,
    parse,
    parse_exactly,
    prompts_of,
    read_options,
)
from .api.responses import from_responses
from .forward import LEAST_TOKENS, PLAIN_FIELDS, ROLES, is_steered, kind_of
from .media.exactly import Images, images_of
from .media.filling import Media
from .offload import TakesLong
from .prompt import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, NO_PREFILL, RESPONSES, Prompt
from .quirks import NEWEST, VersionQuirks
from .render.program import ProgramTemplate
from .render.renderer import Renderer
from .render.template import ChatTemplate, TemplateError
from .tokens.agreement import Answer, difference, fixed_texts
from .tokens.model import LoadedModel, load_model
from .tokens.prefixes import Found, Prefixes
from .tokens.reading import Reading, Readings
from .tokens.tekken_files import TekkenReadings
from .tokens.tiktoken_files import TiktokenReadings
from .tokens.tiktoken_program import with_sorted_keys
from .tokens.tokenizer import Tokenizer, TooLong

# A body larger than this is prepared off the event loop without a try; a smaller one may turn out to take long, too
# (offload.py). Prose never seen before costs about 9 us per kB on a 2-core cloud machine with Qwen3's template and
# tokenizer (tokens 3.7, hashes 2, JSON 0.7); of a long conversation most is known, and 32 kB of it take 115.
OFFLOAD_BYTES = 40 * 1024
# Those that prepare long prompts. Each has a cache of the tokenizer's own, 30 MB, and competes with the event loop for
# the interpreter; a second one, since a prompt of a million tokens takes 50 ms, without fastokens seconds.
OFFLOAD_THREADS = 2
# How long such a thread may go on when the event loop wants the interpreter (Python's default: 5 ms). The longest that
# it does in one piece in 100,000 tokens is 0.4 ms, reading the JSON.
SWITCH_SECONDS = 0.0005
Refusal = Callable[[Mapping[str, Any]], ApiError | None]  # why a request is refused for what its JSON object says
PREFIX_BYTES = 256 * 1024 * 1024
_LONGEST_NOTE = 500

_CONVERSATIONS = frozenset({CHAT, RESPONSES, MESSAGES})


# Numbers for the ways in which prompts are made, which no two pipelines of a process share.
_ways_so_far = counting(1)


class _Inexact(Exception):
    """The engine may make other tokens of this text than the gateway."""


class _Loaded(NamedTuple):
    """One way of reading the tokenizer's files, and what follows from it."""

    reading: Reading
    tokenizer: Tokenizer
    cuts: frozenset[str]
    lead: bytes | None
    prefixes: Prefixes
    images: Images | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an engine reads the tokenizer's files."""

    how: str
    differs: str = ""  # why it is in no way that is known here
    loaded: _Loaded | None = None  # None: the way that is in use


class Pipeline:
    """Prepares requests for one model."""

    def __init__(
        self,
        model_dir: Path | None,
        served_name: str,
        block_size: int,
        *,
        chat_template: str | Path | None = None,
        max_model_len: int | None = None,
        prefix_bytes: int = PREFIX_BYTES,
    ) -> None:
        """`model_dir` None: there is no tokenizer, prompts are matched as text ("text" mode).

        `max_model_len` is the engine's context length in tokens (None: not checked); it may be
        set later, as the engine tells it. Raises ModelError or TokenizerError.
        """
        self.served_name = served_name
        self._block_size = block_size
        self._seeds: dict[str | None, int] = {}  # of chains without a salt, by adapter
        self.tokenizer: Tokenizer | None = None
        self.max_model_len = max_model_len
        self.prefixes: Prefixes | None = None
        self.renderers: dict[str, Renderer] = {}
        self.template_error = ""  # why there is no chat template that can be rendered
        self._quirks = NEWEST
        self._habits = Habits(True, "low")
        self.reading: Reading | None = None  # how the model's tokenizer files are read
        self._readings: Readings | TiktokenReadings | TekkenReadings | None = None
        self._sorts_tools = False  # a template gets tools with their keys in alphabetical order
        self._doubt = ""  # why the files do not tell how the engine reads them
        self._confirmed = False  # an engine has made the same ids of the fixed texts
        self._differs: dict[str, str] = {}  # served name -> why its engines' tokens are not the gateway's
        self._prefix_bytes = prefix_bytes
        self._files: LoadedModel | None = None
        self._cuts: frozenset[str] = frozenset()
        self._template_given = chat_template is not None
        self._as_received = False  # messages are written as they were received
        self._makes_tokens = False  # whatever a request says of special tokens
        self._lead: bytes | None = None  # special tokens before a text, if there are none behind it
        self.made_by = 0  # another number whenever ids may be made in another way than before
        self.media = Media()
        self.config: dict[str, Any] = {}  # the model's config.json
        self.space = 0  # the number of those replicas whose tokens and blocks are these
        if model_dir is not None:
            self._load(model_dir, chat_template)

    def _load(self, model_dir: Path, chat_template: str | Path | None) -> None:
        self._files = files = load_model(model_dir, chat_template)
        self.config = files.settings
        if files.program is not None:
            self._as_received, self._makes_tokens = files.program.as_received, files.program.makes_tokens
        if files.no_tokenizer:
            self.template_error = files.no_template
            return
        self._sorts_tools = files.sorts_tools
        if files.tekken:
            self._readings = TekkenReadings(model_dir)
        elif files.tiktoken:
            self._readings = TiktokenReadings(model_dir, files.config)
        else:
            self._readings = Readings(model_dir, files.config, files.settings)
        reading, self._doubt = self._readings.likeliest(self._quirks.transformers)
        self._enter(self._loaded(reading))
        self._readings.let_go()

    def _loaded(self, reading: Reading) -> _Loaded:
        """All that depends on the tokenizer: up to a second of work, which may be done in a thread."""
        tokenizer = Tokenizer(self._files.directory, reading=reading)
        before, after = tokenizer.added_around()
        lead = None if after else tokenizer.encode("x", special=True)[: 4 * before]
        prefixes, files = Prefixes(tokenizer, self.block_size, self._prefix_bytes), self._files
        images = images_of(files.directory, files.settings, files.config, tokenizer) if files.takes_media else None
        return _Loaded(reading, tokenizer, tokenizer.safe_cuts(), lead, prefixes, images)

    def _enter(self, loaded: _Loaded) -> None:
        self.reading, self.tokenizer, self._cuts, self._lead, self.prefixes, self.media.images = loaded
        self.tokenizer.bound(self.max_model_len)
        self.prefixes.resize(self.block_size)
        self._make_renderers()

    def fixed_texts(self) -> list[str]:
        """The texts by which an engine's tokenizer is compared with this one; none where there is none."""
        return (
            fixed_texts(self.tokenizer, self.reading.special_tokens, self._readings.mentioned)
            if self.tokenizer is not None
            else []
        )

    def judge(self, answers: Sequence[Answer]) -> Verdict:
        """Hold an engine's ids of the fixed texts against every way of reading the tokenizer's files.

        Changes nothing, and may take seconds: meant for a thread. `adopt` makes use of what it finds.
        """
        why = difference(self.tokenizer, answers)
        if not why:
            return Verdict(self.reading.how)
        try:
            for reading in self._readings.all():
                if reading != self.reading and not difference((loaded := self._loaded(reading)).tokenizer, answers):
                    return Verdict(reading.how, loaded=loaded)
        finally:
            self._readings.let_go()
        return Verdict(self.reading.how, f"the engine makes other tokens: {why}")

    def likeliest(self) -> Verdict:
        """The way of engines of the version that is followed. May take seconds."""
        reading, _ = self._readings.likeliest(self._quirks.transformers)
        return self._verdict(reading)

    def read_as(self, how: str) -> Verdict:
        """What `judge` has found, once it was put aside. May take seconds."""
        if self.reading is None or how == self.reading.how:
            return Verdict(how)
        return self._verdict(next((one for one in self._readings.all() if one.how == how), None), how)

    def _verdict(self, reading: Reading | None, how: str = "") -> Verdict:
        try:
            return Verdict(
                reading.how if reading else how,
                loaded=self._loaded(reading) if reading and reading != self.reading else None,
            )
        finally:
            self._readings.let_go()

    def adopt(self, verdict: Verdict, confirmed: bool, differs: Mapping[str, str]) -> None:
        """Read the tokenizer's files in that way from now on. `confirmed`: an engine does so; `differs`: why the tokens
        of these models are not the gateway's."""
        if verdict.loaded is not None and verdict.loaded.reading != self.reading:
            self._enter(verdict.loaded)
        in_use = self.reading is not None and self.reading.how == verdict.how  # it may have changed since it was judged
        self._confirmed = confirmed and in_use
        self.differ(differs)
        if self._readings is not None:
            self._weigh()

    def differ(self, differs: Mapping[str, str]) -> None:
        """The tokens of these models are not the gateway's, and why; those of no others, from now on."""
        self._differs = dict(differs)

    def inexact(self, model: str = "") -> str:
        """Why a text of this model cannot be turned into the engine's tokens with certainty, or ""."""
        if self._differs:
            why = self._differs.get(model, self._differs.get("")) if model else next(iter(self._differs.values()))
            if why:
                return why
        return (
            ""
            if self._confirmed or not self._doubt
            else f"how the engine reads the tokenizer's files is not certain: {self._doubt}"
        )

    def _make_renderers(self) -> None:
        files = self._files
        self.template_error = files.no_template
        templates: dict[str, ChatTemplate | ProgramTemplate] = {}
        if files.program is not None:
            templates["default"] = ProgramTemplate(files.program, self._quirks)
        for name, source in files.templates.items() if files.program is None else ():
            try:
                templates[name] = ChatTemplate(source, self.reading.special_tokens, self._quirks)
            except TemplateError as error:
                self.template_error = str(error)
        renderers = {
            name: Renderer(template, self.tokenizer, self.prefixes, self._cuts) for name, template in templates.items()
        }
        others = [source for name, source in files.templates.items() if name == "tool_use" or files.program is not None]
        self._habits = habits(templates.get("default"), others, self._template_given)
        self.renderers = renderers
        self.made_by = next(_ways_so_far)  # last: what a thread began before has an older number

    @property
    def max_model_len(self) -> int | None:
        """The engine's context in tokens, None where it is not known. May be set when the engine tells."""
        return self._max_model_len

    @max_model_len.setter
    def max_model_len(self, tokens: int | None) -> None:
        self._max_model_len = tokens
        if self.tokenizer is not None:
            self.tokenizer.bound(tokens)

    def bound_prefixes(self, budget_bytes: int) -> None:
        """What may be remembered of known prefixes, where pipelines share a budget."""
        self._prefix_bytes = budget_bytes
        if self.prefixes is not None:
            self.prefixes.bound(budget_bytes)

    @property
    def writes_as_received(self) -> bool:
        """Whether conversations are written by rules that get them as they are, see `Program.as_received`."""
        return self._as_received

    @property
    def shows_chats(self) -> bool:
        """Whether an engine's chats have to be shown to be the gateway's, whatever its kind, as its tokens have."""
        return self._files is not None and self._files.program is not None and self._files.program.to_be_shown

    @property
    def takes_media(self) -> bool:
        """Whether prompts may hold more than text, as far as is known."""
        return self._files is None or self._files.takes_media

    @property
    def block_size(self) -> int:
        """Tokens per block. May be set when the engine tells another; what is known of prefixes is dropped then."""
        return self._block_size

    @block_size.setter
    def block_size(self, size: int) -> None:
        if size != self._block_size:
            self._block_size = size
            self._seeds = {}
            if self.prefixes is not None:
                self.prefixes.resize(size)

    def follow(self, told: Mapping[str, Any], at_once: bool = True) -> None:
        """Make prompts the way that the engine's version does, by what its dialect tells of that (`VersionQuirks.of`).

        Where such an engine reads the tokenizer's files in another way than they were read so far, they are read again,
        which may take seconds; or, unless `at_once`, prompts are matched as text until `adopt` is called.
        """
        found = VersionQuirks.of(told)
        if found != self._quirks:
            self._quirks = found
            if self._readings is not None:
                self._make_renderers()
                if at_once and not self._confirmed:
                    self.adopt(self.likeliest(), False, self._differs)
                self._weigh()

    def _weigh(self) -> None:
        reading, self._doubt = self._readings.likeliest(self._quirks.transformers)
        if reading != self.reading:
            self._doubt = self._doubt or f"{self._quirks.transformers} has {reading.how}, which is not loaded"

    def prepare(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        adapters: Collection[str] = (),
        refusal: Refusal | None = None,
    ) -> Prompt:
        """One request -> Prompt. `path` is one of PROMPT_PATHS; `headers` have lower-case names; `adapters` are the
        LoRA names served.

        Raises ApiError for the client's faults only, and what `refusal` returns; TakesLong where `event_loop` holds.
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
        """As `prepare`, where `parse` has read the body already. Leaves `request` as it is."""
        made_by, limit = self.made_by, self._max_model_len
        prompt = read_options(path, request, headers, adapters, limit)
        prompt.made_by, prompt.space, prompt.block_size = made_by, self.space, self._block_size
        if path in NO_PREFILL:
            refuse_deep_arguments(request)
            prompt.mode, prompt.note = "load", "needs no prefill"
            return prompt
        try:
            if unusual:
                raise Unroutable(unusual)
            if self._files is None:
                return self._as_text(prompt, request, "no tokenizer: prompts are matched as text")
            why = ""
            try:
                try:
                    self._fill(prompt, request, body)
                except Rounded:
                    request = parse_exactly(body)
                    self._fill(prompt, request, body)
            except _Inexact as inexact:
                why = str(inexact)
            if why:
                return self._as_text(prompt, request, why)
        except (ApiError, TakesLong):
            raise
        except TooLong as error:
            if "truncate_prompt_tokens" in request or "truncation" in request:
                return _by_load(prompt, request, body, error)
            raise self._too_long(path, f"at least {error.tokens}") from None
        except Exception as error:  # templates are foreign programs: any failure is theirs
            return _by_load(prompt, request, body, error)
        if limit is not None and len(prompt.token_ids) > 4 * limit:
            raise self._too_long(path, str(len(prompt.token_ids) // 4))
        return prompt

    def _too_long(self, path: str, tokens: str) -> ApiError:
        return ApiError(
            400,
            f"this model's maximum context length is {self.max_model_len} tokens, but the prompt has {tokens}: shorten it",
            param="messages" if path in _CONVERSATIONS else "prompt",
            code="context_length_exceeded",
        )

    def _fill(self, prompt: Prompt, request: dict[str, Any], body: bytes) -> None:
        adapter, salt, seeds = prompt.adapter, request.get("cache_salt"), self._seeds
        seed = None if salt else seeds.get(adapter)
        if seed is None:
            seed = chain_seed(self.served_name, self._block_size, adapter, salt)
            if not salt:
                seeds[adapter] = seed
        prompt.seed, path = seed, prompt.path
        if path == EMBEDDINGS and request.get("padding") not in (None, "do_not_pad"):
            raise Unroutable("a prompt that is padded")
        if path in _CONVERSATIONS or (path == EMBEDDINGS and "messages" in request):
            roles = self._conversation(prompt, request, body, seed)
        else:
            roles = None
            self._plain_prompt(prompt, request, seed)
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

    def _conversation(self, prompt: Prompt, request: dict[str, Any], body: bytes, seed: int) -> tuple[str, ...] | None:
        """Returns the roles, where messages have nothing else but a text each."""
        ids, as_received = None, self._as_received
        if "kv_transfer_params" in request and not (as_received and prompt.path == RESPONSES):
            ids = forwarded_ids(request, self._quirks.forwards_past_media)
        chat = None
        if ids is None:
            if self._differs or self._doubt:
                self._must_be_exact(prompt)
            if as_received:
                chat = self._chat_as_received(prompt.path, request)
            else:
                chat = from_chat(request) if prompt.path == CHAT else self._chat(prompt.path, request)
            chat.body = body
            chat.special = chat.special and not self._makes_tokens
            if self._sorts_tools:
                chat.tools = with_sorted_keys(chat.tools)
            try:
                prompt.token_ids, prompt.hashes, prompt.rendered_chars = self._render(chat, seed)
            except Multimodal:
                if not self.takes_media:
                    raise
                of_engine = self._quirks.media_identity, self._max_model_len or UNKNOWN_CONTEXT
                self.media.fill(prompt, chat, request, self._renderer(chat), self.tokenizer, seed, *of_engine)
                return None
        else:
            prompt.token_ids, prompt.hashes = ids, self._hashed(ids, seed)
        cuts = "truncate_prompt_tokens" in request or "truncation" in request
        if chat is not None and cuts and not (as_received and prompt.path != RESPONSES):
            keep = request.get("truncate_prompt_tokens") if prompt.path != MESSAGES else None
            if prompt.path == RESPONSES:
                keep = None if request.get("truncation", "disabled") == "disabled" else -1
            if keep is not None:
                cut = self._truncated(prompt.token_ids, keep, request, prompt, chat.special)
                if cut != prompt.token_ids:
                    prompt.token_ids, prompt.hashes = cut, self._hashed(cut, seed)
        prompt.tokens = len(prompt.token_ids) // 4
        return chat.roles if chat is not None else None

    def _chat_as_received(self, path: str, request: dict[str, Any]) -> Chat:
        """Where the engine hands messages to its rules as they are, and reads few other fields."""
        if path == RESPONSES:
            return from_items(request)
        if path == EMBEDDINGS:
            raise Unroutable("embeddings of a conversation that is written by rules")
        own = request.get("chat_template_kwargs")
        if isinstance(own, dict) and ("reasoning_effort" in own or "tools" in own):
            raise Unroutable("the engine does not read these template variables for this model")
        chat = from_chat(request) if path == CHAT else self._chat(path, request)
        chat.special = False
        return chat

    def _chat(self, path: str, request: dict[str, Any]) -> Chat:
        if path == RESPONSES:
            return from_responses(request)
        if path == EMBEDDINGS:
            return from_embeddings(request)
        return from_messages(request, self._habits)

    def _renderer(self, chat: Chat) -> Renderer:
        renderer = self.renderers.get("tool_use") if chat.tools is not None else None
        renderer = renderer or self.renderers.get("default")
        if renderer is None:
            raise TemplateError(self.template_error or "the model has no chat template: give one with --chat-template")
        return renderer

    def _render(self, chat: Chat, seed: int) -> Found:
        renderer = self._renderer(chat)
        if not chat.special:
            return renderer.tokens(seed, chat)
        if self._lead is not None:
            return renderer.tokens(seed, chat, self._lead)
        text = renderer.text(chat)
        ids = self.tokenizer.encode(text, special=True)
        return Found(ids, self._hashed(ids, seed), len(text))

    def _plain_prompt(self, prompt: Prompt, request: dict[str, Any], seed: int) -> None:
        """`/v1/completions` and `/v1/embeddings`: one text or list of ids, or several of either."""
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
        if self._files.no_tokenizer and isinstance(prompts[0], str):
            raise Unroutable(self._files.no_tokenizer)
        if isinstance(prompts[0], str):
            self._must_be_exact(prompt)
            ids = self.tokenizer.encode_each(prompts, special)
        else:
            ids = prompts
        keep = request.get("truncate_prompt_tokens")
        if keep is not None:
            ids = [
                self._truncated(one, keep, request, prompt, special and isinstance(text, str))
                for one, text in zip(ids, prompts, strict=True)
            ]
        prompt.rendered_chars = sum(len(one) for one in prompts if isinstance(one, str))
        prompt.token_ids = max(ids, key=len)
        prompt.tokens = sum(map(len, ids)) // 4
        prompt.hashes = self._hashed(prompt.token_ids, seed)
        if len(ids) > 1:
            # `tokens` is of all, so who holds the longest as a whole would be taken to hold its last token's block too.
            prompt.hashes = prompt.hashes[: (len(prompt.token_ids) // 4 - 1) // self.block_size]
            prompt.copies = prompt.n * len(ids) if all(one == ids[0] for one in ids) else 0

    def _must_be_exact(self, prompt: Prompt) -> None:
        if why := self.inexact(prompt.model):
            raise _Inexact(why)

    def _hashed(self, ids: bytes, seed: int) -> array[int]:
        return array("Q", hash_blocks(ids, self.block_size, seed))

    def _truncated(self, ids: bytes, keep: Any, request: dict[str, Any], prompt: Prompt, special: bool) -> bytes:
        """`truncate_prompt_tokens`: that many tokens, -1 for all that leave room for output.

        vLLM cuts on the left (embeddings: on the right) unless `truncation_side` says otherwise; when it
        says nothing, the tokenizer does the cutting and the special tokens it adds (`special`) stay.
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
        """Tokens that truncation to the context length leaves for the output."""
        if prompt.path == EMBEDDINGS:
            return 0
        wanted = prompt.max_tokens
        if wanted is None:
            wanted = 16 if prompt.path == COMPLETIONS else 0
        return wanted if self._quirks.truncates_to_output else min(1, wanted)

    def _as_text(self, prompt: Prompt, request: dict[str, Any], why: str) -> Prompt:
        """No tokens to go by: 4 bytes of text stand for a token, under a seed that no real token chain has."""
        refuse_deep_arguments(request)
        said = request.get("messages", request.get("prompt", request.get("input", "")))
        head = [request.get("system"), request.get("instructions"), request.get("tools")]
        text = said.encode() if isinstance(said, str) else orjson.dumps([head, said])
        seed = chain_seed("text:" + self.served_name, self.block_size, prompt.adapter, request.get("cache_salt"))
        prompt.mode, prompt.note = "text", why
        prompt.rendered_chars = len(text)
        prompt.tokens = len(text) // 4
        prompt.hashes = GuessedBlocks.of(hash_blocks(text, self.block_size, seed), 0)
        return prompt


def _by_load(prompt: Prompt, request: dict[str, Any], body: bytes, error: Exception) -> Prompt:
    """Nothing exact is known: about 4 bytes of body to a token, for the load it will be."""
    refuse_deep_arguments(request)
    prompt.mode = "load"
    if isinstance(error, Multimodal):
        prompt.media, note = "load", f"media in the prompt ({error})"
    elif isinstance(error, (Unroutable, TemplateError)):
        note = str(error)
    else:
        note = f"{type(error).__name__}: {error}"
    prompt.note = note[:_LONGEST_NOTE]
    prompt.tokens = len(body) // 4
    prompt.token_ids, prompt.hashes = b"", ()
    return prompt
