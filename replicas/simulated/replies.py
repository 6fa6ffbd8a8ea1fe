"""The simulated engine's replies: plain English paragraphs, token by token, the same for the same prompt.

All paragraphs are made once from a seed and tokenized once; a reply is one of them, cut or continued by the request's
limits. If a prompt ends with the beginning of a reply, the answer continues that reply, as a real model at temperature
0 would: so another replica can take a stream over, and the stream ends the same. The end of a paragraph is the model's
end of turn. Since the ids are those of real text, a reply that is sent back in the next turn has the same ids.
"""

import random
from array import array

import xxhash

from .tokens import Tokens

PARAGRAPHS = 48
# How many tokens at a prompt's end must agree with a reply for it to be continued, tried in turn. Four distinguish
# replies if tokens are words; small vocabularies, whose tokens are letters, need more.
CONTEXTS = (4, 8, 16, 32, 64)
TRIES = 50  # texts to try for one paragraph before more tokens are compared


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


_WHO = _words("""
the reader, a patient engineer, the old harbour master, every new colleague, the night train, a careful gardener,
the second violin, the weather station, our neighbour, the museum guide, a quiet librarian, the first customer,
the bicycle mechanic, a travelling actor, the lighthouse, the chess club, an honest ledger, the river,
the village baker, a small committee
""")
_DOES = _words("""
remembers, measures, prefers, repairs, describes, collects, counts, explains, expects, compares, carries, paints,
borrows, arranges, questions, translates, writes down, studies
""")
_WHAT = _words("""
the long answer, seven kinds of rope, a map without names, the shortest path, warm bread, an unfinished letter,
the price of copper, three clean drawings, the colour of the evening, a box of brass screws,
yesterday's forecast, the rules of the game, a borrowed umbrella, the sound of rain, two contradicting reports,
an empty notebook, the tide tables, a good question
""")
_WHEN = _words("""
before breakfast, when the shop closes, on the first warm day, after a long silence, as soon as the kettle boils,
in the middle of winter, whenever the clock stops, near the old bridge, between two meetings, without looking up,
at the end of the month, for no particular reason, while the others wait, once the paint is dry,
under the station roof, against all advice
""")
_WHY = _words("""
because somebody has to, so that nothing is lost, since it costs so little, and nobody minds,
which surprises the visitors, although the map disagrees, until the next delivery, just to be certain,
and that is usually enough, as the contract says, so the work can go on, which takes about an hour
""")


def _paragraph(rng: random.Random, sentences: int) -> str:
    made = []
    for _ in range(sentences):
        words = [rng.choice(_WHO), rng.choice(_DOES), rng.choice(_WHAT), rng.choice(_WHEN)]
        if rng.random() < 0.6:
            words[-1] += "," * (rng.random() < 0.5)
            words.append(rng.choice(_WHY))
        text = " ".join(words)
        made.append(text[0].upper() + text[1:] + ".")
    return " ".join(made)


def _paragraphs(tokens: Tokens, seed: int, context: int | None) -> list[list[int]] | None:
    """Return the token ids of all paragraphs, or None if no set of paragraphs with different beginnings is found.

    `context`: in how many first tokens paragraphs have to differ; None: they may begin alike.
    """
    rng, made, openings = random.Random(seed), [], set()
    for number in range(PARAGRAPHS):
        for _ in range(TRIES):
            ids = tokens.encode(_paragraph(rng, 1 + number % 16), False)
            if context is None or tuple(ids[:context]) not in openings:
                break
        else:
            return None
        openings.add(tuple(ids[:context]))
        made.append(ids)
    return made


class Replies:
    """All text that a simulated engine can reply with: English paragraphs, joined into a ring of tokens.

    After its last token the ring continues with the first one. `ids`: the ring's token ids. `pieces`: the text of each
    token. Raises ValueError if the tokenizer makes no tokens of English.
    """

    def __init__(self, tokens: Tokens, seed: int = 0):
        self.ids = array("I")
        self.pieces: list[str] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._seed = seed
        for self.context in CONTEXTS:
            if paragraphs := _paragraphs(tokens, seed, self.context):
                break
        else:
            paragraphs = _paragraphs(tokens, seed, None)
        if not all(paragraphs):
            what = "the model's tokenizer makes no tokens of plain English"
            raise ValueError(f"{what}, which is what a simulated engine says")
        for ids in paragraphs:
            self._starts.append(len(self.ids))
            self.ids.extend(ids)
            self.pieces.extend(_pieces(tokens, ids))
            self._ends.append(len(self.ids))
        self._opens = set(self._starts)
        # beginnings of replies that are too short to identify a paragraph by their text alone
        lengths = range(1, self.context)
        self._beginnings = {self.ids[at : at + many].tobytes() for at in self._starts for many in lengths}
        self._end_of = [end for start, end in zip(self._starts, self._ends) for _ in range(start, end)]
        self._where: dict[bytes, list[int]] = {}
        for at in range(self.context, len(self.ids) + 1):
            self._where.setdefault(self.ids[at - self.context : at].tobytes(), []).append(at)

    def begin(self, prompt: array) -> tuple[int, int]:
        """Return where the reply to a prompt starts, as an index into the token ids `ids`, and its length in tokens.

        If the prompt ends with a part of a reply, the result is the rest of that reply. `prompt`: token ids, unsigned
        32 bit.
        """
        at = self._resume(prompt)
        if at is None:
            at = self._resume_beginning(prompt)
        if at is not None:
            return at, self._end_of[at - 1] - at
        paragraph = self._paragraph(prompt)
        return self._starts[paragraph], self._ends[paragraph] - self._starts[paragraph]

    def _paragraph(self, prompt: array) -> int:
        return xxhash.xxh3_64_intdigest(prompt.tobytes(), self._seed) % PARAGRAPHS

    def _resume_beginning(self, prompt: array) -> int | None:
        """Return the index in `ids` of the next token if `prompt` ends with the first tokens of its reply, else None.

        Fewer than `context` tokens do not identify a paragraph. But the prompt before them determines its reply, so
        they are compared with that reply.
        """
        for many in range(1, min(self.context, len(prompt))):
            if prompt[-many:].tobytes() in self._beginnings:
                start = self._starts[self._paragraph(prompt[:-many])]
                if self.ids[start : start + many] == prompt[-many:]:
                    return start + many
        return None

    def _resume(self, prompt: array) -> int | None:
        """Return the index in `ids` of the next token if `prompt` ends with part of a reply, else None.

        The part has to be at least `context` tokens long. The same tokens may occur at several places in `ids`.
        Preferred is a place whose match, followed backwards, begins at a paragraph's start, as replies do. Otherwise it
        is the one with the longest match.
        """
        best, found = (False, 0), None
        for at in self._where.get(prompt[-self.context :].tobytes(), ()):
            same = self.context
            while same < min(at, len(prompt)) and self.ids[at - 1 - same] == prompt[-1 - same]:
                same += 1
            fit = (at - same in self._opens, same)
            if fit > best:
                best, found = fit, at
        return found

    def walk(self, start: int, count: int) -> tuple[list[int], list[str]]:
        """Return `count` token ids and the text of each, from index `start` in `ids` on; the first follows the last."""
        size, end = len(self.ids), start + count
        if end <= size:
            return self.ids[start:end].tolist(), self.pieces[start:end]
        places = [at % size for at in range(start, end)]
        return [self.ids[at] for at in places], [self.pieces[at] for at in places]


def _pieces(tokens: Tokens, ids: list[int]) -> list[str]:
    """Return each token's text.

    A token is decoded together with up to three tokens before it, since some tokenizers drop a leading space.
    """
    pieces = []
    for at in range(len(ids)):
        before = ids[max(0, at - 3) : at]
        whole, known = tokens.decode([*before, ids[at]]), tokens.decode(before) if before else ""
        pieces.append(whole[len(known) :])
    return pieces
