"""What workers begin with in place of files that settings name: secrets as they were at the start, and copies of what
each gateway reads again by itself, made when it could last be used.

A worker in another one's place would find those files as they are by then. Its siblings go on with what they have read,
which may be another token, or keys from before an edit that went wrong; it would differ from them, or not start.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cachemap.background import Background

from ..config import Settings, read_secrets
from ..files import Copies, Followed, signatures, unblocked
from ..overload_fields import class_names
from ..tenants.key_file import MOST_BYTES
from ..tenants.keys import Keys
from ..tls import Certificate


class LastGood:
    """Of one supervisor. Raises ConfigError for a secret that is not in its file."""

    def __init__(self, settings: Settings):
        self.secrets = read_secrets(settings)
        self._files: dict[str, _Files] = {}
        if (keys := settings.api_keys) is not None:
            classes = class_names(settings.scheduler)
            self._files["api_keys"] = _Files([keys], lambda copies: Keys(keys, classes, copies))
        if (certificate := settings.tls_cert) is not None:
            others = settings.tls_key, settings.tls_client_ca
            self._files["tls"] = _Files(
                [certificate, *filter(None, others)], lambda copies: Certificate(certificate, *others, copies)
            )
        self._authorities = settings.replica_ca and _Files([settings.replica_ca])

    def follow(self, background: Background) -> list[asyncio.Task[None]]:
        return [background.spawn(f"copies for workers: {name}", one.follow) for name, one in self._files.items()]

    def settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """A worker's, which name a copy of the file that a gateway reads only once."""
        if not self._authorities or self._authorities.made is None:
            return settings
        (copy,) = self._authorities.made.copies.paths.values()
        return settings | {"replica_ca": str(copy)}

    def told(self) -> dict[str, Any]:
        """What `heard` reads, for a process that inherits the `descriptors` as they are now."""
        copies = {name: one.made.copies for name, one in self._files.items() if one.made is not None}
        return {
            "secrets": [*self.secrets],
            "copies": {
                name: {"paths": {str(of): str(copy) for of, copy in one.paths.items()}, "signatures": one.signatures}
                for name, one in copies.items()
            },
        }

    @property
    def descriptors(self) -> list[int]:
        return [number for one in self._all for number in (one.made.descriptors if one.made is not None else ())]

    def close(self) -> None:
        for one in self._all:
            one.close()

    @property
    def _all(self) -> list[_Files]:
        return [*self._files.values(), *([self._authorities] if self._authorities else [])]


def heard(told: dict[str, Any]) -> dict[str, Copies]:
    """The copies, by what they are for."""
    return {
        name: Copies(
            {Path(of): Path(copy) for of, copy in one["paths"].items()},
            [None if signature is None else tuple(signature) for signature in one["signatures"]],
        )
        for name, one in told.items()
    }


class _Made(NamedTuple):
    copies: Copies
    descriptors: list[int]


class _Files:
    """Some files that belong together. `check` raises ValueError for copies that cannot be used."""

    def __init__(self, paths: Sequence[Path], check: Callable[[Copies], object] = lambda copies: None):
        self._paths, self._check = paths, check
        self._files = Followed(paths)
        # Not checked: the settings were a moment ago. None: without a copy, workers say what is wrong with the file.
        self.made = self._copied()

    async def follow(self) -> None:
        await self._files.run(self._renew)

    async def _renew(self) -> None:
        if (made := await asyncio.to_thread(self._checked)) is not None:
            self.close()
            self.made = made

    def close(self) -> None:
        made, self.made = self.made, None
        if made is not None:
            _close(made.descriptors)

    def _checked(self) -> _Made | None:
        made = self._copied()
        if made is None:
            return None
        try:
            self._check(made.copies)
        except BaseException as error:
            _close(made.descriptors)
            if isinstance(error, ValueError):  # each worker says so
                return None
            raise
        return made

    def _copied(self) -> _Made | None:
        known, descriptors = signatures(self._paths), []
        try:
            descriptors += map(_copy, self._paths)
        except BaseException as error:
            _close(descriptors)
            if isinstance(error, OSError):
                return None
            raise
        paths = {path: Path(f"/proc/self/fd/{number}") for path, number in zip(self._paths, descriptors, strict=True)}
        return _Made(Copies(paths, known), descriptors)


def _copy(path: Path) -> int:
    """The descriptor of a copy in memory, cut where no file that is of use has so many bytes."""
    with open(path, "rb", opener=unblocked) as file:
        data = file.read(MOST_BYTES + 1) or b""
    number = os.memfd_create(path.name)
    try:
        with open(number, "wb", closefd=False) as copy:
            copy.write(data)
    except BaseException:
        os.close(number)
        raise
    return number


def _close(descriptors: Sequence[int]) -> None:
    for number in descriptors:
        os.close(number)
