"""The files of each model: where they are, what is in them, and the pipelines that are made of them.

Files are looked for, read and loaded in threads, but for those of the model that the operator names, which are read
once before anything is served.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from replicas import Replica
from replicas.served import base_names

from .model import folder_here, model_dir
from .prompt.pipeline import Pipeline
from .prompt.tokens.model import PASSING, ModelError, contents
from .settings import ConfigError, Settings

log = logging.getLogger("hitherto")

# What block hashes are seeded with, and so a part of what gateways that share a map must have in common. Not the name
# of a folder or of a setting, which may differ between gateways before the same engines: one replica serves one base
# model, and the map has a part for each replica.
HASHED_AS = "model"
DEFAULT_BLOCK_SIZE = 16  # vLLM's, until a replica tells its own
RETRY_SECONDS, MOST_RETRY_SECONDS = 1.0, 60.0
T = TypeVar("T")


class Source(NamedTuple):
    """A model's files as they were when an engine started. `contents`: a digest of them."""

    directory: Path
    contents: int


class ModelFiles:
    """Where the files of replicas' models are, and pipelines made of them."""

    def __init__(self, settings: Settings, directory: Path | None, name: str):
        """`directory`: of the model that the operator names, None if none is; `name`: what launched engines serve it
        by."""
        self._settings, self._directory, self._name = settings, directory, name
        self.given = self._read(directory)
        # Called with the names of a model that was taken for the operator's, once another one turns out to be it.
        self.mistaken: Callable[[set[str]], None] = lambda names: None
        self._owner: set[str] = set()  # names of the model that `directory` is for
        self._owner_is_certain = False
        # By what an engine was started with and what it calls its model. A search is made once.
        self._searches: dict[tuple[str | None, str], asyncio.Task[Path | None]] = {}
        self._last: dict[tuple[str | None, str], Source] = {}  # what was found for it

    def stop(self) -> None:
        for search in self._searches.values():
            search.cancel()

    def known(self, replica: Replica) -> Source | None:
        """What was found last for its model, which may have changed on disk. Reads nothing."""
        given = self.given if self._directory is not None and self._is_owner(replica) else None
        return self._last.get(_asked(replica), given)

    async def find(self, replica: Replica) -> Source | None:
        """The files that an engine which starts now works with. None: there are none here."""
        directory = await self._find_directory(replica)
        source = await _in_thread(self._read, directory)
        if source is not None:
            self._last[_asked(replica)] = source
        return source

    def new_pipeline(self, directory: Path | None, name: str | None = None) -> Pipeline:
        """Raises ConfigError for a model that cannot be used, by the name that the operator knows it by."""
        name, size = name or self._name, self._settings.block_size or DEFAULT_BLOCK_SIZE
        try:
            made = Pipeline(directory, HASHED_AS, size, chat_template=self._settings.chat_template)
        except ModelError as error:
            raise ConfigError(f"model {name}: {error}") from None
        if directory is not None and made.tokenizer is None:
            log.warning("model %s: %s. Its prompts are matched as text", name, made.template_error)
        return made

    async def load(self, source: Source, name: str | None) -> Pipeline | None:
        """A pipeline of these files, or None if they cannot be used, which is logged."""
        try:
            return await _in_thread(self.new_pipeline, source.directory, name)
        except ConfigError as error:
            log.error("no tokenizer: prompts of %s are matched as text. %s", name or self._name, error)
            return None
        except Exception as error:  # a folder has whatever its maker put there: the other models go on
            log.exception("no tokenizer: prompts of %s are matched as text. Its files cannot be used: %s", name or self._name,
                          type(error).__name__)  # fmt: skip
            return None

    def _read(self, directory: Path | None) -> Source | None:
        return None if directory is None else Source(directory, contents(directory, self._settings.chat_template))

    async def _find_directory(self, replica: Replica) -> Path | None:
        if self._directory is not None:
            if self._is_owner(replica):
                return self._directory
            # Without a folder of its own it gets the operator's, which the comparison with the engine may prove wrong.
            return folder_here(replica.root) or self._directory
        if not replica.models:
            return None
        asked = _asked(replica)
        if asked not in self._searches:
            self._searches[asked] = asyncio.create_task(self._search(*asked))
        return await asyncio.shield(self._searches[asked])

    async def _search(self, root: str | None, name: str) -> Path | None:
        """No --model was given: try what a replica was started with, which is not here if its folders are its own, and
        then what it calls its model, which may be any name."""
        try:
            found = folder_here(root) or await _in_thread(model_dir, root, name)
        except ConfigError as error:
            log.error("no tokenizer: prompts of %s are matched as text. %s", name, error)
            return None
        log.info("tokenizer and chat template of %s from %s", name, found)
        return found

    def _is_owner(self, replica: Replica) -> bool:
        """Whether this is the model that the operator gave the files of: the one that has its name or folder, else the
        first. Where engines are launched, it is theirs."""
        if not replica.models:
            return True
        names = set(base_names(replica.models))
        called = {self._settings.model, self._settings.served_model_name, self._name, self._directory.name}
        certain = (
            bool(names & called) or _same_folder(replica.root, self._directory) or replica.root == self._settings.model
        )
        if certain and not self._owner_is_certain:
            if self._owner and not self._owner & names:
                asyncio.get_running_loop().call_soon(self.mistaken, self._owner)
                self._owner = set()
                self._last.clear()
            self._owner_is_certain = True
        if certain or self._owner & names or not (self._owner or self._settings.launches):
            self._owner |= names
            return True
        return False


def _asked(replica: Replica) -> tuple[str | None, str]:
    return replica.root, min(base_names(replica.models), default="")


def _same_folder(root: str | None, directory: Path) -> bool:
    return folder_here(root) is not None and Path(root).resolve() == directory.resolve()


async def _in_thread(function: Callable[..., T], *args: Path | str | None) -> T:
    """Call `function` in a thread, and again after growing pauses while the operating system refuses it something that
    passes (PASSING). All else that it raises is raised, and an input/output error once the pauses are at their
    longest: a network mount mostly recovers within a minute, and a bad disk never does."""
    pause = RETRY_SECONDS
    while True:
        try:
            return await asyncio.get_running_loop().run_in_executor(None, function, *args)
        except Exception as error:
            number = _refusal(error)
            if number is None or (number == errno.EIO and pause >= MOST_RETRY_SECONDS):
                raise
            log.warning("a model's files cannot be read now, which is tried again in %g s: %s", pause, error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MOST_RETRY_SECONDS)


def _refusal(error: BaseException | None) -> int | None:
    """Return the number of the operating system's refusal of something that passes, where this is the error or what
    the error was made of, or None."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno in PASSING:
        return error.errno
    return _refusal(error.__cause__ or error.__context__)
