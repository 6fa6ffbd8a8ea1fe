"""The names of the models and adapters that an engine serves."""

from collections.abc import Collection, Iterable, Mapping


def base_names(served: Mapping[str, str | None]) -> list[str]:
    """Return the names of the base model, without those of adapters, in the engine's order.

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
    """Return the marks of an engine's model: all names that it serves, also of adapters, and the model's root.

    Two engines that share a mark serve the same model. `root`: the folder or hub name that the model was loaded from.
    """
    return {*names, ("root", root)} if root else {*names}


def count_models(marked: Iterable[Collection[object]]) -> int:
    """Return how many different models some engines serve; `marked`: the `marks` of each engine.

    Engines that share a mark serve the same model. So do engines that are linked by a chain of others that share marks.
    """
    groups: list[set[object]] = []
    for marks in marked:
        found = {*marks}
        for group in [one for one in groups if one & found]:
            groups.remove(group)
            found |= group
        groups.append(found)
    return len(groups)
