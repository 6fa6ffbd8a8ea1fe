"""The fit finds the coefficients that samples were made with, also when some of them are off, and none below zero."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.calibrate import verb
from loadgen.calibrate.fit import (
    CACHED,
    DECODE,
    NAMES,
    NEW,
    TEXT,
    Fit,
    Residual,
    Sample,
    burst_sample,
    decode_sample,
    fit,
    nonnegative,
    prompt_sample,
)

BUDGET, ROUNDS = 2048, 5


def every_kind(truth: Fit, rng: random.Random, noise: float = 0.0, outliers: float = 0.0) -> list[Sample]:
    """Samples as a calibration of five rounds takes them, with times as `truth` has them.

    Not more than two of a question's five are outliers: where most answers to it are late, nothing tells that they
    are."""
    made = [prompt_sample(NEW, 0, n, 0, BUDGET) for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]
    made += [prompt_sample(CACHED, 0, n + extra, n, BUDGET) for n in (64, 512, 4096) for extra in (16, n // 4)]
    made += [prompt_sample(TEXT, 0, n, n - 8, BUDGET) for n in (64, 512, 4096)]
    made += [decode_sample(0, n, n * each) for n in (1, 2, 4, 8, 16) for each in (64, 512, 4096)]
    made += [burst_sample(0, n, 64, 48, BUDGET) for n in (4, 8, 16)]

    def seen(sample: Sample, far: float) -> Sample:
        return Sample(sample.region, truth.seconds(sample.parts) * far * (1 + rng.gauss(0, noise)), sample.parts)

    off = [min(ROUNDS // 2, sum(rng.random() < outliers for _ in range(ROUNDS))) for _ in made]
    return [
        seen(one, rng.uniform(1.5, 4) if number < late else 1)
        for one, late in zip(made, off)
        for number in range(ROUNDS)
    ]


COEFFICIENTS = st.fixed_dictionaries(
    {
        "latency": st.floats(1, 30), "work": st.floats(0.2, 5), "token": st.floats(1e-4, 5e-3), "text": st.floats(0.2, 5),
        "text_token": st.floats(1e-4, 5e-3),
        "base": st.floats(0.5, 20), "prefill": st.floats(0.5, 20), "prefill_token": st.floats(5e-3, 0.1), "attention": st.floats(1e-7, 2e-5),
        "decode_sequence": st.floats(0.02, 1), "decode_context_token": st.floats(1e-6, 1e-3),
    }
)  # fmt: skip


@given(COEFFICIENTS)
@settings(max_examples=60)
def test_without_noise_every_coefficient_is_found(ms):
    found = fit(every_kind(Fit(ms, {}), random.Random(1)))
    assert found.ms == pytest.approx(ms, rel=1e-3)
    assert all(one.worst_tenth < 1e-4 and one.count >= 9 for one in found.residuals.values())


@given(COEFFICIENTS, st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_noise_and_a_tenth_of_outliers_leave_times_within_a_tenth(ms, seed):
    truth = Fit(ms, {})
    found = fit(every_kind(truth, random.Random(seed), noise=0.03, outliers=0.1))
    assert min(found.ms.values()) >= 0
    for sample in every_kind(truth, random.Random(seed)):
        assert found.seconds(sample.parts) == pytest.approx(sample.seconds, rel=0.1)


def test_what_does_not_occur_stays_zero():
    ms = dict.fromkeys(NAMES, 0.0) | {"base": 2.0, "decode_sequence": 0.1}
    found = fit([decode_sample(Fit(ms, {}).seconds(decode_sample(0, n, 0).parts), n, 0) for n in (1, 2, 4)])
    assert found.ms == pytest.approx(ms, abs=1e-9)
    assert list(found.residuals) == [DECODE]


def test_the_spread_is_that_of_most_questions():
    parts = decode_sample(0, 1, 0).parts
    found = fit([Sample("", 0.002, parts, spread) for spread in (0.1, 0.11, 0.9)] + [Sample("", 0.002, parts)] * 9)
    assert found.spread == 0.11


def test_residuals_say_which_way_a_region_is_off():
    parts = decode_sample(0, 1, 0).parts
    found = fit([Sample("usual", 0.002, parts)] * 30 + [Sample("slow", 0.004, parts)] * 3)
    assert found.residuals["usual"].typical < 0.01
    assert found.residuals["slow"].bias == pytest.approx(-0.5, abs=0.01) and found.residuals["slow"].count == 3


def test_nothing_to_fit():
    with pytest.raises(ValueError):
        fit([])


@given(st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_nonnegative_least_squares_meets_its_conditions(seed):
    """Karush, Kuhn and Tucker's: no coefficient below zero, no gain in moving one that is allowed to move."""
    rng = np.random.default_rng(seed)
    matrix, wanted = rng.normal(size=(12, 5)), rng.normal(size=12)
    x = nonnegative(matrix, wanted)
    gain = matrix.T @ (wanted - matrix @ x)
    assert (x >= 0).all() and (gain <= 1e-8).all() and np.allclose(gain[x > 0], 0, atol=1e-8)


@pytest.mark.parametrize(
    "bias, typical, poor", [(0.14, 0.24, False), (-0.235, 0.263, True), (0.16, 0.16, True), (0.0, 0.26, True)]
)
def test_a_fit_with_large_errors_is_poor(bias, typical, poor):
    found = Fit({}, {"decode step": Residual(9, bias, typical, 0.5), "new prompt": Residual(9, 0.0, 0.01, 0.1)})
    assert found.poor == (["decode step"] if poor else [])
    said = verb._caution(found, 15)
    assert said == (
        "These errors are large (decode step): give --seconds 120, and let the machine do nothing else." if poor else ""
    )
    assert ("measure again" in verb._caution(found, 120)) == poor
