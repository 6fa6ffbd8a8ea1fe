"""Tables of settings read from YAML: pydantic models whose errors about an unknown name list the known ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from replicas import yaml_text
from replicas.spelling import known_or_meant


class Table(BaseModel):
    """A table of settings with fixed names, read from YAML.

    The error for a setting without a value says what to write: the description of its pydantic field, if there is one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    may_be_empty: ClassVar[frozenset[str]] = frozenset()  # names that are ignored if they have no value

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Raise ValueError if `given` is no mapping, or has an unknown name or a name without a value.

        This runs before pydantic's own checks, so a misspelt name is not also reported as missing.
        """
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if not isinstance(given, Mapping):
            what = "it has no value" if given in (None, "") else f"{given!r} is not a table of names and values"
            raise ValueError(f"{what}; write {{{', '.join(f'{name}: ...' for name in [*fields][:2])}}}")
        for name, value in given.items():
            if name not in fields:
                raise ValueError(f"{str(name)[:100]!r} is an unknown setting{known_or_meant(str(name), fields)}")
            if value in (None, "") and name not in cls.may_be_empty:
                or_not = "" if fields[name].is_required() else ", or leave it out"
                raise ValueError(f"{name}: it has no value; write {fields[name].description or 'one'}{or_not}")
        return given


def explain(error: ValidationError) -> str:
    """Return all errors in one line, each after the path of names that leads to its value."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))}: {_wrong(item)}" if item["loc"] else _wrong(item)
        for item in error.errors(include_url=False)
    )


def _wrong(item: Mapping[str, Any]) -> str:
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    known = {"missing": "it is missing", "unexpected_keyword_argument": "it is unknown"}
    nothing = yaml_text.NO_VALUE if item["input"] is None else f"{item['msg']}, got {item['input']!r}"
    return known.get(item["type"], nothing)
