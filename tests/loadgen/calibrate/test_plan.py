"""The plan is bounded by what the engine holds and by the time there is, and says what it will send."""

import pytest

from loadgen.calibrate import measure as plan
from loadgen.calibrate.ask import Limits
from loadgen.calibrate.fit import CACHED, DECODE, NAMES, NEW, TEXT, Fit

STEP = {"base": 2.0, "prefill_token": 0.01, "attention": 1e-5, "decode_sequence": 0.1}
MS = dict.fromkeys(NAMES, 0.0) | {"latency": 4.0, "work": 1.5} | STEP


def limits(**changes) -> Limits:
    cache = {"max_model_len": 16384, "block_size": 16, "num_blocks": 8192}
    given = {**cache, "max_num_seqs": 256, "max_num_batched_tokens": 2048, **changes}
    return Limits(**given, told=dict.fromkeys(given, "reported by the engine"))


def fit(factor: float = 1.0) -> Fit:
    return Fit({name: value * factor for name, value in MS.items()}, {})


@pytest.mark.parametrize(
    "given", [limits(), limits(max_model_len=1024), limits(num_blocks=256), limits(max_num_seqs=4)]
)
def test_no_question_is_too_large_for_the_engine(given):
    work = plan.make(given, fit(), 120)
    assert {question.region for question in work.questions} >= {NEW, CACHED, TEXT, DECODE}
    for question in work.questions:
        assert question.tokens + question.extra + question.output <= given.max_model_len
        assert question.count <= given.max_num_seqs
        assert question.count * (question.tokens + question.extra) <= given.num_blocks * given.block_size


@pytest.mark.parametrize("factor", [0.1, 1, 5])
def test_the_time_bounds_what_is_sent(factor):
    work = plan.make(limits(), fit(factor), 60)
    assert 2 <= work.rounds <= 10
    assert work.rounds == 2 or work.rounds * work.round_seconds <= 60
    assert work.round_seconds == pytest.approx(sum(one.expected(fit(factor), limits()) for one in work.questions))


def test_a_slow_engine_is_asked_less():
    quick, slow = (plan.make(limits(), fit(factor), 60) for factor in (0.2, 20))
    assert slow.sent[1] < quick.sent[1] / 10 and slow.sent[0] < quick.sent[0]
    assert max(one.tokens for one in slow.questions) < max(one.tokens for one in quick.questions)
