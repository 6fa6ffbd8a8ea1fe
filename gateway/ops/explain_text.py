"""A decision for a terminal: one sentence, then a table of at most WIDTH columns, then a legend of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.outputs import PRIOR

from .reasons import TERMS, sentence

WIDTH = 100
MOST_ROWS = 20  # replicas that are shown, the cheapest first
LONGEST_ID = 26  # characters of a replica's id; the middle of a longer one is left out
LEAST_SHOWN = 5e-6  # seconds: a term that would read 0.00 ms for every replica gets no column
OF_KIND = {"session": "of its session", "prefix": "to prompts with the same first block", "model": "of this model"}
REST = "rest"  # the sum of the terms that do not fit


def show(told: Mapping[str, Any]) -> str:
    """Return the data of `reasons.describe` as text."""
    lines = [*_wrapped(sentence(told)), ""]
    lines += [line for name, text in _head(told) for line in _wrapped(text, f"{name:<8} ")]
    replicas = sorted(told["replicas"], key=lambda one: (not one["chosen"], one["seconds"] or one["answer_seconds"]))
    shown, weighed = replicas[:MOST_ROWS], replicas[0]["seconds"] is not None
    columns = _columns(told, shown)
    names = _terms(shown)
    kept = _fitting([*columns, _answers(shown)], names, shown)
    if answers := not weighed or REST not in kept:
        columns.append(_answers(shown))
    else:  # leave the width to the terms, which give the reason
        kept = _fitting(columns, names, shown)
    for name in kept:
        columns.append([name, *(_ms(_term(one, name, kept, names)) for one in shown)])
    if weighed:
        columns.append(["cost", *(_ms(one["seconds"]) for one in shown)])
    lines += ["", *_table(columns)]
    if len(replicas) > len(shown):
        lines.append(f"    and {len(replicas) - len(shown)} more; --json has all")
    lines += ["", *_legend(shown, kept, names, weighed, answers)]
    return "\n".join(lines)


def _head(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    model = f", model {told['model']}" if told["model"] else ""
    adapter = f", adapter {told['adapter']}" if told["adapter"] else ""
    head = [
        ("request", f"POST {told['path']}{model}{adapter}"),
        ("prompt", _prompt_line(told)),
        *([] if told["mode"] == "load" else [("answer", _answer_line(told))]),
        ("policy", told["policy"]),
    ]
    if told["reason"]:
        head[-1] = ("policy", f"{told['policy']}: {told['reason']}")
    if apart := told.get("legs"):
        held, moved = apart["held_tokens"], apart["moved_tokens"]
        head.append(("legs", f"P {apart['prefill']} holds {held:,} tokens of it, D {apart['decode']} lacks {moved:,}"))
    return [*head, ("note", told["note"])] if told["note"] else head


def _prompt_line(told: Mapping[str, Any]) -> str:
    if told["mode"] == "load":
        return "not read, so what replicas hold of it does not count"
    chars = f"{told['rendered_chars']} characters rendered, " if told["rendered_chars"] else ""
    return f"{chars}{told['tokens']} tokens, {told['blocks']} full blocks of {told['block_size']} ({told['mode']})"


def _answer_line(told: Mapping[str, Any]) -> str:
    """Return how many tokens are expected, and from what that is known."""
    basis, expected = told["output_basis"], f"{told['output_tokens']:.0f} tokens expected"
    if basis["kind"] == "none":
        return "no tokens, as requests of this path write none"
    if basis["kind"] == "prior":
        source = "assumed, as no answer of this model has ended yet"
    else:
        answers = "answer" if basis["answers"] == 1 else f"{basis['answers']} answers"
        differ = f" (± {basis['spread']:.0f})" if basis["answers"] > 1 else ""  # one answer alone has no deviation
        source = f"learned from the last {answers} {OF_KIND[basis['kind']]}{differ}"
        source += f" and the {basis['without']:.0f} expected otherwise, which count as {PRIOR:.0f}"
    if told["output_tokens"] < basis["mean"]:
        return f"{expected}, which the request allows at most; else {basis['mean']:.0f}, {source}"
    return f"{expected}, {source}"


# --- the table: a list of columns, each headed by its title


def _columns(told: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        ["", *(_mark(one, told.get("legs")) for one in shown)],
        ["replica", *(_short(one["id"]) for one in shown)],
        ["held", *(_held(one, told["tokens"]) for one in shown)],
        ["active", *(_active(one["load"]) for one in shown)],
        ["TTFT", *(_ms(one["ttft_seconds"]) for one in shown)],
    ]


def _active(load: Mapping[str, Any]) -> str:
    return f"{load['requests']}, {load['waiting']:g} wait" if load["waiting"] else str(load["requests"])


def _answers(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    return ["answer", *(_ms(one["answer_seconds"]) for one in shown)]


def _mark(one: Mapping[str, Any], apart: Mapping[str, Any] | None) -> str:
    if apart:
        return {apart["prefill"]: "P", apart["decode"]: "D"}.get(one["id"], "")
    return "->" if one["chosen"] else "=" if one["tied"] else ""


def _held(one: Mapping[str, Any], tokens: int) -> str:
    """Return how much of a prompt of `tokens` tokens a replica holds."""
    cached = one["overlap_tokens"] + sum(run["tokens"] for run in one["lower_tiers"])
    tiers = "".join(f", {run['tokens']} {run['tier']}" for run in one["lower_tiers"])
    return f"{cached} ({cached / max(1, tokens):.0%}){tiers}"


def _terms(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the terms that are not zero for every replica."""
    names = dict.fromkeys(name for one in shown for name in one["terms"])
    return [name for name in names if any(one["terms"].get(name, 0.0) >= LEAST_SHOWN for one in shown)]


def _fitting(columns: Sequence[Sequence[str]], names: list[str], shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the terms that fit into WIDTH, in their order; the others become REST.

    Terms that differ most between replicas are kept first.
    """

    def width(column: Sequence[str]) -> int:
        return max(map(len, column)) + 2

    def spread(name: str) -> float:
        found = [one["terms"].get(name, 0.0) for one in shown]
        return max(found) - min(found) + 1e-3 * max(found)

    widths = {name: width([name, *(_ms(one["terms"].get(name, 0.0)) for one in shown)]) for name in names}
    left = WIDTH + 2 - sum(map(width, columns)) - width(["cost", *(_ms(one["seconds"] or 0.0) for one in shown)])
    if sum(widths.values()) <= left:
        return names
    left -= width([REST, *(_ms(one["seconds"] or 0.0) for one in shown)])
    kept = set()
    for name in sorted(names, key=spread, reverse=True):
        if widths[name] > left:
            break
        left -= widths[name]
        kept.add(name)
    return [*(name for name in names if name in kept), REST]


def _term(one: Mapping[str, Any], name: str, kept: Sequence[str], names: Sequence[str]) -> float:
    if name == REST:
        return sum(one["terms"].get(other, 0.0) for other in names if other not in kept)
    return float(one["terms"].get(name, 0.0))


def _table(columns: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(
            f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}"  # mark and name to the left, figures to the right
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in zip(*columns, strict=True)
    ]


def _legend(
    shown: Sequence[Mapping[str, Any]], kept: Sequence[str], names: Sequence[str], weighed: bool, answers: bool
) -> list[str]:
    lines = [
        f"times in ms, as predicted; TTFT: until the first token{', answer: until the last one' if answers else ''}",
        "held: prompt tokens whose KV cache is there; active: requests under way, and waiting",
    ]
    if any(one["tied"] and not one["chosen"] for one in shown):
        lines.append("=: costs the same as the least, one of them is drawn")
    if not weighed:
        return lines
    lines.append("cost: ms that this request loses there and makes others lose, weighted: not how long it takes.")
    lines.append("The least is chosen. It is the sum of")
    for name in kept:
        if name == REST:
            lines += _wrapped(", ".join(other for other in names if other not in kept), f"  {REST:<12} ")
        else:
            lines.append(f"  {name:<12} {TERMS[name].meaning if name in TERMS else name}")
    return lines


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{2 if milliseconds < 9.995 else 1 if milliseconds < 99.95 else 0}f}"


def _short(id: str) -> str:
    half = LONGEST_ID // 2
    return id if len(id) <= LONGEST_ID else f"{id[:half]}…{id[1 - half :]}"


def _wrapped(text: str, head: str = "") -> list[str]:
    """Return lines of at most WIDTH, the first one after `head`, the others indented by its length. No word is cut."""
    lines, line = [], head
    for word in text.split(" "):
        if len(line) + len(word) > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = " " * len(head)
        line += word + " "
    return [*lines, line.rstrip()]
