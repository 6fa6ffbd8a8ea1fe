"""A model's tokenizer and templates, read as its engines read them, and why their prompts may differ all the same.

The files do not show how an engine reads them. A `ModelReader` begins with the likeliest way and takes another one when
an engine's ids of fixed texts show it (`judge`, then `adopt`), or when an engine of another version comes (`follow`).
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
_ways_so_far = count(1)  # numbers for ways of making prompts, unique in the process
_NONE_FOUND = Differences()
_NO_PROGRAM = Program("", "", takes_parts=lambda quirks: False, write=lambda *given: "")


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


class ModelReader:
    """A model's files as its engines read them, with all that is made of the files and shared by its prompts."""

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
        self._program = _NO_PROGRAM  # the rules that write its conversations in place of a template
        self._lead: bytes | None = None  # special tokens before a text, or None if some follow it
        self.made_by = 0  # changes whenever ids may be made differently from before
        self.media = Media()
        self.space = 0  # the number of the variant: replicas with equal tokens and blocks share it
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
        self.made_by = next(_ways_so_far)  # last, so that prompts begun before have an older number

    # --- how its engines read the files

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

    # --- why an engine may make other tokens

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

    def _why_inexact(self, prompt: Prompt, request: dict[str, Any], is_chat: bool, is_text: bool) -> str:
        """Return why an engine may make other tokens of a prompt, or "", and set the prompt's `doubted`.

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
        return why

    # --- what engines and the operator say of it

    @property
    def max_model_len(self) -> int | None:
        """The engine's context length in tokens, None where it is not known. May be set when the engine reports it."""
        return self._max_model_len

    @max_model_len.setter
    def max_model_len(self, tokens: int | None) -> None:
        self._max_model_len = tokens
        if self.tokenizer is not None:
            self.tokenizer.bound(tokens)

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

    def bound_prefixes(self, budget_bytes: int) -> None:
        """Set the memory for known prefixes: this pipeline's share of the budget of all pipelines."""
        self._prefix_bytes = budget_bytes
        if self.prefixes is not None:
            self.prefixes.bound(budget_bytes)

    @property
    def tokenizes_chats(self) -> bool:
        """Whether the engines' /tokenize renders chats as inference does."""
        return self._quirks.tokenizes_all or not self._program.as_received

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
        return self._quirks.chats_known is None or self._program.to_be_shown

    @property
    def takes_media(self) -> bool:
        """Whether prompts may hold images, sound or video; True where the model's files are not known."""
        return self._files is None or self._files.takes_media


def _of_model(why: Mapping[str, str], model: str) -> str:
    return (why.get(model, why.get("")) if model else next(iter(why.values()), "")) or ""
