"""Limits on the work and memory that a chat template may use while it renders one conversation.

A template is a program from the model's folder, and short chats are rendered on the event loop, so one bad folder would
delay the clients of all other models. Every loop iteration, call, filter and operator reduces a budget, whose size
grows with the conversation. An operation that could produce something large is refused before it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import GeneratorType
from typing import Any

import jinja2
import jinja2.nodes as nodes
import jinja2.runtime
import jinja2.sandbox
from jinja2.utils import Namespace, pass_context

# The most characters of a template; the longest known one has 30,000.
MOST_CHARS = 1 << 20
# LEAST: the initial budget of a rendering, in bytes that may be read or made. It allows some 16,000 steps, which take
# 20 ms. Prices: STEP for a value, a call or a filter, NODE for each expression in the body of a loop or a macro.
LEAST, STEP, NODE = 2 << 20, 128, 8
ARGUMENT = 8  # the price of each byte of a filter's arguments, for each item of the list that is filtered
# For each byte of the conversation the budget grows by A_BYTE, plus 1 for each message, because some templates loop
# over all messages once for each message.
A_BYTE = 16
_MOST_BITS = 4096  # the most bits of an integer
_CONTAINERS = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))
# The expressions whose value Python hashes, as the type of the node that holds them and its field.
_HASHED = {(nodes.Pair, "key"), (nodes.Getitem, "arg")}
# Match a width of four or more digits, or one that an argument gives, in a format of `%` and in one of `str.format`.
_WIDE = {"%": re.compile(r"[%)][-+ #0.\d]*(?:\d{4}|\*)"), "format": re.compile(r"\{[^{}]*:[^{}]*(?:\d{4}|\{)")}
# Filters and methods that are refused. No known template uses them, and they may take time that grows with the square
# of their input, or make a text as long as an argument says.
_REFUSED = frozenset(
    """
    encode decode translate to_bytes fromkeys format_map striptags unescape urlize pprint xmlattr center ljust rjust
    zfill expandtabs wordwrap batch slice round
    """.split()
)
# Other filters and methods, whose result may be as large as the product of the sizes of their input and an argument.
_WIDENING = frozenset("replace indent tojson strftime strftime_now".split())
# Filters that look at a list's items, but not inside the items.
_SHALLOW = frozenset(
    "length count first last list map select reject selectattr rejectattr default d items reverse".split()
)
# Methods and filters that may compare each character of their input with each character of an argument, as CPython does
# to search from the end and to strip. A comparison costs an eighth of the price of a byte.
_COMPARING = frozenset("rfind rindex rsplit rpartition strip lstrip rstrip trim".split())
# Filters that look at an item only when their result is read.
_LAZY = frozenset("map select reject selectattr rejectattr".split())


class TemplateError(Exception):
    """Raised when the chat template refuses a conversation, fails on it, or exceeds its limits."""


class _Budget:
    """The budget of one rendering: the number of bytes that the template may still read or make.

    Each operation reduces the budget by its price. When nothing is left, TemplateError ends the rendering. The size of
    a container includes the sizes of its items; an item that occurs twice is counted twice.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        # By the id of a container: the container, which keeps the id from being reused, and its size.
        self._sizes: dict[int, tuple[Any, int]] = {}
        self.left = LEAST
        # The template variables, by whose size the budget grows; None once it has grown.
        self._given: Mapping[str, Any] | None = given

    def spend(self, cost: int) -> None:
        """Reduce the budget by `cost` bytes. Raises TemplateError if nothing is left."""
        self.left -= cost
        if self.left < 0:
            self._extend()

    def _extend(self) -> None:
        """Add the part of the budget that depends on the conversation's size, if it was not added yet.

        Most renderings never need it. Raises TemplateError if nothing of the budget is left.
        """
        if self._given is not None:
            given, self._given = self._given, None
            messages = given.get("messages")
            each = A_BYTE + (len(messages) if isinstance(messages, list) else 0)
            self.left += each * sum(map(self.size, given.values()))
        if self.left < 0:
            raise TemplateError("the chat template does or makes more than a conversation of this size may take")

    def fits(self, cost: int) -> None:
        """Raise TemplateError if an operation would cost more than is left; the budget is not reduced."""
        if cost > self.left:
            self.spend(cost)
            self.left += cost

    def made(self, value: Any) -> Any:
        """Reduce the budget by the size of a value that an operation has made, and return the value.

        Raises TemplateError if the value is too large for the budget, an integer of more than 4,096 bits, or a range of
        integers of more than 53 bits.
        """
        if type(value) is str:
            self.spend(len(value))
        elif isinstance(value, _CONTAINERS):
            self.spend(8 * len(value))
            self.fits(self.size(value))
        elif isinstance(value, int):
            self.check_bits(value.bit_length())
        elif isinstance(value, range) and max(abs(value.start), abs(value.stop)) >> 53:
            raise TemplateError("the chat template makes a range of integers of more than 53 bits")  # they hash alike
        else:
            self.spend(_length(value))
        return value

    @staticmethod
    def check_bits(bits: int) -> None:
        if bits > _MOST_BITS:
            raise TemplateError(f"the chat template makes an integer of more than {_MOST_BITS} bits")

    def read(self, *values: Any) -> None:
        """Reduce the budget by the cost of reading these values, including all that containers among them hold."""
        self.spend(STEP + sum(map(self.size, values)))

    def touch(self, *values: Any) -> None:
        """Reduce the budget by the cost of reading these values, without what containers among them hold."""
        self.spend(STEP + sum(map(_length, values)))

    def each(self, values: Iterable[Any], cost: int) -> Iterator[Any]:
        """Yield the values, and reduce the budget by `cost` for each one as it is taken."""
        for value in values:
            self.spend(cost)
            yield value

    def before(self, name: str, subject: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Raise TemplateError if calling a filter or method could exceed the budget, or if templates must not use it.

        `name`: the name of the filter or method; `subject`: the value that it is applied to; `args` and `named`: its
        other arguments. It is called before the filter or method runs. Some searches compare each character of the
        subject with each character of an argument. Their cost is taken off the budget here.
        """
        given = (*args, *named.values())
        if name in _REFUSED or (name == "sum" and any(isinstance(one, _CONTAINERS) for one in given)):  # joins lists
            raise TemplateError(f"the chat template uses {name}, which takes too long for some texts")
        if name in _WIDE and isinstance(subject, str) and _WIDE[name].search(subject):
            raise TemplateError("the chat template makes a text as wide as a number says")
        if name == "replace" and isinstance(subject, str) and len(args) > 1 and not named:
            self.fits(subject.count(str(args[0])) * _length(args[1]))
        elif name == "join":
            self.fits(_length(subject) * sum(map(_length, given)))
        elif name in _COMPARING:
            self.spend(_length(subject) * sum(map(_length, given)) // 8)
        elif name in _WIDENING:
            widest = max((abs(one) if isinstance(one, int) else _length(one) for one in given), default=0)
            self.fits((self.size(subject) if isinstance(subject, (str, *_CONTAINERS)) else widest) * widest)

    def size(self, value: Any) -> int:
        """Return the size of a value in bytes, including all that a container holds."""
        if type(value) is str:
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return _length(value)
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        size = STEP * (1 + len(value)) + sum(map(self.size, value))
        if isinstance(value, dict):
            size += sum(map(self.size, value.values()))
        self._sizes[id(value)] = value, size
        return size


def _length(value: Any) -> int:
    """Return the size of a value in bytes, without what a container holds."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return 8 * len(value) if isinstance(value, (*_CONTAINERS, range)) else 8


class _Context(jinja2.runtime.Context):
    """Jinja's context of one rendering, with the budget of the rendering."""

    def __init__(self, environment: Any, parent: dict[str, Any], *given: Any, **options: Any) -> None:
        super().__init__(environment, parent, *given, **options)
        self.budget = _Budget(parent)

    def derived(self, locals: dict[str, Any] | None = None) -> jinja2.runtime.Context:
        context = super().derived(locals)
        assert isinstance(context, _Context)
        context.budget = self.budget
        return context


class _Namespace(Namespace):
    def __repr__(self) -> str:  # namespaces that hold each other would recurse endlessly
        raise TemplateError("the chat template prints a namespace")


@pass_context
def _step(context: _Context, cost: int) -> bool:
    context.budget.spend(max(cost, 0))
    return True


@pass_context
def _looked_at(context: _Context, value: Any) -> Any:
    budget = context.budget
    budget.spend(STEP + (len(value) if type(value) is str else budget.size(value)))
    return value


@pass_context
def _made(context: _Context, value: Any) -> Any:
    return context.budget.made(value)


@pass_context
def _concat(context: _Context, values: list[Any]) -> str:
    context.budget.read(*values)
    join = jinja2.runtime.markup_join if context.eval_ctx.autoescape else jinja2.runtime.str_join
    return context.budget.made(join(values))


class Bounds(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A Jinja sandbox that ends a rendering with TemplateError when it exceeds a budget of work and memory.

    The budget grows with the size of the conversation.
    """

    context_class = _Context
    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        # Otherwise Jinja would compute constant expressions while it compiles, without a budget.
        self.optimized, self.finalize = False, _looked_at
        self.globals["namespace"] = _Namespace
        self.globals.pop("lipsum", None)
        for name, function in self.filters.items():
            self.filters[name] = _bounded(name, function)
        for name, function in self.tests.items():
            if name in ("in", "upper", "lower") or function.__module__ == "_operator":
                self.tests[name] = _bounded(name, function)
        # Filters that the changed syntax trees call; no template can spell their names.
        self.filters.update({"~": _concat, " looked at": _looked_at, " made": _made, " step": _step})

    def _generate(self, source: nodes.Template, *given: Any, **options: Any) -> str:
        _count(source)
        return super()._generate(source, *given, **options)

    def _parse(self, source: str, *given: Any) -> nodes.Template:
        if len(source) > MOST_CHARS:
            raise TemplateError(
                f"the chat template has {len(source)} characters, and is used with {MOST_CHARS} at most"
            )
        return super()._parse(source, *given)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call a function for a template, and reduce the budget for what the call reads and makes."""
        budget = context.budget
        named = {name: one for name, one in kwargs.items() if name[0] != "_"}  # without what Jinja adds to every call
        given = (*args, *named.values())
        if isinstance(function, (jinja2.runtime.Macro, jinja2.runtime.LoopContext)):
            budget.touch()
            budget.made(given)
            return super().call(context, function, *args, **kwargs)
        name = getattr(function, "__name__", "")
        subject = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if name == "join":
            args = given = tuple(list(one) if type(one) is GeneratorType else one for one in args)
        budget.before(name, subject, args, named)
        budget.touch(subject)
        budget.read(*given)
        return budget.made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an arithmetic operator for a template, and reduce the budget for what the operation reads and makes."""
        budget = context.budget
        if operator == "%" and isinstance(left, str):
            budget.before("%", left, right if isinstance(right, tuple) else (right,), {})
            budget.read(left, right)
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if not isinstance(one, int) and isinstance(times, int):
                    budget.fits(abs(times) * _length(one))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.check_bits(left.bit_length() * abs(right))
        return budget.made(self.binop_table[operator](left, right))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test of Jinja's so that it reduces the budget for what it reads and makes.

    `name`: the name of the filter or test.
    """
    wants = getattr(function, "jinja_pass_arg", None)
    wants = wants and wants.name
    kind = "%" if name == "format" else name  # the method of that name formats with braces

    @wraps(function)
    def bounded(context: _Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        if type(value) is GeneratorType and name not in _SHALLOW:
            value = list(value)
        budget.before(kind, value, args, kwargs)
        (budget.touch if name in _SHALLOW else budget.read)(value)
        given = (*args, *kwargs.values())
        if given:
            budget.read(*given)
        # An argument may be the path of an attribute, which Jinja looks up in each item.
        cost = STEP + ARGUMENT * sum(map(_length, given))
        if name in _LAZY and value:
            value = budget.each(value, cost)
        elif given and isinstance(value, _CONTAINERS):
            budget.spend(cost * len(value))
        first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        return budget.made(function(*first.get(wants, ()), value, *args, **kwargs))

    return pass_context(bounded)


def _count(node: nodes.Node) -> int:
    """Make a node of a template's syntax tree reduce the rendering's budget, and return its price for one run.

    The budget is the number of bytes that the rendering may still read or make; prices are in the same unit. The node
    is changed in place, with all nodes below it. Each loop, macro and block gets a step that takes the price of its
    body off the budget whenever the body runs. Expressions whose price depends on the size of their values are wrapped
    in a filter that takes it off (`_paying`).
    """
    cost = NODE
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            cost += _count(value)
            setattr(node, name, _paying(node, name, value))
        elif isinstance(value, list):
            for at, one in enumerate(value):
                if isinstance(one, nodes.Node):
                    cost += _count(one)
                    value[at] = _paying(node, name, one)
    if isinstance(node, nodes.TemplateData):
        cost += len(node.data)
    elif isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
        step = _filter(nodes.Const(STEP + cost), " step", node.lineno)
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        else:
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
    return cost


def _paying(parent: nodes.Node, field: str, node: nodes.Node) -> nodes.Node:
    """Return an expression wrapped in a filter that reduces the rendering's budget by the size of its value.

    `node`: the expression. `parent` and `field`: the node that holds it, and the name of its field there. The
    expression is returned unchanged if its price is constant, since the steps that `_count` adds already include it.
    """
    if isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "~", node.lineno)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _filter(node, " made", node.lineno)
    if isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and getattr(node, "ctx", "load") == "load":
        return _filter(node, " made", node.lineno)
    if isinstance(parent, nodes.Compare):  # comparing with a constant takes no longer for a longer value
        looked_at = any(one.op in ("in", "notin") for one in parent.ops)
    else:
        looked_at = isinstance(parent, nodes.Operand) or (type(parent), field) in _HASHED
    looked_at = looked_at and not isinstance(node, (nodes.Const, nodes.Slice, nodes.Operand))
    return _filter(node, " looked at", node.lineno) if looked_at else node


def _filter(node: nodes.Expr, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)
