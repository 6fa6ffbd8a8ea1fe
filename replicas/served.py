"""The names of the models and adapters that an engine serves."""

from collections.abc import Collection, Iterable, Mapping


def base_names(served: Mapping[str, str | None]) -> list[str]:
    """Return the names of the base model, in the engine's order.

    `served`: maps each name to None, or, if it is an adapter's, to the name of its base model.
    """
    return [name for name, parent in served.items() if parent is None]


def may_serve(model: str, told: Collection[str], required: str | None) -> bool:
    """Return whether a replica probably serves this model once it is ready.

    `told`: the names that the replica listed last; empty if unknown. `required`: the name that it has to serve to
    become ready, or None.
    """
    return required == model or (model in told if told else required is None)


def marks(names: Iterable[str], root: str | None) -> set[object]:
    """Return an engine's marks; two engines that share a mark serve the same model.

    The marks are all names that the engine serves, adapters' too, and the root of its model.

    `root`: the folder or hub name that the model was loaded from.
    """
    return {*names, ("root", root)} if root else {*names}


def count_models(marked: Iterable[Collection[object]]) -> int:
    """Return how many different models some engines serve; `marked`: the `marks` of each engine.

    Two engines serve the same model if they share a mark, or if each shares one with a third engine, and so on.
    """
    groups: list[set[object]] = []
    for marks in marked:
        found = {*marks}
        for group in [one for one in groups if one & found]:
            groups.remove(group)
            found |= group
        groups.append(found)
    return len(groups)
