"""The names of models that an engine serves; an adapter's has that of its base model."""

from collections.abc import Collection, Iterable, Mapping


def base_names(served: Mapping[str, str | None]) -> list[str]:
    """Return the names of the base model, in the engine's order."""
    return [name for name, parent in served.items() if parent is None]


def may_serve(model: str, told: Collection[str], required: str | None) -> bool:
    """Return whether a replica serves this model once it is ready, as far as is known.

    `told`: the names that it listed last; if there are none it may serve any. `required`: the one that it has to serve.
    """
    return required == model or (model in told if told else required is None)


def marks(names: Iterable[str], root: str | None) -> set[object]:
    """Return marks that engines of the same model have in common: names (adapters' too) and the model's root."""
    return {*names, ("root", root)} if root else {*names}


def count_models(marked: Iterable[Collection[object]]) -> int:
    """Return how many models engines with these marks have.

    Two engines have the same model if they share a mark, directly or through others.
    """
    groups: list[set[object]] = []
    for marks in marked:
        found = {*marks}
        for group in [one for one in groups if one & found]:
            groups.remove(group)
            found |= group
        groups.append(found)
    return len(groups)
