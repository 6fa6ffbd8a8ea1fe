"""Profiles: the bundled ones say what their sources say, and a wrong file is told what is wrong with it."""

import pytest

from replicas.simulated.profile import PROFILES, StepTime, load_profile


@pytest.mark.parametrize("name", sorted(path.stem for path in PROFILES.glob("*.yaml")))
def test_bundled_profiles_load(name):
    profile = load_profile(name)
    assert profile.name == name and profile.context_length > 10_000
    assert profile.step.seconds(100, 5000.0, 0, 0, 0.1) > 0 < profile.step.seconds(0, 0.0, 4, 4000, 0.1)


def test_gpu_8b_is_dynamos_polynomial():
    step = load_profile("gpu-8b").step
    assert step.seconds(2000, 0.0, 0, 0, 0.0) * 1e3 == pytest.approx(4.21e-7 * 2000**2 + 0.01518 * 2000 + 16.5)
    assert step.seconds(0, 0.0, 9, 999, 0.5) * 1e3 == pytest.approx(-25.74 * 0.25 + 54.01 * 0.5 + 5.74)


@pytest.mark.parametrize("tokens, seen", [(512, 4.0), (2048, 38.5), (8192, 516.0)])
def test_cpu_tiny_is_what_was_measured_however_it_is_chunked(tokens, seen):
    """`seen`: ms to the first token, new less cached prompt."""
    step = load_profile("cpu-tiny").step
    chunks = [(start, min(2048, tokens - start)) for start in range(0, tokens, 2048)]
    ms = sum((step.seconds(new, new * (start + new / 2), 0, 0, 0.0) * 1e3 - step.prefill) for start, new in chunks)
    assert ms == pytest.approx(seen, rel=0.02)


@pytest.mark.parametrize("tokens, sequences, ms", [(0, 0, 3), (100, 0, 6), (0, 4, 5), (100, 4, 8)])
def test_base_is_in_every_step_once(tokens, sequences, ms):
    step = StepTime(base=3, prefill=2, prefill_token=0.01, decode_sequence=0.5)
    assert step.seconds(tokens, 0.0, sequences, 0, 0.0) == pytest.approx(ms * 1e-3)


def test_changes_and_own_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("num_blocks: 50\nmax_model_len: 10000\nstep: {decode: 2}\n")
    profile = load_profile(path, speedup=3.0, block_size=None)
    assert (profile.name, profile.num_blocks, profile.speedup, profile.block_size) == ("mine", 50, 3.0, 16)
    assert profile.context_length == 49 * 16  # what the cache can hold


@pytest.mark.parametrize(
    "text, about",
    [
        ("a: [", "not YAML"),
        ("[]", "mapping"),
        ("num_blocks: 5", "step"),
        ("step: {decoed: 1}", "decoed"),
        ("step: {decode: fast}", "fast"),
        ("blocks: 5\nstep: {}", "blocks"),
        ("num_blocks: many\nstep: {}", "num_blocks"),
        ("num_blocks: 1\nstep: {}", "num_blocks must be at least 2"),
        ("speedup: 0\nstep: {}", "speedup"),
        ("scheduling_policy: lifo\nstep: {}", "scheduling_policy: Input should be 'fcfs' or 'priority'"),
        ("max_num_seqs: 300\nmax_num_batched_tokens: 200\nstep: {}", "max_num_seqs"),
        ("step: {}\nrequest: {latencey: 1}", "latencey"),
        ("step: {}\nspeedup: 2020-13-45", "bad.yaml: line 2 is not YAML: month must be"),
        ("step: {}\nspeedup:", "bad.yaml: speedup: it has no value; write one, or leave the field out"),
        ("step: {}\nwindows:", "bad.yaml: windows: it has no value"),
        ("step: {decode: }", "bad.yaml: step.decode: it has no value"),
        ("lmcache: true\nstep: {}", "lmcache needs cpu_blocks"),
        ("step: {}\nrequest: 5", "request: Input should be"),
        ("step: {}\nrequest: {work: slow}", "request.work: .*slow"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, about):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=about):
        load_profile(path)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="cpu-tiny, gpu-8b"):
        load_profile("gpu-9b")
