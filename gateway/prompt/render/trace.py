"""Traces of a chat template: records of one run in which stand-ins for the texts note what the template does to them.

A template is a program over the conversation. Here it runs on stand-ins, which behave like the real texts. Printing a
stand-in leaves a *marker* in the output. Every question that the template asks about a text (is it empty? does it
contain '</think>'?) is recorded with its answer. The result is a list of literal strings and markers, and a list of
questions.

The result holds for other conversations, because the template is deterministic. Another conversation of the same shape
whose texts give the same answers takes the same path through the program, and prints the same literals around its own
texts. An operation that a stand-in can't record (looping over its characters, using it as a key, passing it to code
that reads its buffer) raises Untraceable, and the caller renders by plain Jinja.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import contains
from typing import Any, NamedTuple

from . import template as plain

# A marker is a number between two code points that Unicode reserves as non-characters, so no text has them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARKER = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class Slot(NamedTuple):
    """A reference to one text of the conversation, by its index in the list of all its texts."""

    index: int


class Pair(NamedTuple):
    """The two operands of a comparison."""

    left: tuple
    right: tuple


# How a text in the output is computed from the conversation's texts: a Slot, or a tuple (method, operand, args, index).
# Such a tuple stands for the result of calling `method(*args)` on the operand or, if `index` is not None, for the item
# of the result with that index. An operand is a tuple of literals and expressions, which are joined. While the template
# runs, it is a string with markers in it instead, which `expand` resolves.
Expression = tuple
# A question that the template asked: (method, operand, args, answer)
Question = tuple
# A question about one text in executable form: the function to call with the text, its further arguments, the answer
Check = tuple[Callable[..., Any], tuple, Any]


class Untraceable(Exception):
    """Raised when the template does something with a text that can't be recorded."""


class Trace:
    """The record of one run of a template on stand-ins: strings in place of the conversation's texts.

    A stand-in's characters are literals and *markers* (numbers between reserved characters), each of which stands for a
    text. The methods' `raw` strings are such characters, as the template handles them.

    `slots`: the texts of the conversation. `expressions`: by marker number, how the marker's text is computed from
    them. `questions`: what the template asked about the texts, with the answers.
    """

    def __init__(self, slots: Sequence[Any]) -> None:
        self.slots = slots
        self.expressions: list[Expression] = []
        self.questions: list[Question] = []

    def slot(self, index: int) -> Text | Json:
        """Return a stand-in for the conversation's text (or tool-call arguments) with this index."""
        raw = self._mark(Slot(index))
        value = self.slots[index]
        return Text(raw, value, self) if isinstance(value, str) else Json(raw, value, self)

    def derive(self, method: str, raw: str, args: tuple, value: str, index: int | None = None) -> Text:
        """Return a stand-in for the result of a string method, such as `strip`, that the template calls on a stand-in.

        `method` and `args`: the method and its arguments. `raw`: the characters of the stand-in that it is called on,
        literals and markers. `index`: the position of the result's item to stand for, if the method returns several, as
        `split` does; else None. `value`: the text that the new stand-in stands for in the traced conversation.
        """
        return Text(self._mark((method, raw, args, index)), value, self)

    def lift(self, raw: str) -> str:
        """Make a recording stand-in again of a string that Jinja has made of stand-ins, for example by joining them.

        `raw`: the string. Its markers (numbers between reserved characters) each stand for a text of the conversation.
        A string without markers is returned unchanged, since it depends on no text.
        """
        if type(raw) is str and OPEN in raw:
            return Text(raw, self.fill(raw), self)
        return raw

    def fill(self, raw: str) -> str:
        """Return `raw` with its markers replaced by the texts of the traced conversation that they stand for.

        `raw`: a string of literals and markers.
        """
        return text_of(self._operand(raw), self.slots)

    def ask(self, method: str, raw: str, args: tuple, answer: Any) -> Any:
        """Record a question that the template asks about a text, and return its answer.

        `method` and `args`: the question, for example the string method `startswith` and its arguments. `raw`: the
        literals and markers that stand for the text. `answer`: the answer for the traced conversation.
        """
        self.questions.append((method, raw, args, answer))
        return answer

    def expand(self, number: int) -> Expression:
        """Return the expression that says how the text of a marker is computed from the conversation's texts.

        `number`: the marker's number. Markers inside the expression are replaced by their own expressions.
        """
        expression = self.expressions[number]
        return expression if isinstance(expression, Slot) else self.expand_question(expression)

    def expand_question(self, question: Question) -> Question:
        """Return a question (or expression) with the markers in its operand replaced by their expressions."""
        method, raw, *rest = question
        return (method, self._operand(raw), *rest)

    def _operand(self, raw: str | tuple) -> tuple:
        if isinstance(raw, tuple):
            return Pair(*map(self._operand, raw))
        pieces = MARKER.split(raw)
        return tuple(self.expand(int(piece)) if i % 2 else piece for i, piece in enumerate(pieces) if i % 2 or piece)

    def _mark(self, expression: Expression) -> str:
        self.expressions.append(expression)
        return f"{OPEN}{len(self.expressions) - 1}{CLOSE}"


def evaluate(expression: Expression, slots: Sequence[Any]) -> Any:
    """Return the value of an expression for the texts `slots` of a conversation.

    An expression says how a text in a template's output is computed from the conversation's texts.
    """
    if type(expression) is Slot:
        return slots[expression.index]
    method, operand, args, index = expression
    result = apply(method, _value(operand, slots), args)
    return result if index is None else result[index]


def text_of(operand: tuple, slots: Sequence[Any]) -> str:
    """Return the text that an operand stands for in a conversation with the texts `slots`.

    `operand`: a tuple of literals and of expressions, which say how a text is computed from the conversation's texts.
    """
    return "".join([piece if type(piece) is str else str(evaluate(piece, slots)) for piece in operand])


def check_of(question: Question) -> Check:
    """Return a template's question about a text in executable form: a function, its arguments, the expected answer.

    The question must be about one text only, which it calls slot 0.
    """
    method, operand, args, answer = question
    if operand == (Slot(0),):
        return _OWN.get(method) or getattr(str, method), args, answer
    return lambda text, *args: apply(method, _value(operand, [text]), args), args, answer


def hold(checks: Iterable[Check], text: str) -> bool:
    """Return whether a text gives the expected answers to a template's questions about it."""
    try:
        for ask, args, answer in checks:
            if ask(text, *args) != answer:
                return False
    except (IndexError, ValueError):  # an item or a substring that this text does not have
        return False
    return True


def answered(question: Question, slots: Sequence[Any]) -> bool:
    """Return whether the texts `slots` of a conversation give the expected answer to a template's question."""
    method, operand, args, answer = question
    try:
        return apply(method, _value(operand, slots), args) == answer
    except (IndexError, ValueError):  # an item or a substring that this text does not have
        return False


def slots_in(value: Any) -> set[int]:
    """Return the indices of the conversation's texts to which a question or an expression refers."""
    if isinstance(value, Slot):
        return {value.index}
    if not isinstance(value, tuple):
        return set()
    return set().union(*map(slots_in, value))


def _value(operand: tuple, slots: Sequence[Any]) -> Any:
    if type(operand) is Pair:
        return _value(operand.left, slots), _value(operand.right, slots)
    if len(operand) == 1 and type(operand[0]) is not str:  # no text to join, so a JSON object stays an object
        return evaluate(operand[0], slots)
    return text_of(operand, slots)


def apply(method: str, operand: Any, args: tuple) -> Any:
    """Return the answer to a question about a text, or the result of transforming the text, as in a template.

    `method`: the name of a method of str, or of another operation in `_OWN`, such as "len"; `operand`: the value that
    it is applied to, usually the text; `args`: its further arguments.
    """
    own = _OWN.get(method)
    return own(operand, *args) if own else getattr(operand, method)(*args)


_OWN: dict[str, Callable[..., Any]] = {
    "bool": bool,
    "len": len,
    "contains": contains,
    "count_of": lambda text, method, args: len(getattr(text, method)(*args)),
    "same": lambda pair: pair[0] == pair[1],
    "slice": lambda text, start, stop, step: text[start:stop:step],
    "json": lambda value, options: plain.tojson(value, **dict(options)),
    "json_inner": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "str": str,
    "repr": repr,
    "clock": lambda _, clock, pattern: clock.strftime_now(pattern),
}

# Methods that a template may call on a stand-in. The result is a stand-in for a text, a list of such stand-ins, or a
# recorded answer.
_FOLLOWED = tuple(
    """
    strip lstrip rstrip upper lower title capitalize casefold swapcase replace removeprefix removesuffix startswith
    endswith find rfind index rindex count isdigit isalpha isalnum isspace isupper islower istitle isnumeric isdecimal
    isascii isidentifier isprintable split rsplit splitlines partition rpartition zfill ljust rjust center expandtabs
    """.split()
)
_LOST = tuple(
    """
    join format format_map encode translate maketrans __mod__ __rmod__ __mul__ __rmul__ __hash__ __iter__ __format__
    __reversed__
    """.split()
)


class Text(str):
    """A stand-in for a text in a traced run of a template, which records what the template does with the text.

    Its characters are literals and markers; `_value` is the text that they stand for.
    """

    __slots__ = ("_value", "_trace")

    def __new__(cls, raw: str, value: str, trace: Trace) -> Text:
        self = super().__new__(cls, raw)
        self._value = value
        self._trace = trace
        return self

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        """Return a stand-in for the text's repr, which is printed if a template prints a list of texts.

        The repr has a marker of its own, because its quotes and escapes depend on the text as a whole.
        """
        return self._trace.derive("repr", raw_of(self), (), repr(self._value))

    def __add__(self, other: Any) -> Text:
        if not isinstance(other, str):
            return NotImplemented
        return Text(raw_of(self) + raw_of(other), self._value + value_of(other), self._trace)

    def __radd__(self, other: str) -> Text:
        return Text(other + raw_of(self), other + self._value, self._trace)

    def __bool__(self) -> bool:
        return self._trace.ask("bool", raw_of(self), (), bool(self._value))

    def __len__(self) -> int:
        return self._trace.ask("len", raw_of(self), (), len(self._value))

    def __contains__(self, part: Any) -> bool:
        if not isinstance(part, str) or isinstance(part, Text):
            raise Untraceable("'in' with two texts")
        return self._trace.ask("contains", raw_of(self), (part,), part in self._value)

    def __getitem__(self, key: Any) -> Text:
        if isinstance(key, slice):
            args = (key.start, key.stop, key.step)
            return self._trace.derive("slice", raw_of(self), args, self._value[key])
        if not isinstance(key, int):
            raise TypeError("string indices must be integers")
        if not -len(self._value) <= key < len(self._value):
            raise Untraceable("index beyond the text")
        return self._trace.derive("__getitem__", raw_of(self), (key,), self._value[key])


def _follow(name: str) -> Callable[..., Any]:
    def method(self: Text, *args: Any, **kwargs: Any) -> Any:
        if kwargs or any(isinstance(arg, (Text, Json)) for arg in args):
            raise Untraceable(f"str.{name} with such arguments")
        raw, trace = raw_of(self), self._trace
        result = getattr(self._value, name)(*args)
        if isinstance(result, str):
            return trace.derive(name, raw, args, result)
        if isinstance(result, (list, tuple)):
            trace.ask("count_of", raw, (name, args), len(result))
            return [trace.derive(name, raw, args, item, i) for i, item in enumerate(result)]
        return trace.ask(name, raw, args, result)

    return method


def _compare(name: str) -> Callable[..., Any]:
    def method(self: Text, other: Any) -> Any:
        if not isinstance(other, str):
            return getattr(str, name)("", other)  # NotImplemented, as for every text
        if isinstance(other, Text):
            if name not in ("__eq__", "__ne__"):
                raise Untraceable("ordering of two texts")
            same = self._trace.ask("same", (raw_of(self), raw_of(other)), (), self._value == other._value)
            return same if name == "__eq__" else not same
        return self._trace.ask(name, raw_of(self), (other,), getattr(self._value, name)(other))

    return method


def _lost(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise Untraceable(f"str.{name}")

    return method


for _name in _FOLLOWED:
    setattr(Text, _name, _follow(_name))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Text, _name, _compare(_name))
for _name in _LOST:
    setattr(Text, _name, _lost(_name))


class Json(Mapping):
    """A stand-in for a JSON object (the arguments of a tool call) in a traced run of a template.

    A template may dump it as JSON, print it, and test its truth and length. Looking into it raises Untraceable.
    """

    __slots__ = ("_raw", "_value", "_trace")

    def __init__(self, raw: str, value: dict[str, Any], trace: Trace) -> None:
        self._raw, self._value, self._trace = raw, value, trace

    def __bool__(self) -> bool:
        return self._trace.ask("bool", self._raw, (), bool(self._value))

    def __len__(self) -> int:
        return self._trace.ask("len", self._raw, (), len(self._value))

    def __str__(self) -> str:
        return self._trace.derive("str", self._raw, (), str(self._value))

    __repr__ = __str__

    def __iter__(self) -> Any:
        raise Untraceable("looping over an object")

    def __getitem__(self, key: Any) -> Any:
        raise Untraceable("entering an object")

    __contains__ = __eq__ = __getitem__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def raw_of(text: str) -> str:
    """Return the characters of a stand-in, literals and markers, as a plain string; a plain string is unchanged."""
    return str.__str__(text) if type(text) is str else "".join((text, ""))


def value_of(text: str) -> str:
    """Return the text that a stand-in stands for, or a plain string unchanged."""
    return text._value if isinstance(text, Text) else text


def holds_stand_in(value: Any) -> bool:
    """Return whether a value is a stand-in, or a list, tuple or dict that holds one at any depth."""
    if isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, (Text, Json)) or (isinstance(value, (list, tuple)) and any(map(holds_stand_in, value)))
