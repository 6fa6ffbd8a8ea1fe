"""The files of each model: their folder, a digest of their contents, and the pipelines made from them.

The files are searched, read and loaded in threads of their own (`FolderThreads`). Only the files of the model that the
operator names are read without a thread, once, before anything is served.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from replicas import Replica
from replicas.served import base_names

from .files import PASSING
from .model import folder_here, model_dir
from .prompt.pipeline import Pipeline
from .prompt.tokens.model import ModelError, contents
from .settings import ConfigError, Settings
from .threads import FolderThreads

log = logging.getLogger("hitherto")

# The seed of block hashes, which gateways that share a cache map must have in common. It is not the name of a folder or
# of a setting, since these may differ between gateways in front of the same engines. One seed for all models is enough:
# a replica serves one base model, and the map has a part for each replica.
HASHED_AS = "model"
DEFAULT_BLOCK_SIZE = 16  # tokens, vLLM's default, until a replica reports its own
RETRY_SECONDS, MOST_RETRY_SECONDS = 1.0, 60.0
READ_SECONDS = 30.0  # to read the files of a folder; 40 MB over a network of 2 MB/s take 20 s
LOAD_SECONDS = 300.0  # to load a tokenizer, or to download its files from the hub
MOST_KEPT = 256  # entries of each memory of searches and found files: an engine may name another folder at each start
T = TypeVar("T")


class Source(NamedTuple):
    """The folder of a model, with a digest of its contents when an engine started."""

    directory: Path
    contents: int

    def __str__(self) -> str:
        return f"in {self.directory} ({self.contents & 0xFFFFFF:06x})"


class ModelFiles:
    """The finder of replicas' model files, which also makes pipelines (body to token ids to block hashes) from them."""

    def __init__(self, settings: Settings, directory: Path | None, name: str):
        """Read the files of the model that the operator names. Raises ConfigError if they cannot be read.

        `directory`: the folder of that model, None if the operator names none. `name`: the name by which launched
        engines serve it.
        """
        self._settings, self._directory, self._name = settings, directory, name
        self._reading, self._searching = FolderThreads(16, READ_SECONDS), FolderThreads(4, LOAD_SECONDS)
        self.loading = FolderThreads(4, LOAD_SECONDS)
        try:
            self.given = self._read(directory)
        except (ModelError, OSError) as error:
            raise ConfigError(f"model {name}: {error}") from None
        # Called if a model was wrongly taken for the operator's, with that model's names.
        self.mistaken: Callable[[set[str]], None] = lambda names: None
        self._owner: set[str] = set()  # names of the model that `directory` is for
        self._owner_is_certain = False
        self._same: set[str | None] = set()  # roots that are the operator's folder under another path
        # Searches by the engine's root and model name; each is made once.
        self._searches: dict[tuple[str | None, str], asyncio.Task[Path | None]] = {}
        self._last: dict[tuple[str | None, str], Source] = {}  # the files found last, by the same key

    def stop(self) -> None:
        for search in self._searches.values():
            search.cancel()

    def known(self, replica: Replica) -> Source | None:
        """Return the files that were found last for the replica's model, or None; the disk is not read."""
        given = self.given if self._directory is not None and self._is_owner(replica) else None
        return self._last.get(_asked(replica), given)

    async def find(self, replica: Replica) -> Source | None:
        """Find the files of the replica's model and compute their digest; return None if this machine has none."""
        directory = await self._find_directory(replica)
        if directory is None:
            return None
        source = await _in_thread(self._reading, directory, replica.engine, self._read, directory)
        if source is not None:
            _keep(self._last, _asked(replica), source)
        return source

    def new_pipeline(self, directory: Path | None, name: str | None = None) -> Pipeline:
        """Make a pipeline, which turns requests into token ids and block hashes, from the model's files in `directory`.

        Without a directory, the pipeline has no tokenizer, and prompts are matched as text.

        `name`: the model's name in error messages; None: the name of the operator's model. Raises ConfigError for a
        model that cannot be used.
        """
        name, size = name or self._name, self._settings.block_size or DEFAULT_BLOCK_SIZE
        try:
            made = Pipeline(directory, HASHED_AS, size, chat_template=self._settings.chat_template)
        except ModelError as error:
            raise ConfigError(f"model {name}: {error}") from None
        if directory is not None and made.tokenizer is None:
            log.warning("model %s: %s. Its prompts are matched as text", name, made.template_error)
        return made

    async def load(self, source: Source, name: str | None) -> Pipeline:
        """Load a pipeline from these files in a thread.

        Raises ConfigError if the files can never be used. Any other exception means a problem that may go away by
        itself. `name`: the model's name in error messages.
        """
        return await _in_thread(self.loading, source.directory, "", self.new_pipeline, source.directory, name)

    def _read(self, directory: Path | None) -> Source | None:
        return None if directory is None else Source(directory, contents(directory, self._settings.chat_template))

    async def _find_directory(self, replica: Replica) -> Path | None:
        if self._directory is not None:
            here, same = None, False
            if replica.root and not self._is_named(replica):
                look = _in_thread(self._reading, replica.root, replica.engine, _look, replica.root, self._directory)
                here, same = await look
            if same:
                if len(self._same) == MOST_KEPT:
                    self._same.clear()
                self._same.add(replica.root)
            # Another model that has no folder here gets the operator's files. If its engine makes other tokens from
            # prompts than these files do, the comparison with the engine rejects the files.
            return self._directory if self._is_owner(replica) else here or self._directory
        if not replica.models:
            return None
        asked = _asked(replica)
        if asked not in self._searches:
            _keep(self._searches, asked, asyncio.create_task(self._search(*asked, replica.engine)))
        search = self._searches[asked]
        try:
            return await asyncio.shield(search)
        except Exception:
            if self._searches.get(asked) is search:
                del self._searches[asked]  # it is made again
            raise

    async def _search(self, root: str | None, name: str, engine: str) -> Path | None:
        """Return the folder of a model that the settings do not name, or log that there is none and return None.

        The root (the path that the replica's engine reports) is tried first, though it may exist only on the replica's
        machine. Then the name that the replica serves is tried, though operators of engines choose that freely.
        """
        found = await _in_thread(self._reading, root, engine, folder_here, root) if root else None
        try:
            found = found or await _in_thread(self._searching, root or name, engine, model_dir, root, name)
        except ConfigError as error:
            log.error("no tokenizer: prompts of %s are matched as text. %s", name, error)
            return None
        log.info("tokenizer and chat template of %s from %s", name, found)
        return found

    def _is_owner(self, replica: Replica) -> bool:
        """Return whether this replica serves the model whose files the operator gave.

        That is the model with the name or folder from the settings. If no replica serves such a model, it is the first
        model seen, unless the gateway launches engines. The result is True for a replica that reports no models.
        """
        if not replica.models:
            return True
        names, certain = set(base_names(replica.models)), self._is_named(replica) or replica.root in self._same
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

    def _is_named(self, replica: Replica) -> bool:
        """Return whether the replica reports the operator's model by a name or folder that the settings give."""
        called = {self._settings.model, self._settings.served_model_name, self._name, self._directory.name}
        names = (self._settings.model, os.fspath(self._directory))
        return not called.isdisjoint(base_names(replica.models)) or (bool(replica.root) and replica.root in names)


def _keep(kept: dict[Any, T], key: object, value: T) -> None:
    """Set an entry and make it the newest; if there are 256 others (MOST_KEPT), remove the oldest."""
    kept.pop(key, None)
    if len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]
    kept[key] = value


def _asked(replica: Replica) -> tuple[str | None, str]:
    """Return the key of a search: the model root that the replica reports, and the first of its base models' names."""
    return replica.root, min(base_names(replica.models), default="")


def _look(root: str, directory: Path) -> tuple[Path | None, bool]:
    """Return the folder that an engine reports as its model's root, and whether that folder is `directory`.

    `root`: the path that the engine reports. The folder is None if this machine has no model there.
    """
    here = folder_here(root)
    return here, here is not None and here.resolve() == directory.resolve()


async def _in_thread(
    threads: FolderThreads, folder: Path | str, engine: str, function: Callable[..., T], *args: Path | str | None
) -> T:
    """Return the result of `function(*args)`, called in one of `threads`.

    `folder` and `engine`: the folder that the function reads, and the engine that names it. After a temporary system
    error (one of PASSING) the call is repeated, with growing pauses. Other errors are raised. An input/output error is
    raised too once the pauses are at their longest: a network mount usually recovers within a minute, and a bad disk
    never does.
    """
    pause = RETRY_SECONDS
    while True:
        try:
            return await threads.run(folder, engine, function, *args)
        except Exception as error:
            number = _refusal(error)
            if number is None or (number == errno.EIO and pause >= MOST_RETRY_SECONDS):
                raise
            log.warning("a model's files cannot be read now, which is tried again in %g s: %s", pause, error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MOST_RETRY_SECONDS)


def _refusal(error: BaseException | None) -> int | None:
    """Return the errno of a temporary system error (one of PASSING), or None for any other error.

    The error that is given and those that caused it are looked through.
    """
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno in PASSING:
        return error.errno
    return _refusal(error.__cause__ or error.__context__)
