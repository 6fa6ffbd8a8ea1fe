"""A cost formula stated once, as plain Python arithmetic, and compiled for the three places where it is evaluated.

A *statement* is a Python function of numbers, with `+ - * /`, `min`, `max` and `abs` as its only operations and no
branches. It is called once, with symbols in place of the numbers, and so returns expressions instead of numbers; equal
parts of these become one object. From the expressions are made

- `python`: a Python function for one replica, every call of another statement inlined;
- `Arrays`: the sum of the results for many replicas at once, as one matrix product and some operations on arrays;
- `lua`: the text of a Lua function, for the Redis script that decides for several gateways at once.

A test checks that all three give the statement's own results.

The kind of a symbol says on what its value depends: REQUEST, the request alone, the same for all candidates; STANDING,
a replica's load and speeds alone; OVERLAP, both. Parts of one kind are computed only when that kind changes: of 1,024
replicas, two or three change their STANDING parts between two decisions.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import FunctionType
from typing import Any, ClassVar

import numpy as np

REQUEST, STANDING, OVERLAP = 1, 2, 4  # kinds; an expression has those of all its symbols, as a sum of bits
_CALLS: dict[str, Callable[..., float]] = {"min": min, "max": max, "abs": abs}
_WORTH_A_BRANCH = 8  # least number of parts that a branch must save


class Expression:
    """A number that is not known yet: a symbol, a constant or an operation. Equal expressions are one object."""

    __slots__ = ("op", "parts", "kind")
    _all: ClassVar[dict[tuple[object, ...], Expression]] = {}

    op: str  # "symbol", "number", an operator, or one of _CALLS
    parts: tuple[Any, ...]  # the symbol's name, the number, or expressions
    kind: int

    @classmethod
    def of(cls, op: str, *parts: Any, kind: int = 0) -> Expression:
        """Return the expression of this operation and these parts, the same object as before if there is one."""
        key = (op, *map(id, parts)) if op not in ("symbol", "number") else (op, *parts, kind)
        found = cls._all.get(key)
        if found is None:
            found = cls._all[key] = object.__new__(cls)
            found.op, found.parts = op, parts
            for part in parts:
                kind |= part.kind if isinstance(part, Expression) else 0
            found.kind = kind
        return found

    def __add__(self, other: Any) -> Expression:
        return _operate("+", self, other)

    def __radd__(self, other: Any) -> Expression:
        return _operate("+", other, self)

    def __sub__(self, other: Any) -> Expression:
        return _operate("-", self, other)

    def __rsub__(self, other: Any) -> Expression:
        return _operate("-", other, self)

    def __mul__(self, other: Any) -> Expression:
        return _operate("*", self, other)

    def __rmul__(self, other: Any) -> Expression:
        return _operate("*", other, self)

    def __truediv__(self, other: Any) -> Expression:
        return _operate("/", self, other)

    def __rtruediv__(self, other: Any) -> Expression:
        return _operate("/", other, self)

    def __bool__(self) -> bool:
        raise TypeError("a statement has no branches")


def symbol(name: str, kind: int) -> Expression:
    """Return the expression that stands for a number called `name`; `kind`: REQUEST, STANDING or OVERLAP."""
    return Expression.of("symbol", name, kind=kind)


def _number(value: Any) -> Expression:
    return value if isinstance(value, Expression) else Expression.of("number", float(value))


def _operate(op: str, one: Any, other: Any) -> Expression:
    left, right = _number(one), _number(other)
    a, b = (part.parts[0] if part.op == "number" else None for part in (left, right))
    if (op == "*" and (a == 0 or b == 0)) or (op == "/" and a == 0):
        return _number(0.0)
    if (op == "*" and a == 1) or (op == "+" and a == 0):
        return right
    if (op in "*/" and b == 1) or (op in "+-" and b == 0):
        return left
    if a is not None and b is not None:
        return _number({"+": a + b, "-": a - b, "*": a * b}[op] if op != "/" else a / b)
    return Expression.of(op, left, right)


def _call(op: str) -> Callable[..., Expression]:
    def call(*parts: Any) -> Expression:
        if len(parts) != (1 if op == "abs" else 2):
            raise TypeError(f"{op} of {len(parts)} numbers: a statement has min and max of two, abs of one")
        numbers = [*map(_number, parts)]
        if all(number.op == "number" for number in numbers):
            return _number(_CALLS[op](*[number.parts[0] for number in numbers]))
        return Expression.of(op, *numbers)

    return call


def expressions(statement: Callable[..., Any], *arguments: Any) -> Any:
    """Return the expressions that a statement returns for these arguments, which are symbols."""
    return _symbolic(statement)(*arguments)


def _symbolic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function, and of those it calls, whose `min`, `max` and `abs` take expressions."""
    names = dict(function.__globals__) | {op: _call(op) for op in _CALLS}
    called = [
        one
        for name in function.__code__.co_names
        if isinstance(one := names.get(name), FunctionType) and name not in _CALLS
    ]
    names |= {one.__name__: _symbolic(one) for one in called}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


# --- as text: Python and Lua


class Text:
    """The source text of expressions in some language.

    Parts used more than once are assigned to local variables first, in `lines`; parts of REQUEST symbols alone in
    `request_lines`, for callers that evaluate the rest for many replicas.

    `assign`: the form of an assignment; `calls`: the language's functions for min, max and abs (None: Python's
        conditionals).
    `known`: variables that already hold the values of some expressions; if given, nothing goes to `request_lines`.
    """

    def __init__(
        self,
        roots: Sequence[Expression],
        assign: str = "{} = {}",
        calls: Mapping[str, str] | None = None,
        known: Mapping[Expression, str] | None = None,
    ) -> None:
        self._assign, self._calls = assign, calls
        self._names = dict(known or {})
        self._for_request = known is None
        self.request_lines: list[str] = []
        self.lines: list[str] = []
        for node, uses in _uses(roots).items():  # parts come before the expressions that contain them
            if self._deserves_a_name(node, uses):
                self._name(node)

    @property
    def request_names(self) -> dict[Expression, str]:
        """The variables that `request_lines` assign, by the expressions that they hold."""
        return {node: name for node, name in self._names.items() if node.kind == REQUEST}

    @staticmethod
    def _deserves_a_name(node: Expression, uses: int) -> bool:
        if node.op == "symbol":
            return uses > 1
        return node.op != "number" and (uses > 1 or node.kind == REQUEST)

    def _name(self, node: Expression) -> str:
        """Assign an expression to a variable if it is not one already, and return its text."""
        if node not in self._names and node.op != "number" and not (node.op == "symbol" and "." not in node.parts[0]):
            text = self.of(node)
            if node.kind == REQUEST and self._for_request:
                name, lines = f"q{len(self.request_lines)}", self.request_lines
            else:
                name, lines = f"v{len(self._names)}", self.lines
            lines.append(self._assign.format(name, text))
            self._names[node] = name
        return self.of(node)

    def of(self, node: Expression) -> str:
        """Return the text of an expression."""
        if node in self._names:
            return self._names[node]
        if node.op in ("symbol", "number"):
            return str(node.parts[0])
        if node.op not in _CALLS:
            return f"({f' {node.op} '.join(map(self.of, node.parts))})"
        if self._calls is not None:
            return f"{self._calls[node.op]}({', '.join(map(self.of, node.parts))})"
        first, *second = map(self._name, node.parts)  # a conditional is three times as fast as a call
        if node.op == "abs":
            return f"({first} if {first} >= 0.0 else -{first})"
        return f"({first} if {first} {'<' if node.op == 'min' else '>'} {second[0]} else {second[0]})"


def _uses(roots: Sequence[Expression]) -> Counter[Expression]:
    """Return how often each part of these expressions is used, parts before the expressions that contain them."""
    used: Counter[Expression] = Counter()

    def count(node: Expression) -> None:
        if node not in used and node.op not in ("symbol", "number"):
            for part in node.parts:
                count(part)
        used[node] += 1

    for root in roots:
        count(root)
    return used


def branches(
    roots: Sequence[Expression],
    zeros: Sequence[Sequence[Expression]],
    last: str,
    known: Mapping[Expression, str] | None = None,
) -> list[str]:
    """Return lines of Python that evaluate the expressions and end with `last`, which takes their values.

    `zeros`: groups of symbols that are all 0 if the first of the group is. That case gets a branch of its own, without
        the parts that vanish, if these are many: a replica without prompts and streams takes 104 bytecodes, a busy one
        252. `known`: variables that already hold the values of some expressions.
    """
    known = dict(known or {})
    for at, symbols in enumerate(zeros):
        simpler = _where_zero(roots, symbols)
        if len(_uses(roots)) - len(_uses(simpler)) >= _WORTH_A_BRANCH:
            gate, others = symbols[0], zeros[at + 1 :]
            known[gate] = f"z{len(zeros) - at}"
            return [
                f"{known[gate]} = {gate.parts[0]}",
                f"if {known[gate]}:",
                *[f"    {line}" for line in branches(roots, others, last, known)],
                "else:",
                *[f"    {line}" for line in branches(simpler, others, last, known)],
            ]
    text = Text(roots, known=known)
    values = ", ".join(map(text.of, roots))
    return [*text.lines, last.format(values)]


def _where_zero(roots: Sequence[Expression], symbols: Sequence[Expression]) -> list[Expression]:
    """Return the expressions as they are when these symbols are 0, simplified."""
    found: dict[Expression, Expression] = dict.fromkeys(symbols, _number(0))

    def simplified(node: Expression) -> Expression:
        if node.op in ("symbol", "number"):
            return found.get(node, node)
        if node not in found:
            parts = map(simplified, node.parts)
            found[node] = _call(node.op)(*parts) if node.op in _CALLS else _operate(node.op, *parts)
        return found[node]

    return [*map(simplified, roots)]


def python(
    name: str, parameters: Sequence[str], roots: Sequence[Expression], zeros: Sequence[Sequence[Expression]] = ()
) -> Callable[..., tuple[float, ...]]:
    """Return a Python function of these parameters that returns the values of the expressions.

    `zeros`: groups of symbols that are all 0 if the first of the group is.
    """
    body = branches(roots, zeros, "return {},")
    return compiled(name, [f"def {name}({', '.join(parameters)}):", *[f"    {line}" for line in body]])


def lua(name: str, parameters: Sequence[str], roots: Sequence[Expression]) -> str:
    """Return the text of a local Lua function that returns the values of the expressions."""
    text = Text(roots, "local {} = {}", {"min": "math.min", "max": "math.max", "abs": "math.abs"})
    results = ", ".join(map(text.of, roots))
    body = [*text.request_lines, *text.lines, f"return {results}"]
    return "\n".join([f"local function {name}({', '.join(parameters)})", *[f"  {line}" for line in body], "end"])


def compiled(name: str, lines: Sequence[str], **names: Any) -> Callable[..., Any]:
    """Return the function that these lines of Python define; `names` are the globals that it may use."""
    source, file = "\n".join(lines) + "\n", f"<statement {name} {next(_numbers)}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # so that a traceback shows the line
    exec(compile(source, file, "exec"), names)
    function: Callable[..., Any] = names[name]
    return function


_numbers = count(1)


# --- as arrays

Monomial = tuple[Expression, ...]  # a product of parts that differ by replica, ordered by id; may be empty
Polynomial = dict[Monomial, Expression]  # the factor of each product, of REQUEST parts alone


def _polynomial(node: Expression) -> Polynomial:
    """Expand an expression to a sum of products of a REQUEST part and parts that differ by replica.

    Parts that differ by replica are STANDING expressions, OVERLAP symbols, and what cannot be expanded: `min`, `max`,
    `abs` and quotients.
    """
    if not node.kind & ~REQUEST:
        return {(): node}
    if node.kind == STANDING or node.op == "symbol" or node.op in _CALLS:
        return {(node,): _number(1)}
    left, right = node.parts
    if node.op == "/" and not right.kind & ~REQUEST:
        return {parts: factor / right for parts, factor in _polynomial(left).items()}
    if node.op == "/":
        return (
            _product(_polynomial(left), {(1 / right,): _number(1)}) if right.kind == STANDING else {(node,): _number(1)}
        )
    one, other = _polynomial(left), _polynomial(right)
    if node.op == "*":
        return _product(one, other)
    found = dict(one)
    for parts, factor in other.items():
        before = found.get(parts, _number(0))
        found[parts] = before + factor if node.op == "+" else before - factor
    return found


def _product(one: Polynomial, other: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for parts, factor in one.items():
        for more, by in other.items():
            both = tuple(sorted((*parts, *more), key=id))
            found[both] = found.get(both, _number(0)) + factor * by
    return found


class Arrays:
    """The value of one expression for many replicas.

    `standing` returns a replica's column: products of its STANDING parts, and the expressions to `keep` for other uses.
    A decision computes `weights` from the request (one row for each factor that is linear in the columns), multiplies
    them with all columns, and does the rest elementwise on the rows of that product.
    """

    def __init__(
        self,
        root: Expression,
        standing: Sequence[str],
        request: Sequence[str],
        overlap: Sequence[str],
        keep: Sequence[Expression] = (),
        zeros: Sequence[Sequence[Expression]] = (),
    ) -> None:
        self._columns: dict[Expression, int] = {_number(1): 0}
        self._rows: list[dict[int, Expression]] = []
        self._scalars: list[Expression] = []
        self._lines: list[str] = []
        self._names: dict[Expression, str] = {}
        self._numbers: dict[str, np.ndarray] = {}
        result = self._sum(_polynomial(root))
        rows, columns = len(self._rows), len(self._columns)
        places = [
            (row * columns + column, factor) for row, line in enumerate(self._rows) for column, factor in line.items()
        ]
        self._places = np.array([place for place, _ in places])
        self._flat = np.zeros(rows * columns)  # `_places` is fixed by the statement
        self._matrix = self._flat.reshape(rows, columns)
        self._weights = python("weights", request, [*self._scalars, *[factor for _, factor in places]])
        self.standing = python("standing", standing, [*self._columns, *keep], zeros)
        scalars = [f"q{index}" for index in range(len(self._scalars))]
        lines = [f"def elementwise({', '.join(['product', *scalars, *overlap])}):", *self._lines, f"return {result}"]
        self._elementwise: Callable[..., np.ndarray] = compiled(
            "elementwise",
            "\n    ".join(lines).split("\n"),
            minimum=np.minimum,
            maximum=np.maximum,
            absolute=np.absolute,
            **self._numbers,
        )

    def __call__(self, columns: np.ndarray, request: Sequence[float], overlap: Sequence[Any]) -> np.ndarray:
        """Return the value for each replica.

        `columns`: what `standing` returned, a column per replica; `request`, `overlap`: the arguments of these kinds.
        """
        weights, scalars = self._weights(*request), len(self._scalars)
        self._flat[self._places] = weights[scalars:]
        return self._elementwise(self._matrix.dot(columns[: self._matrix.shape[1]]), *weights[:scalars], *overlap)

    def _sum(self, polynomial: Polynomial) -> str:
        """Write the lines of code that evaluate a polynomial; return the name of the array that has the result.

        The lines that follow may overwrite that array.
        """
        for held in dict.fromkeys(
            part for parts in polynomial for part in parts if part.op == "symbol" and part.kind == OVERLAP
        ):
            outer = {parts: factor for parts, factor in polynomial.items() if held not in parts}
            inner = {_without(parts, held): factor for parts, factor in polynomial.items() if held in parts}
            return self._with_overlap(held.parts[0], inner, outer)
        return self._without_overlap(polynomial)

    def _with_overlap(self, held: str, inner: Polynomial, outer: Polynomial) -> str:
        """Write the sum `held x inner + outer`; `held`: an OVERLAP symbol, a factor of all parts of `inner`."""
        if list(inner) == [()] and not inner[()].kind & ~REQUEST:
            name = self._fresh(f"{held} * {self._scalar(inner[()])}")
        else:
            name = self._sum(inner)
            self._lines.append(f"{name} *= {held}")
        if list(outer) == [()] and not outer[()].kind & ~REQUEST:
            self._lines.append(f"{name} += {self._scalar(outer[()])}")
        elif outer:
            self._lines.append(f"{name} += {self._sum(outer)}")
        return name

    def _without_overlap(self, polynomial: Polynomial) -> str:
        by_opaque: dict[Monomial, dict[Expression, Expression]] = {}
        for parts, factor in polynomial.items():
            column = _number(1)
            opaque: list[Expression] = []
            for part in parts:
                if part.kind == STANDING:
                    column = column * part
                else:
                    opaque.append(part)
            by_opaque.setdefault(tuple(opaque), {})[column] = factor
        names = []
        for kept, line in by_opaque.items():
            values = [self._value(part) for part in kept]
            if values and list(line) == [_number(1)]:
                names.append(self._fresh(f"{values.pop()} * {self._scalar(line[_number(1)])}"))
            else:
                names.append(self._row(line))
            self._lines += [f"{names[-1]} *= {value}" for value in values]
        total, *others = names
        self._lines += [f"{total} += {other}" for other in others]
        return total

    def _row(self, line: dict[Expression, Expression]) -> str:
        """Add a row to the matrix product, and return the name of its array, which may be overwritten."""
        self._rows.append(
            {self._columns.setdefault(column, len(self._columns)): factor for column, factor in line.items()}
        )
        name = f"r{len(self._rows)}"
        self._lines.append(f"{name} = product[{len(self._rows) - 1}]")
        return name

    def _fresh(self, text: str) -> str:
        name = f"s{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        return name

    def _scalar(self, factor: Expression) -> str:
        """Return the name of a value that is the same for all replicas: a constant, or one computed per decision."""
        if factor.op == "number":
            return self._constant(factor.parts[0])
        self._scalars.append(factor)
        return f"q{len(self._scalars) - 1}"

    def _constant(self, value: float) -> str:
        """Return the name of an array of one number: an operation with it takes 0.5 us, with a float 0.8."""
        name = f"c{str(value).replace('.', '_').replace('-', 'm').replace('+', '')}"
        self._numbers[name] = np.array(value)
        return name

    def _value(self, node: Expression) -> str:
        """Write once the lines that compute an unexpanded part, and return its name; it is shared, so read only."""
        if node not in self._names:
            parts = [self._part(part) for part in node.parts]
            call = {"min": "minimum({}, {})", "max": "maximum({}, {})", "abs": "absolute({})", "/": "{} / {}"}[node.op]
            self._names[node] = self._fresh(call.format(*parts))
        return self._names[node]

    def _part(self, part: Expression) -> str:
        if not part.kind & ~REQUEST:
            return self._scalar(part)
        return (
            self._value(part)
            if _polynomial(part) == {(part,): _number(1)} and part.kind != STANDING
            else self._sum(_polynomial(part))
        )


def _without(parts: Monomial, one: Expression) -> Monomial:
    at = parts.index(one)
    return parts[:at] + parts[at + 1 :]
