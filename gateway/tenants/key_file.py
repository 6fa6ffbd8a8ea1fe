"""The file of API keys: its format, and functions that read it and add to it.

A YAML list with one mapping for each tenant, or the same mappings as JSON, one a line:

    - {name: team-a, sha256: 9f86d081..., models: [qwen3-8b], class: premium}

The file holds SHA-256 hashes and never a key. A slow hash (bcrypt, Argon2) is needed for passwords, which can be
guessed. A key made here has 256 random bits, which nobody can guess at any speed, and its hash is computed for every
request.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from replicas import yaml_text
from replicas.spelling import known_or_meant

from ..files import regular
from ..validation import wanted
from .limits import Limits
from .tenant import Tenant

PREFIX = "sk-hitherto-"  # of new keys, by which scanners of source code recognise a leaked key
KEY_BYTES, SALT_BYTES = 32, 24  # random bytes in a key, and in a salt
MOST_BYTES = 16 * 2**20  # of a key file: 50,000 tenants
REMEDY = "`hitherto key new NAME` makes a key and prints its line"
# For error messages: what belongs into each field of text.
_NAME = "a name of 1 to 64 letters, digits, '.', '_' and '-'"
_BELONGS = {
    "name": _NAME,
    "class": _NAME,
    "sha256": f"the SHA-256 hash of a key, 64 hexadecimal digits in quotes, or a list of up to 16. {REMEDY}",
    "models": "the name of a model, or a list of them; leave it out to allow all",
    "cache_salt": "16 to 128 letters, digits, '_' and '-', as `hitherto key new NAME --own-cache` makes",
}


class KeyFileError(ValueError):
    """Raised for a key file that cannot be used. The text says where the mistake is, and what would be right."""


def new_key() -> str:
    """Return a new random API key."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def new_salt() -> str:
    """Return a new random `cache_salt`, which keeps a tenant's KV cache blocks apart from those of other tenants."""
    return secrets.token_urlsafe(SALT_BYTES)


def digest(key: str) -> bytes:
    """Return the SHA-256 hash of a key (32 bytes)."""
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
Salt = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,128}$")]
Model = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1, le=10**14)]


class _Entry(BaseModel):
    """One tenant's entry in the key file, without its limits; `Entry` adds a field for each limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)

    name: Name
    sha256: Annotated[tuple[Hash, ...], BeforeValidator(_as_list), Field(min_length=1, max_length=16)]
    models: Annotated[tuple[Model, ...], BeforeValidator(_as_list), Field(min_length=1, max_length=1000)] | None = None
    qos_class: Name | None = Field(None, alias="class")
    cache_salt: Salt | None = None

    def tenant(self) -> Tenant:
        limits = Limits(*(getattr(self, name) for name in Limits._fields))
        models = frozenset(self.models) if self.models is not None else None
        return Tenant(self.name, self.qos_class, models, limits if any(limits) else None, self.cache_salt)

    def plain(self) -> dict[str, Any]:
        plain = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        plain["sha256"] = plain["sha256"][0] if len(plain["sha256"]) == 1 else plain["sha256"]
        return plain

    def line(self) -> str:
        """Return the entry as one line of YAML, as the key file has it."""
        return "- " + yaml.safe_dump(self.plain(), default_flow_style=True, sort_keys=False, width=10_000).strip()


# A tenant's entry in the file.
Entry = create_model("Entry", __base__=_Entry, **dict.fromkeys(Limits._fields, (Count | None, None)))

FIELDS = [field.alias or name for name, field in Entry.model_fields.items()]


def read(path: Path, classes: Collection[str] = ()) -> dict[bytes, Tenant]:
    """Return the tenants in the key file at `path`, by the hashes of their keys.

    `classes`: the names of the configured priority classes. If there are any, a tenant with another class is an error.
    Raises KeyFileError for a file that cannot be read or used.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise KeyFileError(f"{path} has more than {MOST_BYTES >> 20} MiB, so it is taken for another file")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror or error}. {REMEDY}") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"{path} cannot be read: it is not UTF-8 text. {REMEDY}") from None
    return _tenants(path, text, classes)


def _tenants(path: Path, text: str, classes: Collection[str]) -> dict[bytes, Tenant]:
    found: dict[bytes, Tenant] = {}
    lines: dict[str | bytes, int] = {}  # the line of each name and each hash
    for line, given in _entries(path, text):
        entry = _entry(path, line, given)
        if classes and entry.qos_class not in (None, *classes):
            raise KeyFileError(
                f"{path}:{line}: class: there is no class {entry.qos_class!r} in scheduler.qos_classes. Known: {', '.join(classes)}"
            )
        hashes = [bytes.fromhex(one) for one in entry.sha256]
        for what, known in ((f"the name {entry.name!r}", entry.name), *(("this hash", one) for one in hashes)):
            if known in lines:
                raise KeyFileError(
                    f"{path}:{line}: {what} stands on line {lines[known]} already. "
                    "A tenant has one entry; several keys of it are a list: sha256: [HASH, HASH]"
                )
            lines[known] = line
        found.update(dict.fromkeys(hashes, entry.tenant()))
    if not found:
        raise KeyFileError(f"{path} holds no key, so nobody could ask anything. {REMEDY}")
    return found


def add(path: Path, entry: Entry) -> None:
    """Add a tenant to the key file at `path`. A missing file is created, readable by its owner alone.

    The file is locked, so other processes that add to it wait. The line is appended in one write, so a gateway that
    watches the file never reads half of it. Raises KeyFileError, also if the result would not be a valid key file.
    """
    try:
        with open(path, "a+b", buffering=0, opener=regular) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            before = file.read().decode("utf-8-sig")
            line = json.dumps(entry.plain()) if before.lstrip().startswith("{") else entry.line()
            added = "\n" * (before[-1:] not in ("", "\n")) + line + "\n"
            _tenants(path, before + added, ())
            size = file.tell()
            if file.write(added.encode()) < len(added.encode()):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KeyFileError(f"{path} cannot be added to: {reason}. Give a file that may be written") from None


def _entries(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield for each tenant its line number, counted from 1, and its parsed entry. Raises KeyFileError."""
    if text.lstrip().startswith("{"):
        for line, one in enumerate(text.splitlines(), 1):
            if one.strip():
                try:
                    yield line, json.loads(one)
                except (ValueError, RecursionError) as error:
                    raise KeyFileError(f"{path}:{line}: not JSON: {error}. Each line is one tenant's object") from None
        return
    try:
        with yaml_text.reading(text) as loader:
            root = loader.get_single_node()
            if root is None:
                return
            if not isinstance(root, yaml.SequenceNode):
                raise KeyFileError(
                    f"{path}:{root.start_mark.line + 1}: expected a list of tenants, found a {root.id}. {REMEDY}"
                )
            for node in root.value:
                yield node.start_mark.line + 1, loader.construct_object(node, deep=True)
    except yaml_text.NotYaml as error:
        raise KeyFileError(
            f"{path}:{error.line}: not YAML: {error.reason}. Check quotes and indentation there"
        ) from None


def _entry(path: Path, line: int, given: Any) -> Entry:
    if not isinstance(given, dict):
        raise KeyFileError(f"{path}:{line}: expected a mapping like {{name: ..., sha256: ...}}. {REMEDY}")
    try:
        return Entry.model_validate(given)
    except ValidationError as error:
        item = error.errors()[0]
        name = str(item["loc"][0])
        raise KeyFileError(f"{path}:{line}: {name}: {what_is_wrong(name, item)}") from None


def what_is_wrong(name: str, item: Any) -> str:
    """Return a message on what is wrong with the field `name` of an entry.

    `item`: pydantic's error for the field. The message does not show the field's value if that may be a key.
    """
    if item["type"] == "extra_forbidden":
        if name in ("key", "api_key", "token", "secret"):
            return f"no key stands here, only its hash as sha256. {REMEDY}; whoever read this file knows this one"
        return f"unknown field{known_or_meant(name, FIELDS)}"
    belongs = _BELONGS.get(name) or wanted(item)
    if item["type"] == "missing" or name in ("sha256", "cache_salt"):
        return f"is missing or wrong: it must be {belongs}"
    given = "an empty value" if item["input"] in (None, "", [], ()) else repr(str(item["input"])[:100])
    return f"{given} is not {belongs}"
