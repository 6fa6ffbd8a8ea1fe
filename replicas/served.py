"""What an engine serves: names of models, each adapter's with that of its base model."""

from collections.abc import Mapping


def base_names(served: Mapping[str, str | None]) -> list[str]:
    """The names under which the base model is served, in the order in which the engine tells them."""
    return [name for name, parent in served.items() if parent is None]
