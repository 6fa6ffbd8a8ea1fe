"""The Jinja environment in which a template runs on stand-ins, strings that record what is done to them (`trace`).

It runs templates as the plain environment does, with one difference. Some operations could read a stand-in's characters
without calling its methods, because they run in C: `~`, `%`, `in`, JSON, joins, foreign functions. These go through a
function here, which records the operation or raises Untraceable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.nodes as nodes
import jinja2.runtime

from . import template as plain
from .trace import MARKER, Json, Text, Trace, Untraceable, holds_stand_in, raw_of

_BARE = "\ufdd2"  # stands before and after the marker of an object in dumped JSON, to find and remove the quotes there

# Filters that may get a stand-in, because they use only operations that it records.
_FILTERS = frozenset(
    """
    trim string length count default d upper lower capitalize join list first last items map select reject selectattr
    rejectattr attr reverse
    """.split()
)
# Filters of these that convert their input to text first, so that a list of parts becomes its repr.
_OF_TEXT = frozenset({"trim", "string", "upper", "lower", "capitalize"})
# Tests that may get a stand-in.
_TESTS = frozenset(
    """
    defined undefined none string mapping number integer float boolean true false callable eq equalto == ne != iterable
    sequence
    """.split()
)
_SURROUNDINGS = ("_loop_vars", "_block_vars")
# Filters that no traced template may use: their results vary, or they read a string's buffer.
_NEVER = frozenset({"random", "urlize", "pprint", "xmlattr"})


class TracingEnvironment(plain.Sandbox):
    """The Jinja sandbox in which every operation on stand-ins for texts is recorded in `trace`.

    `trace`: the record of the run in progress; `concat`: the function by which Jinja joins the output of each block and
    macro.
    """

    trace = Trace([])  # without texts while no template runs

    def __init__(self, clock: plain.Clock) -> None:
        super().__init__(clock)
        self._clock = clock
        self.concat = self._lifting_concat  # type: ignore[method-assign]
        self.globals["strftime_now"] = self._strftime_now
        self.globals.pop("lipsum", None)
        self.filters = {name: self._filter(name, function) for name, function in self.filters.items()}
        self.filters.update(
            tojson=self._tojson,
            replace=self._replace,
            traced_concat=self._lifting_concat,
            traced_in=self._in,
            traced_mod=self._mod,
        )
        self.tests = {name: self._test(name, function) for name, function in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _rewrite(super()._parse(source, name, filename))

    # joining

    def _lifting_concat(self, pieces: Any) -> str:
        return self._lift("".join(map(str, pieces)))

    def _lift(self, value: Any) -> Any:
        return self.trace.lift(value) if type(value) is str else value

    # calls

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call a function for a template. Raises Untraceable for one that could read a stand-in unrecorded."""
        # Jinja adds the variables of the surrounding loop and block to the arguments of every call, for functions that
        # take the context.
        named = [given for name, given in kwargs.items() if name not in _SURROUNDINGS]
        if holds_stand_in(args) or holds_stand_in(named):
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "a function")
            follows = (type(owner) is str and name == "join") or (isinstance(owner, dict) and name == "get")
            if not (
                follows or isinstance(function, jinja2.runtime.Macro) or function in (jinja2.utils.Namespace, dict)
            ):
                raise Untraceable(f"{name} called with a text")
        return self._lift(super().call(context, function, *args, **kwargs))

    def _strftime_now(self, pattern: str) -> str:
        return self.trace.ask("clock", "", (self._clock, pattern), self._clock.strftime_now(pattern))

    # filters and tests

    def _filter(self, name: str, function: Any) -> Any:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if name in _NEVER or (name not in _FILTERS and (holds_stand_in(args) or holds_stand_in(kwargs))):
                raise Untraceable(f"filter {name}")
            if name in _OF_TEXT and isinstance(args[0], (list, tuple, dict)) and holds_stand_in(args[0]):
                args = (self._lift(str(args[0])), *args[1:])
            return self._lift(function(*args, **kwargs))

        return _same_calling(function, guarded)

    def _test(self, name: str, function: Any) -> Any:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if isinstance(args[-1] if name == "in" else None, str) and holds_stand_in(args[:-1]):
                raise Untraceable("'in' with two texts")
            # These tests are true for every string and every object. For a list of parts they do not look at the texts.
            if name in ("iterable", "sequence") and isinstance(args[-1], (Text, Json)):
                return True
            if name not in _TESTS and name != "in" and (holds_stand_in(args) or holds_stand_in(kwargs)):
                raise Untraceable(f"test {name}")
            return function(*args, **kwargs)

        return _same_calling(function, guarded)

    def _in(self, part: Any, whole: Any) -> bool:
        if isinstance(part, (Text, Json)) and isinstance(whole, (str, Mapping)):
            raise Untraceable("'in' with two texts")
        return part in whole

    def _mod(self, left: Any, right: Any) -> Any:
        if holds_stand_in(left) or holds_stand_in(right):
            raise Untraceable("%")
        return left % right

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
        if holds_stand_in((old, new)) or not isinstance(text, str):
            raise Untraceable("replace")
        return text.replace(old, new, -1 if count is None else count)

    def _tojson(self, value: Any, *positional: Any, **options: Any) -> str:
        if not holds_stand_in(value):
            return plain.tojson(value, *positional, **options)
        options.update(zip(("ensure_ascii", "indent", "separators", "sort_keys"), positional))
        if options.get("ensure_ascii"):
            raise Untraceable("tojson(ensure_ascii)")
        if isinstance(value, Json):
            return self._json(value, options)
        if options.get("indent") is not None:
            raise Untraceable("tojson(indent) of an object with texts in it")
        dumped = plain.tojson(self._escaped(value, options), **options)
        return self._lift(dumped.replace(f'"{_BARE}', "").replace(f'{_BARE}"', ""))

    def _json(self, value: Json, options: dict[str, Any]) -> Text:
        dumped = plain.tojson(value._value, **options)
        return self.trace.derive("json", value._raw, (tuple(options.items()),), dumped)

    def _inner(self, marker: str) -> Text:
        """Return a stand-in for a marker's text as JSON writes it inside a string, without the quotes around it."""
        dumped = json.dumps(self.trace.fill(marker), ensure_ascii=False)[1:-1]
        return self.trace.derive("json_inner", marker, (), dumped)

    def _escaped(self, value: Any, options: dict[str, Any]) -> Any:
        """Return a copy of a JSON value in which each stand-in is a plain string that may be dumped as JSON.

        Each marker is replaced by a marker for the JSON form of its text. JSON escapes character by character, so the
        literals in a stand-in may be escaped separately from these texts. The marker of an object stands between two
        `_BARE` characters, by which the quotes around it are found and removed after dumping. `options`: the arguments
        of `tojson`.
        """
        if isinstance(value, Text):
            return MARKER.sub(lambda found: raw_of(self._inner(found[0])), raw_of(value))
        if isinstance(value, Json):
            return f"{_BARE}{raw_of(self._json(value, options))}{_BARE}"
        if isinstance(value, dict):
            return {key: self._escaped(item, options) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._escaped(item, options) for item in value]
        return value


def _same_calling(function: Any, guarded: Any) -> Any:
    """Copy Jinja's marks from a filter or test to the function that wraps it, and return the wrapping function.

    The marks say what Jinja passes as the first argument (the context or the environment). `function`: the filter or
    test. `guarded`: the function that wraps it.
    """
    for attribute in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, attribute):
            setattr(guarded, attribute, getattr(function, attribute))
    return guarded


def _rewrite(node: Any) -> Any:
    """Return a template's syntax tree with the operators `~`, `%` and `in` replaced by filters of the environment.

    The tree is changed in place. Raises Untraceable for a chained comparison with `in`.
    """
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _rewrite(value))
        elif isinstance(value, list):
            setattr(node, name, [_rewrite(item) if isinstance(item, nodes.Node) else item for item in value])
    line = node.lineno
    if isinstance(node, nodes.Concat):
        return _through("traced_concat", nodes.List(node.nodes, lineno=line), [], line)
    if isinstance(node, nodes.Mod):
        return _through("traced_mod", node.left, [node.right], line)
    if isinstance(node, nodes.Compare) and any(operand.op in ("in", "notin") for operand in node.ops):
        if len(node.ops) > 1:
            raise Untraceable("chained comparison with 'in'")
        found = _through("traced_in", node.expr, [node.ops[0].expr], line)
        return found if node.ops[0].op == "in" else nodes.Not(found, lineno=line)
    return node


def _through(name: str, first: Any, rest: list[Any], line: int) -> nodes.Filter:
    return nodes.Filter(first, name, rest, [], None, None, lineno=line)
