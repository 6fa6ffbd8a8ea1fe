"""The error of a wrong setting, and how messages name the place where it was set."""

from __future__ import annotations

from collections.abc import Mapping


class ConfigError(Exception):
    """A setting is wrong. The text says what, where and what would be right; exit code 2."""

    def __init__(self, text: str, setting: str = ""):
        """`setting`: the one that each line is about, where the text does not say where that was set."""
        super().__init__(_each_line(setting, text) if setting else text)
        self.text, self.setting = text, setting

    def placed(self, sources: Mapping[str, str]) -> str:
        """Return the text, each line with where the setting was set."""
        return _each_line(place_of(self.setting, sources), self.text) if self.setting else self.text


class UnusableFile(ConfigError):
    """The setting itself is right; the file or the place that it names cannot be used."""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def place_of(name: str, sources: Mapping[str, str]) -> str:
    """Return where a setting was set, with its name where that does not say it: `flag --port`, `file hitherto.yaml:3:
    port`."""
    source = sources.get(name, f"flag {flag(name)}")
    return source if source.startswith(("flag ", "environment ")) else f"{source}: {name}"


def _each_line(place: str, text: str) -> str:
    return "\n".join(f"{place}: {line}" for line in text.splitlines())
