"""What an engine serves: names of models, each adapter's with that of its base model."""

from collections.abc import Collection, Iterable, Mapping


def base_names(served: Mapping[str, str | None]) -> list[str]:
    """The names under which the base model is served, in the order in which the engine tells them."""
    return [name for name, parent in served.items() if parent is None]


def may_serve(model: str, told: Collection[str], required: str | None) -> bool:
    """Whether a replica serves this model once it is ready, as far as is known. `told`: the names that it told last, of
    which it may serve any while there are none; `required`: the one that it has to serve."""
    return required == model or (model in told if told else required is None)


def marks(names: Iterable[str], root: str | None) -> set[object]:
    """What an engine has in common with others of its model: names that it serves, adapters' included, or what it was
    started from."""
    return {*names, ("root", root)} if root else {*names}


def count_models(marked: Iterable[Collection[object]]) -> int:
    """How many models engines with these marks are of. Two are of one model where they share a mark, or where others
    connect them that do."""
    groups: list[set[object]] = []
    for marks in marked:
        found = {*marks}
        for group in [one for one in groups if one & found]:
            groups.remove(group)
            found |= group
        groups.append(found)
    return len(groups)
