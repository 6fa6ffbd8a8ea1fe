"""A model's tokenizer and chat templates, read as the model's engines read them.

The files alone do not show how an engine reads them, because that depends on the engine's release of transformers. A
`ModelReader` begins with the likeliest interpretation. It changes to another one when an engine's token ids of fixed
texts require it (`judge`, then `adopt`), or when an engine of another version is found (`follow`). It also collects the
reasons why an engine may make other tokens than the gateway all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from .api.anthropic import Habits, habits
from .features import features
from .media.families import Family
from .media.filling import Media, family_of
from .prompt import Prompt
from .quirks import NEWEST, VersionQuirks
from .render.clock import Clock
from .render.program import Program, ProgramTemplate
from .render.renderer import Renderer
from .render.template import ChatTemplate, TemplateError
from .tokens.agreement import Answer, Differences, difference, fixed_texts
from .tokens.folder import using
from .tokens.model import LoadedModel, load_model
from .tokens.prefixes import Prefixes
from .tokens.ranked import RankedReadings
from .tokens.reading import Reading, Readings
from .tokens.tokenizer import Tokenizer

PREFIX_BYTES = 256 * 1024 * 1024
_ways_so_far = count(1)  # the values of `ModelReader.made_by`, unique in the process
_NONE_FOUND = Differences()
_NO_PROGRAM = Program("", "", takes_parts=lambda quirks: False, write=lambda *given: "")


class _Loaded(NamedTuple):
    """One interpretation of the tokenizer's files (a Reading), with the objects that are made from it."""

    reading: Reading
    tokenizer: Tokenizer
    cuts: frozenset[str]  # added tokens before which a text may be cut
    lead: bytes | None  # the special tokens that are added before each text; None: some are added after it, too
    prefixes: Prefixes
    family: Family | None  # the rule for the tokens of images; None: it is not known


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finding on how an engine interprets the tokenizer's files, from comparing token ids or assumed as likeliest.

    A Reading is one interpretation of these files: tokenizer.json as it is, or rebuilt as some tokenizer class.
    """

    how: str  # the name of the Reading (`Reading.how`)
    differs: str = ""  # why no Reading known here gives the engine's tokens, or ""
    loaded: _Loaded | None = None  # the Reading with its tokenizer; None: it is the one that is in use


class ModelReader:
    """One model's tokenizer and templates as its engines read them, with all that is made of them for its prompts."""

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

        `model_dir`: the model's folder; None: there is no tokenizer, and all prompts are routed by their text.
        `served_name`: the model's name in block hashes.
        `block_size`: tokens per block.
        `chat_template`: a file that replaces the model's own template.
        `max_model_len`: the engine's context length in tokens; None: not known yet, so no prompt is too long.
        `prefix_bytes`: memory in bytes for the tokens and block hashes of prompts seen before.
        """
        self.served_name, self.directory = served_name, model_dir
        self._block_size = block_size
        self.looks_ahead = 0  # the number of tokens after a block that the engines include in the block's hash
        # By LoRA adapter: the hash from which the chain of block hashes starts for requests without a `cache_salt`.
        self._seeds: dict[str | None, int] = {}
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
        self.clock = Clock()  # the clock of the model's engines
        self.reading: Reading | None = None  # the interpretation of the tokenizer's files that is in use
        self._readings: Readings | RankedReadings | None = None  # all interpretations that an engine may use
        self._sorts_tools = False  # the template gets tools with their keys in alphabetical order
        self._doubt = ""  # why the files do not determine how the engine reads them, or ""
        self._confirmed = False  # an engine has made the same ids of the fixed texts as the gateway
        self._differences = _NONE_FOUND  # known differences between the engines' tokens and the gateway's
        self._certain = True  # there is no reason to expect other tokens from an engine for any prompt
        self._cuts: frozenset[str] = frozenset()  # added tokens before which a text may be cut
        self._template_given = chat_template is not None
        self._program = _NO_PROGRAM  # the rules that write the model's conversations in place of a template
        self._lead: bytes | None = None  # special tokens that are added before a text; None: some are added after it
        self.made_by = 0  # the number of the present tokenizer and templates; changes when ids may be made differently
        self.media = Media()
        self.space = 0  # the number that replicas with equal tokens and blocks share
        if model_dir is not None:
            with using(model_dir):
                self._load(model_dir, chat_template)

    def _load(self, model_dir: Path, chat_template: str | Path | None) -> None:
        self._files = files = load_model(model_dir, chat_template)
        self.config, self._program = files.settings, files.program or _NO_PROGRAM
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
        """Build the tokenizer of this reading and all that depends on it.

        Takes up to a second, and may run in a thread. Changes nothing that prompts use. Raises ModelError or
        TokenizerError.
        """
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

    def _make_renderers(self) -> None:
        files, program = self._files, self._files.program
        self.template_error = files.no_template
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
        self.made_by = next(_ways_so_far)  # set last, so that prompts begun before have an older number

    # --- how the model's engines read the files

    def fixed_texts(self) -> list[str]:
        """Return the fixed texts that an engine is asked to tokenize, to compare its token ids with the gateway's.

        The result is [] if the gateway has no tokenizer for the model.
        """
        if self.tokenizer is None:
            return []
        return fixed_texts(self.tokenizer, self.reading.special_tokens, self._readings.mentioned)

    def judge(self, answers: Sequence[Answer]) -> Verdict:
        """Find the interpretation of the tokenizer's files that gives an engine's token ids of the fixed texts.

        `answers`: the engine's ids of the texts that `fixed_texts` returned. The interpretation in use is tried first.
        If none gives the engine's ids, `Verdict.differs` says what differs. Nothing changes until `adopt` is called
        with the verdict. May take seconds, so it should run in a thread.
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
        """Return a Verdict with the interpretation of the tokenizer's files that the engines most likely use.

        It depends on the engines' version, which is the one that was last passed to `follow`. May take seconds.
        """
        return self._verdict(self._readings.likeliest(self._quirks.transformers)[0], "")

    def read_as(self, how: str) -> Verdict:
        """Return a Verdict with the interpretation of the tokenizer's files that is named `how`. May take seconds.

        `how`: the attribute `how` of a Verdict that `judge` returned earlier.
        """
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
        """Use the verdict's interpretation of the tokenizer's files for all prompts from now on.

        `confirmed`: an engine's ids of the fixed texts showed that the engine reads the files in this way.
        `differences`: the differences from the engines' tokens that are known to remain.
        """
        if verdict.loaded is not None and verdict.loaded.reading != self.reading:
            self._enter(verdict.loaded)
        # The reading in use may have changed since the verdict was made.
        in_use = self.reading is not None and self.reading.how == verdict.how
        self._confirmed = confirmed and in_use
        self.differ(differences)
        if self._readings is not None:
            self._weigh()

    def follow(self, told: Mapping[str, Any], at_once: bool = True) -> None:
        """Make prompts as engines of another version do, from now on.

        `told`: the fields of `VersionQuirks` in which this version differs from the newest one. Engines of this version
        may read the tokenizer's files differently. With `at_once` the files are then read again, which may take
        seconds. Without it prompts are routed by their text, not by tokens, until `adopt` is called.
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

    # --- why an engine may make other tokens

    def differ(self, differences: Differences) -> None:
        """Set the known differences between the engines' tokens and the gateway's, in place of the earlier ones."""
        self._differences, self.clock.zones = differences, differences.zones
        self._settle()

    def _settle(self) -> None:
        found = self._differences
        self._certain = not (self.inexact_chat() or found.bodies or found.doubted or self._quirks.unfollowed)

    def inexact(self, model: str = "") -> str:
        """Return why an engine may tokenize a text differently from the gateway, or "" if there is no reason.

        `model`: the model that the request names; "": any of the names that the replicas serve.
        """
        why = _of_model(self._differences.texts, model)
        if not why and self._doubt and not self._confirmed:
            why = f"how the engine reads the tokenizer's files is not certain: {self._doubt}"
        return why

    def inexact_chat(self, model: str = "") -> str:
        """Return why an engine may make other tokens of a conversation than the gateway, or "" if there is no reason.

        `model`: the model that the request names; "": any of the names that the replicas serve.
        """
        if why := self.inexact(model) or _of_model(self._differences.chats, model):
            return why
        if self._quirks.chats_known is False:
            return "engines of this version write conversations by rules that are not known here"
        if self.must_be_shown and not self._differences.shown:
            return "nothing has shown yet that this engine writes conversations as the gateway does"
        return ""

    def unfollowed(self, request: dict[str, Any]) -> str:
        """Return a note that lists the fields of a body whose effect on the prompt is not implemented here, or ""."""
        given = self._given(request)
        return f"the engine reads {', '.join(sorted(given))} in another way than is followed here" if given else ""

    def _given(self, request: dict[str, Any]) -> dict[str, Any]:
        names = self._quirks.unfollowed & request.keys()
        return {name: request[name] for name in names if request[name] is not None}

    def _why_inexact(self, prompt: Prompt, request: dict[str, Any], is_chat: bool, is_text: bool) -> str:
        """Return why an engine may make other tokens of a prompt than the gateway, or "" if there is no reason.

        `is_chat`: the prompt is a conversation. `is_text`: the gateway has to make the tokens, because the request
        holds no token ids. If engines have reported other token counts than the gateway's for some bodies, this also
        sets `prompt.features`, and sets `prompt.doubted` if this body has the features of such a body.
        """
        why = self.unfollowed(request)
        if is_text and not why:
            why = self.inexact_chat(prompt.model) if is_chat else self.inexact(prompt.model)
        found = self._differences
        if not why and not prompt.doubted and (found.bodies or found.doubted):
            prompt.features = has = features(prompt.path, request)
            why = next((said for body, said in found.bodies.items() if body <= has), "")
            prompt.doubted = bool(why) or any(body <= has for body in found.doubted)
        return why

    # --- properties of the model that engines report or the operator sets, and of its templates

    @property
    def max_model_len(self) -> int | None:
        """The engine's context length in tokens, None where it is not known.

        Setting it makes the tokenizer refuse texts that are certain to have more tokens.
        """
        return self._max_model_len

    @max_model_len.setter
    def max_model_len(self, tokens: int | None) -> None:
        self._max_model_len = tokens
        if self.tokenizer is not None:
            self.tokenizer.bound(tokens)

    @property
    def block_size(self) -> int:
        """The number of tokens per KV cache block.

        Setting another size, when the engine reports one, drops the tokens and hashes kept of prompts seen before.
        """
        return self._block_size

    @block_size.setter
    def block_size(self, size: int) -> None:
        if size != self._block_size:
            self._block_size = size
            self._seeds = {}
            if self.prefixes is not None:
                self.prefixes.resize(size)

    def bound_prefixes(self, budget_bytes: int) -> None:
        """Set the memory for the tokens and hashes of prompts seen before, in bytes.

        The size is this pipeline's share of the budget of all pipelines.
        """
        self._prefix_bytes = budget_bytes
        if self.prefixes is not None:
            self.prefixes.bound(budget_bytes)

    @property
    def tokenizes_chats(self) -> bool:
        """Whether the engines' /tokenize endpoint renders this model's chats in the same way as inference does."""
        return self._quirks.tokenizes_all or not self._program.as_received

    @property
    def template_exceeds(self) -> str:
        """Why the rendering of a chat template was recently stopped for taking too much work or memory, or ""."""
        return next(filter(None, (one.template.exceeds for one in self.renderers.values())), "")

    @property
    def prints_date(self) -> bool:
        """Whether conversations contain the engine's date, at least in some cases."""
        return any(one.template.prints_date for one in self.renderers.values())

    @property
    def must_be_shown(self) -> bool:
        """Whether chats count as exact only once an engine's ids of fixed test chats have equalled the gateway's.

        `ops.chats` compares them.
        """
        return self._quirks.chats_known is None or self._program.to_be_shown

    @property
    def takes_media(self) -> bool:
        """Whether prompts may hold images, sound or video; True where the model's files are not known."""
        return self._files is None or self._files.takes_media


def _of_model(why: Mapping[str, str], model: str) -> str:
    return (why.get(model, why.get("")) if model else next(iter(why.values()), "")) or ""
