"""The error for a wrong setting, and the words for the place where it was set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class ConfigError(Exception):
    """Raised for a wrong setting. The text says what is wrong, where, and what would be right; commands exit with 2."""

    def __init__(self, text: str, setting: str = ""):
        """Create the error.

        `text`: what is wrong, with one line for each fault. `setting`: the setting that all lines are about; "": the
        text itself says where each setting was set.
        """
        super().__init__(_each_line(setting, text) if setting else text)
        self.text, self.setting = text, setting

    def placed(self, sources: Mapping[str, str]) -> str:
        """Return the error's text, each line prefixed with the place where the setting was set.

        `sources`: where each setting was set, by the setting's name.
        """
        return _each_line(place_of(self.setting, sources), self.text) if self.setting else self.text


class UnusableFile(ConfigError):
    """Raised if a setting is right in itself, but the file or place that it names cannot be used."""


@contextmanager
def using_file(setting: str, path: object, remedy: str = "") -> Iterator[None]:
    """Return a context manager that turns an OSError or ValueError of its body into an UnusableFile.

    `setting`: the setting that names the file; `path`: the file; `remedy`: what to do, for the message. If the error
    has an attribute `setting`, the UnusableFile is about that setting instead.
    """
    try:
        yield
    except UnicodeDecodeError:
        raise UnusableFile(f"{path} cannot be used: it is not UTF-8 text. {remedy}".rstrip(), setting) from None
    except OSError as error:
        why = f"{path} cannot be used: {error.strerror or error}. {remedy}"
        raise UnusableFile(why.rstrip(), getattr(error, "setting", setting)) from None
    except ValueError as error:
        raise UnusableFile(f"{error}. {remedy}" if remedy else str(error), getattr(error, "setting", setting)) from None


def flag(name: str) -> str:
    """Return the command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def place_of(name: str, sources: Mapping[str, str]) -> str:
    """Return where a setting was set, including its name: `flag --port`, `file hitherto.yaml:3: port`."""
    source = sources.get(name, f"flag {flag(name)}")
    return source if source.startswith(("flag ", "environment ")) else f"{source}: {name}"


def _each_line(place: str, text: str) -> str:
    return "\n".join(f"{place}: {line}" for line in text.splitlines())
