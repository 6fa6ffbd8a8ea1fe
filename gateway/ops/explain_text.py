"""A routing decision as text for a terminal: one sentence, a table of the replicas' costs, and the table's legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.outputs import PRIOR

from .reasons import TERMS, sentence

WIDTH, TABLE_WIDTH = 100, 120  # the most characters in a line, of sentences and of the table
MOST_ROWS = 20  # replicas that are shown, the cheapest first
LONGEST_ID = 26  # characters of a replica's id; the middle of a longer one is left out
LEAST_SHOWN = 5e-6  # seconds: a cost term that would read 0.00 ms for every replica gets no column
OF_KIND = {"session": "of its session", "prefix": "to prompts with the same first block", "model": "of this model"}
REST = "rest"  # the column with the sum of the cost terms that do not fit into the table


def show(told: Mapping[str, Any]) -> str:
    """Return a decision as text for a terminal. `told`: its data, from `reasons.describe`."""
    lines = [*_wrapped(sentence(told)), ""]
    lines += [line for name, text in _head(told) for line in _wrapped(text, f"{name:<8} ")]
    replicas = sorted(told["replicas"], key=lambda one: (not one["chosen"], one["seconds"] or one["answer_seconds"]))
    shown = replicas[:MOST_ROWS]
    names = dict.fromkeys(name for one in shown for name in one["terms"] if _term(one, name) >= LEAST_SHOWN)
    # The table shows as many terms as fit, those that differ most between replicas first; the others become REST.
    for left_out in sorted((None, *names), key=lambda name: (name is not None, _spread(shown, name))):
        names |= {left_out: REST} if left_out else {}
        rows = _rows(told, shown, names)
        if max(map(len, rows)) <= TABLE_WIDTH:
            break
    lines += ["", *rows]
    if len(replicas) > len(shown):
        lines.append(f"    and {len(replicas) - len(shown)} more; --json has all")
    return "\n".join([*lines, "", *_legend(shown, names)])


def _term(one: Mapping[str, Any], name: str) -> float:
    return float(one["terms"].get(name, 0.0))


def _spread(shown: Sequence[Mapping[str, Any]], name: str | None) -> float:
    """Return how much a cost term differs between replicas, in seconds, for sorting terms by it.

    A thousandth of the term's largest value is added, so that of two terms with equal differences the larger comes
    first. `name`: the term, or None for 0.
    """
    found = [_term(one, name) for one in shown] if name is not None else [0.0]
    return max(found) - min(found) + 1e-3 * max(found)


def _head(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    model = f", model {told['model']}" if told["model"] else ""
    adapter = f", adapter {told['adapter']}" if told["adapter"] else ""
    head = [("request", f"POST {told['path']}{model}{adapter}"), ("prompt", _prompt_line(told))]
    if told["mode"] != "load":
        head.append(("answer", _answer_line(told)))
    head.append(("policy", told["policy"] + (f": {told['reason']}" if told["reason"] else "")))
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
    """Return in words how many tokens the answer is expected to have, and how that was estimated.

    `told`: the data of the decision (`reasons.describe`).
    """
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


# --- the table


def _rows(told: Mapping[str, Any], shown: Sequence[Mapping[str, Any]], names: Mapping[str, str | None]) -> list[str]:
    """Return the lines of the table of replicas.

    `shown`: the replicas in the order of the rows. `names`: for each cost term, None if it has a column of its own, or
    REST if it is added up with others in the last column of terms.
    """
    kept, rest = [name for name in names if names[name] is None], [name for name in names if names[name] == REST]
    weighed = shown[0]["seconds"] is not None
    head = ["", "replica", "held", "active", "TTFT", "answer", *kept, *([REST] if rest else []), *["cost"] * weighed]
    cells = [head]
    for one in shown:
        times = [one["ttft_seconds"], one["answer_seconds"], *(_term(one, name) for name in kept)]
        times += [sum(_term(one, name) for name in rest)] if rest else []
        times += [one["seconds"]] if weighed else []
        mark = _mark(one, told.get("legs"))
        cells.append([mark, _short(one["id"]), _held(one, told["tokens"]), _active(one["load"]), *map(_ms, times)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}"  # mark and name to the left, figures to the right
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _active(load: Mapping[str, Any]) -> str:
    return f"{load['requests']}, {load['waiting']:g} wait" if load["waiting"] else str(load["requests"])


def _mark(one: Mapping[str, Any], apart: Mapping[str, Any] | None) -> str:
    if apart:
        return {apart["prefill"]: "P", apart["decode"]: "D"}.get(one["id"], "")
    return "->" if one["chosen"] else "=" if one["tied"] else ""


def _held(one: Mapping[str, Any], tokens: int) -> str:
    """Return as text how many of a prompt's tokens are in a replica's KV cache, in all and in each slower tier.

    `tokens`: the number of the prompt's tokens.
    """
    cached = one["overlap_tokens"] + sum(run["tokens"] for run in one["lower_tiers"])
    tiers = "".join(f", {run['tokens']} {run['tier']}" for run in one["lower_tiers"])
    return f"{cached} ({cached / max(1, tokens):.0%}){tiers}"


def _legend(shown: Sequence[Mapping[str, Any]], names: Mapping[str, str | None]) -> list[str]:
    lines = [
        "times in ms, as predicted; TTFT: until the first token, answer: until the last one",
        "held: prompt tokens whose KV cache is there; active: requests under way, and waiting",
    ]
    if any(one["tied"] and not one["chosen"] for one in shown):
        lines.append("=: costs the same as the least, one of them is drawn")
    if shown[0]["seconds"] is None:
        return lines
    lines.append("cost: ms that this request loses there and makes others lose, weighted: not how long it takes.")
    lines.append("The least is chosen. It is the sum of")
    for name in (name for name in names if names[name] is None):
        lines.append(f"  {name:<12} {TERMS[name].meaning if name in TERMS else name}")
    rest = ", ".join(name for name in names if names[name] == REST)
    return lines + (_wrapped(rest, f"  {REST:<12} ") if rest else [])


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{2 if milliseconds < 9.995 else 1 if milliseconds < 99.95 else 0}f}"


def _short(id: str) -> str:
    half = LONGEST_ID // 2
    return id if len(id) <= LONGEST_ID else f"{id[:half]}…{id[1 - half :]}"


def _wrapped(text: str, head: str = "") -> list[str]:
    """Return the text in lines of at most WIDTH characters, without cutting a word.

    The first line begins with `head`; the others are indented by its length.
    """
    lines, line = [], head
    for word in text.split(" "):
        if len(line) + len(word) > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = " " * len(head)
        line += word + " "
    return [*lines, line.rstrip()]
