"""Amounts with units: what they read, and that a missing or ambiguous unit is refused with what would be right."""

from argparse import ArgumentTypeError

import pytest

from loadgen.plan.units import link, parameters, size

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "number"), [("80GiB", 80 * GIB), ("80GB", 80 * GIB), ("1.5g", 3 * GIB // 2), ("4096B", 4096)]
)
def test_sizes(text, number):
    assert size(text) == number


@pytest.mark.parametrize(("text", "bytes_per_second"), [
    ("100Gbit/s", 12.5e9), ("100 Gbps", 12.5e9), ("25GB/s", 25e9), ("25 Gbyte/s", 25e9), ("900GBps", 900e9),
    ("1.6Tbit/s", 2e11), ("10Mbit/s", 1.25e6), ("2GiB/s", 2.0**31), ("8bit/s", 1.0),
])  # fmt: skip
def test_links(text, bytes_per_second):
    assert link(text) == bytes_per_second


@pytest.mark.parametrize(("read", "text", "remedy"), [
    *((link, text, "100Gbit/s (bits) or 25GB/s (bytes), per second") for text in ("100", "100gb/s", "25GB", "fast", "0Gbit/s", "-5GB/s", "")),
    (size, "80", "80GiB, or 80B for bytes?"), (size, "80x", "512MiB"), (size, "0GB", "512MiB"), (size, "80i", "512MiB"),
    (parameters, "70", "70B"), (parameters, "70b", "70B"), (parameters, "0B", "70B"),
])  # fmt: skip
def test_an_amount_without_its_unit_is_refused_with_what_would_be_right(read, text, remedy):
    with pytest.raises(ArgumentTypeError) as caught:
        read(text)
    assert remedy in str(caught.value)


def test_parameters():
    assert (parameters("70B"), parameters("7.6B"), parameters("350M")) == (70_000_000_000, 7_600_000_000, 350_000_000)
