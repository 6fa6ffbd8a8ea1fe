"""`hitherto plan --pools`: its answer, tables and JSON, what is refused, and that docs/plan.md shows its output."""

import json
import re
import shlex
from itertools import pairwise

import pytest

from loadgen.cli import main
from loadgen.plan.fleet_size import BY_TOKENS
from policies.kv_space import RESERVE
from tests.policies.test_kv_space import DEEPSEEK_V3

from ...test_house import ROOT

NUMBERS = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--max-model-len", "131072")
LOAD = ("--prompt-tokens", "7500", "--output-tokens", "300", "--rate", "20", "--slo", "ttft:1s,tpot:50ms")


def printed(capsys, *flags: str, code: int = 0) -> str:
    assert main(["plan", "--pools", *flags]) == code
    return capsys.readouterr().out


def sentences(text: str) -> str:
    return " ".join(text.split())


def planned(capfd, *flags: str, code: int = 0) -> dict:
    assert main(["plan", "--pools", *flags, "--json", "-"]) == code
    return json.loads(capfd.readouterr().out)["pools"]


def test_the_answer_comes_first_then_tables_that_fit_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = printed(capsys, *NUMBERS, *LOAD, "--link", "100Gbit/s", "--gpu-memory", "80GB", "--parameters", "8B")
    assert sentences(out).startswith(
        "• 4 prefill : 6 decode replicas (10 GPUs) hold 20 requests a second of 7,500 + 300 tokens within TTFT 1,000 ms, TPOT 50.0 ms"
    )
    titles = [out.index(title) for title in ("Moving a prompt's cache", "Pools", "Sizes, and tokens", "Assumed:")]
    assert titles == sorted(titles) and max(map(len, out.splitlines())) <= 100 and "…" not in out


def test_the_buffer_has_its_arithmetic(capsys):
    out = sentences(printed(capsys, *NUMBERS, "--prompt-tokens", "7500"))
    assert "7,500 tokens: 32 layers × 469 blocks × 65,536 B = 983,564,288 B (0.131 MB a token)" in out
    assert "transfer buffer on each GPU: 1.00 GiB (0.92 GiB rounded up to 256 MiB)" in out
    assert "moved in" not in out  # no link was given


def test_without_a_prompt_it_is_the_longest_one(capsys):
    assert "131,072 tokens: 32 layers × 8,192 blocks" in sentences(printed(capsys, *NUMBERS))


@pytest.mark.parametrize(
    ("link", "verdict"),
    [("100Gbit/s", "moving pays, 1.7 times as quick"), ("10Gbit/s", "moving does not pay, it takes 5.2 times as long")],
)
def test_whether_it_pays_depends_on_the_link(capsys, link, verdict):
    flags = (*NUMBERS, "--prompt-tokens", "7500", "--link", link, "--chunk-size", "256")
    assert verdict in sentences(printed(capsys, *flags))


def test_small_transfers_are_warned_of_and_large_ones_are_not(capsys):
    flags = (*NUMBERS, "--prompt-tokens", "7500")
    warning = "Warning: 16 tokens a transfer are 469 transfers; of 128 tokens they would be 59 and take 12.0 ms less"
    assert warning in sentences(printed(capsys, *flags))
    assert "Warning: 64 tokens a transfer are 118 transfers" in sentences(printed(capsys, *flags, "--block-size", "64"))
    for more in (("--block-size", "128"), ("--chunk-size", "256")):
        assert "Warning" not in printed(capsys, *flags, *more)


def test_the_figures_as_json(capfd):
    found = planned(capfd, *NUMBERS, *LOAD, "--link", "100Gbit/s", "--gpu-memory", "80GB", "--parameters", "8B")
    assert found["prefill"]["pool"]["replicas"] == 4 and found["decode"]["pool"]["replicas"] == 6
    assert found["prefill"]["one_less"]["limits"] == ["prefill rate"] and found["decode"]["one_less"]["limits"] == [
        "TPOT"
    ]
    (given,) = [one for one in found["transfers"] if one["tokens"] == 7_500]
    assert given["bytes"] == 469 * 16 * 131_072 and given["buffer"] == 1 << 30 and given["count"] == 469
    assert given["pays"] is (given["seconds"] < given["compute_seconds"])
    assert found["link_bytes_per_s"] == 12.5e9 and len(found["answers"]) == 8


def test_whose_cache_the_replicas_have_is_among_what_was_assumed(capsys):
    own, counted = (
        sentences(printed(capsys, *NUMBERS, *LOAD, *more))
        for more in ((), ("--gpu-memory", "80GB", "--parameters", "8B"))
    )
    assert "4 prefill : 7 decode replicas" in own and "KV cache is the profile's, 262,144 tokens" in own
    assert "4 prefill : 6 decode replicas" in counted and "KV cache has room for 464,464 tokens" in counted
    assert BY_TOKENS in counted and BY_TOKENS not in own


def test_pools_of_gpus_with_a_small_cache_are_larger(capfd):
    flags = (*NUMBERS, *LOAD, "--parameters", "8B")
    large, small = (planned(capfd, *flags, "--gpu-memory", size) for size in ("80GB", "24GB"))
    assert small["decode"]["pool"]["replicas"] > large["decode"]["pool"]["replicas"]
    assert small["decode"]["one_less"]["limits"] == ["KV cache"]


def test_a_load_that_no_pool_holds(capsys):
    flags = (*NUMBERS, *"--prompt-tokens 7500 --output-tokens 300 --rate 20 --slo ttft:100ms --max-replicas 8".split())
    out = sentences(printed(capsys, *flags, code=1))
    assert "No prefill pool of up to 8 replicas holds 20 requests a second" in out and re.search(
        r"the first token takes \d\d\d ms, of which \d+(\.\d)? ms waiting and 154 ms computing", out
    )


def test_a_request_that_no_gpu_has_room_for(capsys):
    flags = (*NUMBERS, *"--prompt-tokens 100000 --output-tokens 1000 --rate 0.1 --slo tpot:1s --max-replicas 4".split())
    out = sentences(printed(capsys, *flags, "--gpu-memory", "24GB", "--weights", "16GB", code=1))
    assert "its KV cache has room for 0.3 requests of this length, and 1.0 would be there" in out


def test_what_fewer_bits_give_of_a_gpu(capfd):
    flags = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--parameters", "70B", "--gpu-memory", "80GB")
    found = planned(capfd, *flags)
    billions = {name: size / 1e9 for name, size in found["weights"].items()}
    assert billions == {"fp16": 140.0, "fp8": 70.0, "int8": 70.0, "int4": 36.09375, "fp4": 39.375}
    bits = {name: one["bytes_per_token"] for name, one in found["kv"].items()}
    assert bits == {"fp16": 327_680, "fp8": 163_840, "int8": 168_960, "int4": 87_040, "fp4": 92_160}
    assert found["kv"]["fp16"]["tokens"]["fp16"] is None and found["kv"]["int4"]["tokens"]["int4"] > 400_000


def test_room_for_less_than_a_block_is_none_of_tokens(capsys):
    flags = ("--parameters", "8B", "--gpu-memory", f"{16_000_000_000 + RESERVE + 1}B", "--gpu-memory-utilization", "1")
    assert re.search(r"weights fp16, 16.0 GB +0 k", printed(capsys, *NUMBERS, *flags))


def test_a_latent_has_no_formats_for_heads(capfd, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    found = planned(capfd, "--model", str(tmp_path), "-tp", "8", "--block-size", "64")
    assert list(found["kv"]) == ["fp16", "fp8"] and found["weights"] is None
    assert "the size of the weights is not known: --parameters 70B" in found["assumed"]


def examples() -> list[tuple[str, list[str]]]:
    """Commands in docs/plan.md that play no trace, and the lines of the block that shows what each prints."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", (ROOT / "docs/plan.md").read_text(), re.M)
    plays = re.compile(r"\s*hitherto plan --(?!.*--dataset-path)", re.S)
    return [(block, after.split("\n")) for block, after in pairwise(blocks) if plays.match(block)]


@pytest.mark.parametrize(("command", "shown"), examples())
def test_the_documents_show_what_it_prints(monkeypatch, capsys, command, shown):
    monkeypatch.setenv("COLUMNS", "80")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["hitherto", "plan"] and main(words[1:]) == 0
    out = [line.strip() for line in capsys.readouterr().out.splitlines()]
    lines = [line.strip() for line in shown if line.strip()]
    assert len(lines) > 5 and [line for line in lines if line not in out] == []


def test_there_are_examples():
    assert len(examples()) == 3
