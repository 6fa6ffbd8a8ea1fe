"""The pipeline that turns a request's body into a Prompt: parse, render, tokenize, hash blocks.

It only computes, without I/O, and without a clock unless a template prints the date (`render.clock`); several threads
may call it. Only the client's own faults raise errors. Where a template or tokenizer fails, or the prompt depends on
something that only the engine knows, the block hashes are exact up to that point or not at all, and the rest is
*matched as text*: hashed from the request's text, so that only a repetition is found. `Prompt.note` then says why.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import count as counting
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from cachemap import GuessedBlocks, chain_seed, hash_blocks
from cachemap.hashing import named_ahead

from ..errors import ApiError, bad
from .api.anthropic import Habits, from_messages, habits
from .api.conversation import BILLING_HEADER, Multimodal, Rounded, Unknown, Unroutable, is_plain, refuse_deep_arguments
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
from .features import TOOLS, features
from .forward import LEAST_TOKENS, PLAIN_FIELDS, ROLES, is_steered, kind_of
from .media.families import Family
from .media.filling import Media, family_of
from .offload import TakesLong
from .partly import fill_partly
from .prompt import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, NO_PREFILL, RESPONSES, Prompt
from .quirks import NEWEST, VersionQuirks
from .render.clock import Clock
from .render.program import ProgramTemplate
from .render.renderer import Renderer
from .render.template import ChatTemplate, TemplateError
from .tokens.agreement import Answer, Differences, difference, fixed_texts
from .tokens.folder import using
from .tokens.model import LoadedModel, load_model
from .tokens.prefixes import Found, Prefixes
from .tokens.ranked import RankedReadings
from .tokens.reading import Reading, Readings
from .tokens.tiktoken_files import with_sorted_keys
from .tokens.tokenizer import Tokenizer, TooLong

# A larger body is never tried on the event loop; a smaller one may also turn out to take long (offload.py). Prose never
# seen before costs about 9 us per kB on a 2-core cloud machine with Qwen3's template and tokenizer (tokens 3.7, hashes
# 2, JSON 0.7); most of a long conversation is known, and 32 kB of it take 115 us.
OFFLOAD_BYTES = 40 * 1024
# Threads for long prompts. Each has a tokenizer cache of 30 MB and competes with the event loop for the interpreter;
# there are two because a prompt of a million tokens takes 50 ms, or seconds without fastokens.
OFFLOAD_THREADS = 2
# How long such a thread may hold the interpreter when the event loop wants it (Python's default: 5 ms). Its longest
# uninterrupted step for 100,000 tokens is 0.4 ms, reading the JSON.
SWITCH_SECONDS = 0.0005
Refusal = Callable[[Mapping[str, Any]], ApiError | None]  # returns the error for a JSON object that is to be refused
PREFIX_BYTES = 256 * 1024 * 1024
_LONGEST_NOTE = 500

# Parts of repeated messages that agents change from turn to turn.
_OF_A_TURN = (b'"cache_control"', BILLING_HEADER.encode())
_CONVERSATIONS = frozenset({CHAT, RESPONSES, MESSAGES})


_ways_so_far = counting(1)  # numbers for ways of making prompts, unique in the process
_NONE_FOUND = Differences()


class _Inexact(Exception):
    """Raised for a prompt of which the engine may make other tokens than the gateway; the text says why."""


class _Loaded(NamedTuple):
    """One way of reading the tokenizer's files, with the objects that are made from it."""

    reading: Reading
    tokenizer: Tokenizer
    cuts: frozenset[str]  # added tokens before which a text may be cut
    lead: bytes | None  # special tokens before each text, or None if some follow it
    prefixes: Prefixes
    family: Family | None  # of its images; None: their tokens are not known


@dataclass(frozen=True, slots=True)
class Verdict:
    """The way in which an engine reads the tokenizer's files, as it was found or as it is likely."""

    how: str  # the name of the way, `Reading.how`
    differs: str = ""  # why no way known here gives the engine's tokens, or ""
    loaded: _Loaded | None = None  # None: the way that is in use


class Pipeline:
    """The maker of Prompts for one model, with its tokenizer, template and known prefixes."""

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
        """Load the model's files. Raises ModelError or TokenizerError.

        `model_dir`: the model's folder; None: there is no tokenizer, and all prompts are matched as text.
        `served_name`: the model's name in block hashes.
        `block_size`: tokens per block.
        `chat_template`: a file that replaces the model's own template.
        `max_model_len`: the engine's context length in tokens, which may also be set later; None: not checked.
        `prefix_bytes`: memory for known prefixes, the tokens and hashes of prompts seen before.
        """
        self.served_name, self.directory = served_name, model_dir
        self._block_size = block_size
        self.looks_ahead = 0  # tokens after a block that are part of its hash, as its engines hash it
        self._seeds: dict[str | None, int] = {}  # the seeds of hash chains without a salt, by adapter
        self._files: LoadedModel | None = None
        self.config: dict[str, Any] = {}  # the model's config.json
        self.tokenizer: Tokenizer | None = None
        self.max_model_len = max_model_len
        self.prefixes: Prefixes | None = None
        self._prefix_bytes = prefix_bytes
        self.renderers: dict[str, Renderer] = {}
        self.template_error = ""  # why there is no chat template that can be rendered
        self._quirks = NEWEST
        self._habits = Habits(True, "low")
        self.clock = Clock()  # the clock of its engines
        self.reading: Reading | None = None  # how the model's tokenizer files are read
        self._readings: Readings | RankedReadings | None = None
        self._sorts_tools = False  # a template gets tools with their keys in alphabetical order
        self._doubt = ""  # why the files do not determine how the engine reads them, or ""
        self._confirmed = False  # an engine has made the same ids of the fixed texts
        self._differences = _NONE_FOUND  # between the engines' tokens and the gateway's
        self._certain = True  # no known reason makes any prompt inexact
        self._cuts: frozenset[str] = frozenset()
        self._template_given = chat_template is not None
        self._as_received = self._makes_tokens = False  # a program does what these fields of `Program` say
        self._lead: bytes | None = None  # special tokens before a text, or None if some follow it
        self.made_by = 0  # changes whenever ids may be made differently from before
        self.media = Media()
        self.space = 0  # the number of the variant: replicas with equal tokens and blocks share it
        if model_dir is not None:
            with using(model_dir):
                self._load(model_dir, chat_template)

    def _load(self, model_dir: Path, chat_template: str | Path | None) -> None:
        self._files = files = load_model(model_dir, chat_template)
        self.config = files.settings
        if files.program is not None:
            self._as_received, self._makes_tokens = files.program.as_received, files.program.makes_tokens
        if files.no_tokenizer:
            self.template_error = files.no_template
            return
        self._sorts_tools = files.kind.sorts_tools(model_dir)
        self._readings = files.kind.readings(model_dir, files.config, files.settings)
        reading, self._doubt = self._readings.likeliest(self._quirks.transformers)
        self._enter(self._loaded(reading))
        self._readings.let_go()
        self._settle()

    def _loaded(self, reading: Reading) -> _Loaded:
        """Return all that depends on the tokenizer; takes up to a second, and may run in a thread."""
        files = self._files
        tokenizer = Tokenizer(files.directory, reading=reading)
        with using(files.directory / "tokenizer.json"):
            lead = None if tokenizer.added_around()[1] else tokenizer.leading()
            cuts = tokenizer.safe_cuts()
        prefixes = Prefixes(tokenizer, self.block_size, self._prefix_bytes)
        names = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
        with using(*(files.directory / name for name in names)):
            family = family_of(files.directory, files.settings, files.config, tokenizer) if files.takes_media else None
        return _Loaded(reading, tokenizer, cuts, lead, prefixes, family)

    def _enter(self, loaded: _Loaded) -> None:
        self.reading, self.tokenizer, self._cuts, self._lead, self.prefixes, self.media.family = loaded
        self.tokenizer.bound(self.max_model_len)
        self.prefixes.resize(self.block_size)
        self._make_renderers()

    def fixed_texts(self) -> list[str]:
        """Return the texts that an engine tokenizes too, to compare its ids with these; [] without a tokenizer."""
        if self.tokenizer is None:
            return []
        return fixed_texts(self.tokenizer, self.reading.special_tokens, self._readings.mentioned)

    def judge(self, answers: Sequence[Answer]) -> Verdict:
        """Find the way of reading the tokenizer's files that gives an engine's ids of the fixed texts.

        `answers`: the engine's ids of the texts of `fixed_texts`. The present way is tried first; if none fits,
        `Verdict.differs` says what differs. Changes nothing until `adopt` is called with the verdict. May take seconds,
        so it should run in a thread.
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
        """Return how engines of the present version most likely read the tokenizer's files. May take seconds."""
        return self._verdict(self._readings.likeliest(self._quirks.transformers)[0], "")

    def read_as(self, how: str) -> Verdict:
        """Return the verdict with this `how`, the name of a way that an earlier `judge` found. May take seconds."""
        if self.reading is None or how == self.reading.how:
            return Verdict(how)
        return self._verdict(next((one for one in self._readings.all() if one.how == how), None), how)

    def _verdict(self, reading: Reading | None, how: str) -> Verdict:
        try:
            loaded = self._loaded(reading) if reading and reading != self.reading else None
            return Verdict(reading.how if reading else how, loaded=loaded)
        finally:
            self._readings.let_go()

    def adopt(self, verdict: Verdict, confirmed: bool, differences: Differences = _NONE_FOUND) -> None:
        """Read the tokenizer's files in the verdict's way from now on.

        `confirmed`: an engine's ids showed that it reads them so; `differences`: what is known to differ all the same.
        """
        if verdict.loaded is not None and verdict.loaded.reading != self.reading:
            self._enter(verdict.loaded)
        in_use = self.reading is not None and self.reading.how == verdict.how  # it may have changed since it was judged
        self._confirmed = confirmed and in_use
        self.differ(differences)
        if self._readings is not None:
            self._weigh()

    def differ(self, differences: Differences) -> None:
        """Replace the known differences between the engines' tokens and the gateway's."""
        self._differences, self.clock.zones = differences, differences.zones
        self._settle()

    def _settle(self) -> None:
        found = self._differences
        self._certain = not (self.inexact_chat() or found.bodies or found.doubted or self._quirks.unfollowed)

    def inexact(self, model: str = "") -> str:
        """Return why an engine may make other tokens of a text for this model ("": any of them), or ""."""
        why = _of_model(self._differences.texts, model)
        if not why and self._doubt and not self._confirmed:
            why = f"how the engine reads the tokenizer's files is not certain: {self._doubt}"
        return why

    def inexact_chat(self, model: str = "") -> str:
        """Return why an engine may make other tokens of a conversation with this model ("": any of them), or ""."""
        if why := self.inexact(model) or _of_model(self._differences.chats, model):
            return why
        if self._quirks.chats_known is False:
            return "engines of this version write conversations by rules that are not known here"
        if self.must_be_shown and not self._differences.shown:
            return "nothing has shown yet that this engine writes conversations as the gateway does"
        return ""

    def unfollowed(self, request: dict[str, Any]) -> str:
        """Return a note on the fields of this body whose effect on the prompt is not implemented here, or ""."""
        given = self._given(request)
        return f"the engine reads {', '.join(sorted(given))} in another way than is followed here" if given else ""

    def _given(self, request: dict[str, Any]) -> dict[str, Any]:
        names = self._quirks.unfollowed & request.keys()
        return {name: request[name] for name in names if request[name] is not None}

    def _must_be_exact(self, prompt: Prompt, request: dict[str, Any], is_chat: bool, is_text: bool = True) -> None:
        """Raise _Inexact if the engine may make other tokens of the prompt.

        `is_chat`: it is a conversation; `is_text`: its tokens are to be made here, else the request brings them.
        """
        why = self.unfollowed(request)
        if is_text and not why:
            why = self.inexact_chat(prompt.model) if is_chat else self.inexact(prompt.model)
        found = self._differences
        if not why and not prompt.doubted and (found.bodies or found.doubted):
            prompt.features = has = features(prompt.path, request)
            why = next((said for body, said in found.bodies.items() if body <= has), "")
            prompt.doubted = bool(why) or any(body <= has for body in found.doubted)
        if why:
            raise _Inexact(why)

    def _make_renderers(self) -> None:
        files = self._files
        self.template_error, program = files.no_template, files.program
        templates: dict[str, ChatTemplate | ProgramTemplate] = {}
        if program is not None:
            templates["default"] = ProgramTemplate(program, self._quirks, self.clock)
        for name, source in files.templates.items() if program is None else ():
            try:
                templates[name] = ChatTemplate(source, self.reading.special_tokens, self._quirks, self.clock)
            except TemplateError as error:
                self.template_error = str(error)
        others = [source for name, source in files.templates.items() if name == "tool_use" or program is not None]
        self._habits = habits(templates.get("default"), others, self._template_given)
        self.renderers = {
            name: Renderer(template, self.tokenizer, self.prefixes, self._cuts) for name, template in templates.items()
        }
        self.made_by = next(_ways_so_far)  # last, so that prompts begun before have an older number

    @property
    def max_model_len(self) -> int | None:
        """The engine's context length in tokens, None where it is not known. May be set when the engine reports it."""
        return self._max_model_len

    @max_model_len.setter
    def max_model_len(self, tokens: int | None) -> None:
        self._max_model_len = tokens
        if self.tokenizer is not None:
            self.tokenizer.bound(tokens)

    def bound_prefixes(self, budget_bytes: int) -> None:
        """Set the memory for known prefixes: this pipeline's share of the budget of all pipelines."""
        self._prefix_bytes = budget_bytes
        if self.prefixes is not None:
            self.prefixes.bound(budget_bytes)

    @property
    def tokenizes_chats(self) -> bool:
        """Whether the engines' /tokenize renders chats as inference does."""
        return self._quirks.tokenizes_all or not self._as_received

    @property
    def template_exceeds(self) -> str:
        """Why a recent rendering of a chat template was ended early, or ""."""
        return next(filter(None, (one.template.exceeds for one in self.renderers.values())), "")

    @property
    def prints_date(self) -> bool:
        """Whether conversations contain the engine's date, at least in some cases."""
        return any(one.template.prints_date for one in self.renderers.values())

    @property
    def must_be_shown(self) -> bool:
        """Whether chats count as exact only after an engine made the gateway's ids of the fixed chats (`ops.chats`)."""
        program = self._files.program if self._files is not None else None
        return self._quirks.chats_known is None or (program is not None and program.to_be_shown)

    @property
    def takes_media(self) -> bool:
        """Whether prompts may hold images, sound or video; True where the model's files are not known."""
        return self._files is None or self._files.takes_media

    @property
    def block_size(self) -> int:
        """The tokens per block. Setting another size, when the engine reports one, drops the known prefixes."""
        return self._block_size

    @block_size.setter
    def block_size(self, size: int) -> None:
        if size != self._block_size:
            self._block_size = size
            self._seeds = {}
            if self.prefixes is not None:
                self.prefixes.resize(size)

    def follow(self, told: Mapping[str, Any], at_once: bool = True) -> None:
        """Make prompts as engines of another version do.

        `told`: the fields of `VersionQuirks` in which this version differs from the newest. If its engines probably
        read the tokenizer's files differently, the files are read again, which may take seconds; unless `at_once`, they
        are not, and prompts are matched as text until `adopt` is called.
        """
        found = VersionQuirks.of(told)
        if found != self._quirks:
            self._quirks = found
            if self._readings is not None:
                self._make_renderers()
                if at_once and not self._confirmed:
                    self.adopt(self.likeliest(), False, self._differences)
                self._weigh()

    def _weigh(self) -> None:
        reading, self._doubt = self._readings.likeliest(self._quirks.transformers)
        if reading != self.reading:
            self._doubt = self._doubt or f"{self._quirks.transformers} has {reading.how}, which is not loaded"
        self._settle()

    def prepare(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        adapters: Collection[str] = (),
        refusal: Refusal | None = None,
    ) -> Prompt:
        """Return the Prompt of one request.

        `path`: one of PROMPT_PATHS. `headers`: the request's, with lower-case names. `adapters`: the names of the LoRA
        adapters that are served. `refusal`: returns the error for a parsed body that is to be refused, or None.

        Raises ApiError for the client's faults, the error of `refusal`, and, on the event loop, TakesLong for a prompt
        that has to be prepared in a thread.
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
        """Return the Prompt of a request whose body is parsed already, as `prepare` does.

        `request`: the parsed body, which stays unchanged; `unusual`: the note on its JSON that `parse` returned.
        """
        made_by, limit = self.made_by, self._max_model_len
        alike = self._quirks.refuses_alike
        # With such rules engines accept any output limit and reduce it to what the context leaves.
        clamps = (self._as_received and path in _CONVERSATIONS) or not alike
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
                try:
                    self._fill(prompt, request, body)
                except Rounded:
                    request = parse_exactly(body)
                    self._fill(prompt, request, body)
            except _Inexact as inexact:
                if prompt.doubted:
                    prompt.made = self._counted(prompt, request, body)
                return self._as_text(prompt, request, str(inexact))
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

    def _counted(self, prompt: Prompt, request: dict[str, Any], body: bytes) -> int | None:
        """Return the gateway's token count of a body that is matched as text, or None where it cannot be counted.

        An engine has counted other tokens for this body or for one with the same features; if it now counts as many as
        the gateway, the doubt ends.
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
        adapter, salt, path = prompt.adapter, request.get("cache_salt"), prompt.path
        seed = None if salt else self._seeds.get(adapter)
        if seed is None:
            seed = chain_seed(self.served_name, self._block_size, adapter, salt)
            if not salt:
                self._seeds[adapter] = seed
        prompt.seed = seed
        if path == EMBEDDINGS and request.get("padding") not in (None, "do_not_pad"):
            raise Unroutable("a prompt that is padded")
        if path in _CONVERSATIONS or (path == EMBEDDINGS and "messages" in request):
            ids = None if self._certain else self._ids_or_doubt(prompt, request)
            roles = self._conversation(prompt, request, body, seed, ids)
        else:
            roles = None
            self._plain_prompt(prompt, request, seed)
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

    def _ids_or_doubt(self, prompt: Prompt, request: dict[str, Any]) -> bytes | None:
        """Return the token ids that a request brings in place of its messages, or None. Raises _Inexact."""
        field, chat = self._quirks.ids_field, prompt.path == CHAT
        given = request.get(field) if chat and field else None
        if given == []:
            raise _Inexact(f"an empty list of {field}: whether the engine then uses the messages is not known")
        ids = packed(given, field) if isinstance(given, list) else None
        came = ids or (
            chat and "kv_transfer_params" in request and forwarded_ids(request, self._quirks.forwards_past_media)
        )
        self._must_be_exact(prompt, request, True, not came)
        return ids

    def made(self, path: str, body: bytes, day: date | None = None) -> list[int]:
        """Return the token ids that the gateway makes of a conversation, [] where it cannot make all of them.

        Known differences from the engines' tokens do not matter. `day`: the date that the template prints, or None for
        today by the engines' clocks.
        """
        request, unusual = parse(body)
        prompt = read_options(path, request, None, (), None)
        try:
            if not unusual and self.tokenizer is not None:
                self._conversation(prompt, request, body, 0, None, day)
        except Exception:  # any fault of the request or of the template
            return []
        return memoryview(prompt.token_ids).cast("I").tolist() if prompt.mode == "exact" else []

    def _conversation(
        self,
        prompt: Prompt,
        request: dict[str, Any],
        body: bytes,
        seed: int,
        ids: bytes | None,
        day: date | None = None,
    ) -> tuple[str, ...] | None:
        """Fill the prompt of a conversation; return its roles if each message consists of a role and a text, else None.

        `seed`: the hash that the chain of block hashes starts from. `ids`: token ids that the request brings in place
        of its messages, or None. `day`: the date that the template prints, or None for today by the engines' clocks.
        """
        as_received = self._as_received
        if ids is None and "kv_transfer_params" in request and not (as_received and prompt.path == RESPONSES):
            ids = forwarded_ids(request, self._quirks.forwards_past_media)
        chat = None
        if ids is None:
            chat = (self._chat_as_received if as_received else self._chat)(prompt.path, request)
            chat.body, chat.at = body, self.clock.on(day) if day is not None else None
            chat.special = chat.special and not self._makes_tokens
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
                    context = self._max_model_len or UNKNOWN_CONTEXT
                    try:
                        if renderer.is_certain():
                            self.media.fill(prompt, chat, request, renderer, seed, rule, context)
                            return None
                    except Unknown as other:
                        unknown = other
                self._begin(prompt, chat, request, unknown, seed)
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
        """Return the chat for an engine that passes messages unchanged to its own rules, and reads few other fields."""
        if path == RESPONSES:
            return from_items(request)
        if path == EMBEDDINGS:
            raise Unroutable("embeddings of a conversation that is written by rules")
        own = request.get("chat_template_kwargs")
        if isinstance(own, dict) and ("reasoning_effort" in own or "tools" in own):
            raise Unroutable("the engine does not read these template variables for this model")
        chat = self._chat(path, request)
        chat.special = False
        return chat

    def _chat(self, path: str, request: dict[str, Any]) -> Chat:
        if path == CHAT:
            return from_chat(request, self._quirks)
        if path == RESPONSES:
            return from_responses(request, self._quirks)
        if path == EMBEDDINGS:
            return from_embeddings(request)
        return from_messages(request, self._habits, self._quirks.rules_are_known)

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
        """Fill the prompt of a conversation whose text is known up to the template's date or time: `exact`."""
        prompt.declined = True
        if renderer.template.prints_time:
            # What follows the time differs in each prompt, so no replica holds it and it gets no block hashes.
            fill_partly(prompt, chat, renderer, exact, b"", seed)
            prompt.tokens = max(prompt.tokens, len(chat.body) // 4)
            prompt.note = "the template prints the time of the day: exact up to there"
        else:
            fill_partly(prompt, chat, renderer, exact, _written([chat.tools, *chat.messages]), seed)
            why = self._differences.days or "it may change just now"
            prompt.note = f"exact up to the date that the template prints, by text from there on: {why}"[:_LONGEST_NOTE]

    def _begin(self, prompt: Prompt, chat: Chat, request: dict[str, Any], unknown: Unknown, seed: int) -> None:
        """Fill the prompt of a conversation of which only the first messages are known; match the rest as text.

        `unknown`: why, and how many messages are known.
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
            # A copy: raised itself it would form a cycle with this frame, which keeps the body until a collection.
            raise type(unknown)(*unknown.args)
        text = _written([*chat.messages[known:], *of_rest])
        prompt.note = f"exact up to message {known}, by text from there on: {_said(unknown)}"[:_LONGEST_NOTE]
        if isinstance(unknown, Multimodal):
            prompt.media = "load"
        prompt.declined = True
        fill_partly(prompt, chat, renderer, exact, text, seed)

    def _plain_prompt(self, prompt: Prompt, request: dict[str, Any], seed: int) -> None:
        """Fill the prompt of `/v1/completions` or `/v1/embeddings`: one text or list of ids, or several of either."""
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
        if not self._certain:
            self._must_be_exact(prompt, request, False, isinstance(prompts[0], str))
        if isinstance(prompts[0], str):
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
            # `tokens` is the sum over all prompts; without this a replica that holds the longest one completely would
            # be credited with the block of its last token.
            prompt.hashes = prompt.hashes[: (len(prompt.token_ids) // 4 - 1) // self.block_size]
            prompt.copies = prompt.n * len(ids) if all(one == ids[0] for one in ids) else 0

    def _hashed(self, ids: bytes, seed: int) -> array[int]:
        return array("Q", hash_blocks(ids, self.block_size, seed))

    def _truncated(self, ids: bytes, keep: Any, request: dict[str, Any], prompt: Prompt, special: bool) -> bytes:
        """Apply `truncate_prompt_tokens`: keep that many tokens, or with -1 all that leave room for output.

        vLLM cuts on the left (embeddings: on the right) unless `truncation_side` says otherwise. Without that field the
        tokenizer does the cutting, and keeps the special tokens that it has added; `special`: it has added some.
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
        """Return how many tokens truncation to the context length leaves for the output."""
        if prompt.path == EMBEDDINGS:
            return 0
        wanted = prompt.max_tokens
        if wanted is None:
            wanted = 16 if prompt.path == COMPLETIONS else int(self._quirks.leaves_one)
        return wanted if self._quirks.truncates_to_output else min(1, wanted)

    def _as_text(self, prompt: Prompt, request: dict[str, Any], why: str) -> Prompt:
        """Fill a prompt with hashes of the request's text, in which 4 bytes stand for a token; `why`: the reason.

        The chain of hashes starts from a seed that no chain of tokens has, so it never matches an engine's blocks.
        """
        refuse_deep_arguments(request)
        said = request.get("messages", request.get("prompt", request.get("input", "")))
        head = [request.get("system"), request.get("instructions"), request.get("tools")]
        text = said.encode() if isinstance(said, str) and not any(head) else _written([head, said])
        salt, given = request.get("cache_salt"), self._given(request)
        if given:  # these fields may change the names of blocks
            salt = _dumped([salt, sorted(given.items())]).decode()
        seed = chain_seed("text:" + self.served_name, self.block_size, prompt.adapter, salt)
        prompt.mode, prompt.note = "text", why
        prompt.rendered_chars = len(text)
        prompt.tokens = len(text) // 4 or 1
        prompt.hashes = GuessedBlocks.of(hash_blocks(text, self.block_size, seed), 0)
        return prompt

    def _unlike(self, prompt: Prompt, request: dict[str, Any], body: bytes, error: Exception) -> Prompt:
        """Match a request as text because of an error that prevents making its tokens.

        A request nested too deeply to be written as text is routed by load, at a token for each 4 bytes of its body.
        """
        note = _said(error)[:_LONGEST_NOTE]
        prompt.token_ids, prompt.declined = b"", True
        if isinstance(error, Multimodal):
            prompt.media = "load"
        try:
            return self._as_text(prompt, request, note)
        except (ValueError, RecursionError):  # nested too deeply
            prompt.mode, prompt.note, prompt.hashes, prompt.tokens = "load", note, (), len(body) // 4
            return prompt


def _of_model(why: Mapping[str, str], model: str) -> str:
    return (why.get(model, why.get("")) if model else next(iter(why.values()), "")) or ""


def _said(error: Exception) -> str:
    if isinstance(error, Multimodal):
        return f"media in the prompt ({error})"
    return str(error) if isinstance(error, (Unroutable, TemplateError)) else f"{type(error).__name__}: {error}"


def _written(said: Any) -> bytes:
    """Return a part of a request as JSON text, without what agents change in each turn.

    Agents move `cache_control`, their mark of where the cache is to end, and change the checksum in Claude Code's
    attribution line.
    """
    text = _dumped(said)
    return _dumped(_kept(said)) if any(one in text for one in _OF_A_TURN) else text


def _dumped(said: Any) -> bytes:
    try:
        return orjson.dumps(said)
    except TypeError:  # half a surrogate pair, integers of more than 64 bits, 255 levels
        return json.dumps(said).encode()


def _kept(said: Any) -> Any:
    if type(said) is dict:
        return {key: _kept(value) for key, value in said.items() if key != "cache_control"}
    if type(said) is list:
        texts = [one.get("text") if type(one) is dict else None for one in said]
        return [_kept(one) for one, text in zip(said, texts) if type(text) is not str or is_plain(text)]
    return said
