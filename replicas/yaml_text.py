"""The reading of YAML that a person wrote; an error in it is raised as `NotYaml`, with the number of its line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

NO_VALUE = "it has no value; write one, or leave the field out"  # the message for a field of a profile

_MERGE = "tag:yaml.org,2002:merge"


class NotYaml(ValueError):
    """An error: the text is not valid YAML. `line` counts from 1."""

    def __init__(self, line: int, reason: str):
        super().__init__(f"line {line} is not YAML: {reason}")
        self.line, self.reason = line, reason


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # raises for 0xff... of more digits than Python writes, which no message could show
            return value
        except ValueError as error:  # from int(), str() or date(): the scalar only looks like a number or a date
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None
        except (LookupError, AttributeError):  # from PyYAML: the scalar does not fit its tag
            problem = f"{node.value!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; raise an error if a key occurs twice, where PyYAML would silently use the last value."""
        keys: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # PyYAML refuses all else
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in keys:
                    problem = f"{key.value!r} is there twice; keep one of them"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                keys.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


@contextmanager
def reading(text: str) -> Iterator[Loader]:
    """Open a YAML loader of this text for a `with` block; errors in the block are raised as NotYaml."""
    loader = None
    try:
        loader = Loader(text)
        yield loader
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        line = min(line, text.rstrip().count("\n") + 1)  # PyYAML marks the end of a text after its last line
        raise NotYaml(line, error.problem or str(error)) from None
    except yaml.reader.ReaderError as error:
        raise NotYaml(text.count("\n", 0, error.position) + 1, f"{error.reason}, here {error.character:#04x}") from None
    except RecursionError:
        raise NotYaml(1 if loader is None else loader.line + 1, "it is nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


def load(text: str) -> Any:
    """Return the content of a YAML text. Raises NotYaml."""
    with reading(text) as loader:
        return loader.get_single_data()
