"""Detection of whether a chat template takes a message's content as text or as a list of parts.

vLLM decides this from the template's source: a template that loops over a message's content gets parts, any other gets
text. The decision changes what the template prints, so the same loops are looked for here, on the same syntax tree.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def takes_parts(tree: nodes.Template, look_into_macros: bool = True, follow_namespaces: bool = True) -> bool:
    """Return whether vLLM gives the template message contents as lists of parts, because the template loops over them.

    `tree`: the template's syntax tree. `look_into_macros`: a loop over a macro's parameter counts if some call of the
    macro passes a message's content in it; if False, it counts if the parameter's name is "content".
    `follow_namespaces`: messages that the template puts into a namespace are recognized; if False, such a template gets
    texts. Versions of vLLM differ in both.
    """
    names = [*_aliases(tree, "messages", follow_namespaces)]
    if not follow_namespaces and any("." in name for name in names):
        return False
    # The loop variables that stand for one message.
    messages = [
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in names)
    ]
    macro_loops: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro) if look_into_macros else ():
        contents = _content_parameters(tree, macro, messages)
        macro_loops.update((id(loop), contents) for loop in macro.find_all(nodes.For))
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name, "content") for name in messages):
            return True
        if isinstance(loop.iter, nodes.Name):
            inside = macro_loops.get(id(loop))
            if loop.iter.name in inside if inside is not None else loop.iter.name == "content":
                return True
    return False


def _aliases(tree: nodes.Template, name: str, in_namespaces: bool) -> Iterator[str]:
    """Yield `name` and every variable that the template sets to its value, possibly filtered or sliced.

    A variable in a namespace is yielded as `namespace.variable`.
    """
    seen, queue = {name}, [name]
    while queue:
        current = queue.pop(0)
        yield current
        for assign in tree.find_all(nodes.Assign):
            found = [*_set_from(assign, current, in_namespaces)]
            queue += [one for one in found if one not in seen]
            seen.update(found)


def _set_from(assign: nodes.Assign, name: str, in_namespaces: bool) -> Iterator[str]:
    target, value = assign.target, assign.node
    if _reads(value, name):
        if isinstance(target, nodes.Name):
            yield target.name
        elif isinstance(target, nodes.NSRef):
            yield f"{target.name}.{target.attr}"
    elif (
        in_namespaces
        and isinstance(target, nodes.Name)
        and isinstance(value, nodes.Call)
        and _reads_name(value.node, "namespace")
    ):
        yield from (f"{target.name}.{one.key}" for one in value.kwargs if _reads(one.value, name))


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Return the parameters of a macro in which some call passes a message's content.

    `messages`: the names of the loop variables that stand for one message.
    """
    names = [argument.name for argument in macro.args]
    given: list[tuple[str, nodes.Expr]] = []
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given += zip(names, call.args, strict=False)
            given += [(one.key, one.value) for one in call.kwargs if one.key in names]
    return {name for name, value in given if any(_reads(value, one, "content") for one in messages)}


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Return whether an expression is the variable `name`, or its item `key`, possibly filtered, tested or sliced."""
    is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    if is_slice or isinstance(node, (nodes.Filter, nodes.Test)):
        return _reads(node.node, name, key)
    if key is None:
        return node is not None and _reads_name(node, name)
    if isinstance(node, nodes.Getitem):
        return _reads_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _reads_name(node.node, name) and node.attr == key


def _reads_name(node: nodes.Node, name: str) -> bool:
    base, _, attribute = name.rpartition(".")
    if base:
        return isinstance(node, nodes.Getattr) and node.attr == attribute and _reads_name(node.node, base)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
