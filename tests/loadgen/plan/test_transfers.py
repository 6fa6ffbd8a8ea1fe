"""Moving a prompt's cache: bytes by the model's shape, the buffer, the number of transfers, and seconds."""

import pytest

from loadgen.plan.checkpoints import of_numbers
from loadgen.plan.transfers import BUFFER_STEP, PER_TRANSFER, prefill_seconds, step_seconds, transfer
from policies.kv_space import KvSpace, read
from policies.transfers import LATENCY
from replicas.simulated.profile import Profile, RequestTime, StepTime, load_profile
from tests.policies.test_kv_space import DEEPSEEK_V3, GEMMA3_27B, LLAMA_8B

GIB = 1 << 30
GPU_8B = load_profile("gpu-8b")


def space(layers: int, heads: int, dtype: str = "auto", **more) -> KvSpace:
    return KvSpace(of_numbers(layers, heads, 128, None, None).shape, dtype, **more)


def moved(space: KvSpace, tokens: int, piece: int = 16, link: float | None = None):
    return transfer(space, tokens, piece, link, GPU_8B)


def test_the_published_figures_of_a_70b_with_32_heads():
    book = space(80, 32)
    assert book.token_bytes == 1_310_720  # 1.31 MB
    assert moved(book, 250_000).bytes == 327_680_000_000  # 328 GB
    assert moved(space(80, 32, "fp8"), 250_000).bytes == 163_840_000_000  # not "100 to 150 GB" ...
    assert moved(space(80, 32, "nvfp4"), 250_000).bytes == 92_160_000_000  # ... which no format gives
    assert GIB // book.token_bytes == 819  # tokens in a buffer of 1 GiB, not "4 to 8 thousand": that is ...
    assert GIB // space(80, 8).token_bytes == 3_276  # ... less with the 8 KV heads that Llama 3 70B has,
    assert GIB // space(80, 8, "fp8").token_bytes == 6_553  # reached with these in fp8,
    assert GIB // space(32, 8).token_bytes == 8_192  # or by an 8B in 16 bits
    assert moved(book, 7_500).buffer == 37 * BUFFER_STEP  # 9.25 GiB, not 2
    assert moved(space(80, 8, "fp8"), 7_500).buffer == 5 * BUFFER_STEP


def test_a_buffer_is_the_prompt_rounded_up_to_256_mib():
    llama = KvSpace(read(LLAMA_8B))
    assert [moved(llama, tokens).buffer // BUFFER_STEP for tokens in (1, 2_048, 2_049, 131_072)] == [1, 1, 2, 64]


def test_gpus_share_heads_and_all_have_the_latent():
    one, four = (transfer(KvSpace(read(LLAMA_8B), tensor_parallel=n), 4_096, 16, None, GPU_8B) for n in (1, 4))
    assert (four.bytes, four.bytes_per_gpu, four.buffer) == (one.bytes, one.bytes // 4, BUFFER_STEP)
    latent = KvSpace(read(DEEPSEEK_V3), tensor_parallel=8, block_size=64)
    assert moved(latent, 6_400, 64).bytes == 8 * 6_400 * 70_272


def test_layers_with_a_window_send_its_blocks_alone():
    gemma = KvSpace(read(GEMMA3_27B))  # 10 full layers, 52 with 1,024 tokens
    block = gemma.layer_block_bytes
    assert moved(gemma, 512).bytes == 62 * 32 * block
    assert moved(gemma, 131_072).bytes == (10 * 8_192 + 52 * (64 + 1)) * block


def test_seconds_are_latency_transfers_and_bytes():
    llama = KvSpace(read(LLAMA_8B))
    found = moved(llama, 16_000, 128, 12.5e9)
    assert found.seconds == pytest.approx(LATENCY + 125 * PER_TRANSFER + 16_000 * 131_072 / 12.5e9)
    small, large = (moved(llama, 7_500, piece, 12.5e9).seconds for piece in (16, 128))
    assert small - large == pytest.approx(0.012)  # as published


def test_it_pays_where_computing_takes_longer():
    llama = KvSpace(read(LLAMA_8B))
    assert [moved(llama, 8_192, 256, link).pays for link in (None, 1e9, 25e9)] == [None, False, True]


def test_a_prompt_is_computed_in_steps():
    profile = Profile(
        "test", StepTime(base=1.0, prefill_token=0.01, attention=1e-6), max_num_batched_tokens=4_000, max_num_seqs=8
    )
    whole = 10_000 * 10_000 / 2 * 1e-9
    assert prefill_seconds(profile, 10_000) == pytest.approx(3 * 1e-3 + 0.1 + whole)
    twice = Profile("test", profile.step, max_num_batched_tokens=4_000, max_num_seqs=8, speedup=2.0)
    assert prefill_seconds(twice, 10_000) == pytest.approx(prefill_seconds(profile, 10_000) / 2)
    assert step_seconds(profile, 3, 100) == pytest.approx(1e-3)


def test_tokenizing_counts_as_computing_again():
    slow = Profile("test", StepTime(prefill=10.0), RequestTime(latency=1.0, text_token=0.01))
    assert transfer(KvSpace(read(LLAMA_8B)), 1_000, 16, None, slow).compute_seconds == pytest.approx(
        0.010 + 0.001 + 0.010
    )
