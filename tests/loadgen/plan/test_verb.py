"""The plan: what is printed and written of a model's cache, the search for the fewest replicas, and what is refused."""

import json
import re

import pytest
from markupsafe import escape

from loadgen.cli import main
from tests.policies.test_kv_space import DEEPSEEK_V3, GEMMA3_27B, LLAMA_8B

from .test_pools_verb import LOAD as POOLS_LOAD
from .test_pools_verb import NUMBERS

GIB = 1 << 30


@pytest.fixture
def model(tmp_path):
    """`model(config)` is a folder with it."""

    def folder(config) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return folder


def kv_space(capfd, *flags: str) -> dict:
    assert main(["plan", *flags, "--json", "-"]) == 0
    return json.loads(capfd.readouterr().out)["kv_space"]


def test_a_gpus_cache_and_what_fp8_gives(capfd, model):
    found = kv_space(capfd, "--model", model(LLAMA_8B), "--gpu-memory", "80GiB", "--weights", "15GiB")
    assert found["auto"]["memory"] == int(0.92 * 80 * GIB) - 17 * GIB
    auto = {"dtype": "bfloat16", "blocks": 28_979, "tokens": 463_664, "longest": 131_072}
    assert found["auto"] | auto == found["auto"]
    assert found["fp8"]["tokens"] == 2 * found["auto"]["tokens"]


def test_flags_of_the_engine_count(capfd, model):
    flags = ("--model", model(DEEPSEEK_V3), "--kv-cache-memory-bytes", "10GiB", "-tp", "8", "--block-size", "64")
    whole, split = (kv_space(capfd, *flags, *more)["auto"] for more in ((), ("-dcp", "8")))
    assert whole["blocks"] == split["blocks"] == 10 * GIB // (70_272 * 64)
    assert split["tokens_kept"] == 8 * whole["tokens_kept"]
    short = kv_space(capfd, *flags, "--max-model-len", "4096")["auto"]
    assert short["context"] == short["longest"] == 4096


def test_without_a_gpu_it_says_what_a_gib_holds(capsys, model):
    assert main(["plan", "--model", model(LLAMA_8B)]) == 0
    out = capsys.readouterr().out
    assert "tokens in each GiB" in out and "8,192" in out and "blocks of" not in out


def test_a_model_in_numbers(capfd, model):
    numbers = "--layers 32 --kv-heads 8 --head-dim 128 --gpu-memory 80GiB --max-model-len 131072".split()
    told = kv_space(capfd, *numbers, "--weights", "15GiB")["auto"]
    read = kv_space(capfd, "--model", model(LLAMA_8B), "--gpu-memory", "80GiB", "--weights", "15GiB")["auto"]
    assert told == read | {"dtype": "float16"}
    by_parameters = kv_space(capfd, *numbers, "--parameters", "8B")["auto"]["memory"]
    assert by_parameters == int(0.92 * 80 * GIB) - 16_000_000_000 - 2 * GIB


def test_what_is_not_simple_is_said(capsys, model):
    assert main(["plan", "--model", model(GEMMA3_27B), "--kv-cache-memory-bytes", "20G"]) == 0
    out = capsys.readouterr().out
    assert "52 of 62 layers need only the last 1,024 tokens" in out and "tokens kept for later requests" in out


LOAD = ("--dataset-name", "chat", "--request-rate", "12", "--prefix-len", "256", "--suffix-len", "64", "--output-len", "20",
        "--think-time", "0.1")  # fmt: skip


def test_a_fleet_for_a_load(capsys, tmp_path):
    flags = ("plan", *LOAD, *"--slo ttft:60ms --kv-tokens 64000,8000 --attainment 0.8 --seed 2 --json".split())
    assert main([*flags, str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    plan = json.loads((tmp_path / "a.json").read_text())["plan"]
    fewest = plan["replicas"]
    assert list(fewest) == ["8000", "64000"] and f"{fewest['8000']} replicas of 8,000 tokens: " in out.replace(
        "replica of", "replicas of"
    )
    for tokens, number in fewest.items():
        shares = {point["replicas"]: point["share"] for point in plan["points"] if point["tokens"] == int(tokens)}
        assert shares[number] >= 0.8 and (number == 1 or shares[number - 1] < 0.8)
    (last,) = re.findall(r"Load: ([\d,]+) requests of chat, at 12 requests/s \(Poisson\)\n", out)
    assert int(last.replace(",", "")) > 12 * 30, "for as long as the rate has to be held"
    assert "Assumed:" in out and "gpu-8b" in out and "empty at the start" in out and len(plan["assumed"]) == 4
    assert main([*flags, str(tmp_path / "b.json")]) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_load_that_is_over_before_its_rate_is_reached_is_played_with_more_requests(capfd):
    flags = ("plan", "--dataset-name", "chat", "--turns", "6", "--think-time", "2", "--request-rate", "12", "--slo", "ttft:200ms",
             "--kv-tokens", "32000")  # fmt: skip
    assert main([*flags, "--num-prompts", "60", "--json", "-"]) == 0, "no number is advised, which might not do either"
    out, said = capfd.readouterr()
    assert "60 requests are over before their rate has been held" in said and said.count("\nLoad: ") == 1
    found = json.loads(out)["plan"]
    (enough,) = (point for point in found["points"] if point["replicas"] == found["replicas"]["32000"])
    assert enough["report"]["request_throughput"] > 0.85 * 12, "so much was answered while it was judged"


def test_a_file_that_is_too_short_for_its_rate_is_said_to_be(capfd, tmp_path):
    file = tmp_path / "talks.jsonl"
    turns = [{"from": who, "value": "word " * 40} for who in ("human", "gpt") * 6]
    file.write_text("".join(json.dumps({"id": str(number), "conversations": turns}) + "\n" for number in range(8)))
    flags = ("--dataset-path", str(file), "--slo", "ttft:1s", "--request-rate", "30", "--kv-tokens", "64000")
    assert main(["plan", *flags]) == 2
    assert "Give a longer file or a lower --request-rate" in capfd.readouterr().err
    assert main(["plan", *flags, "--num-prompts", "20"]) == 2
    assert "Give all of the file (no --num-prompts) or a lower --request-rate" in capfd.readouterr().err


def test_an_overload_that_its_slo_does_not_see_is_no_fleet_that_keeps_it(capfd):
    """Streams are as fast as ever while more and more requests wait for one of few places."""
    flags = ("--dataset-name", "chat", "--turns", "3", "--output-len", "200", "--think-time", "0.5", "--slo", "tpot:50ms", "--request-rate", "8",
             "--kv-tokens", "6000", "--max-replicas", "8")  # fmt: skip
    assert main(["plan", *flags, "--json", "-"]) == 0
    found = json.loads(capfd.readouterr().out)["plan"]
    assert found["replicas"]["6000"] > 1
    for point in found["points"]:
        assert point["kept"] == (point["replicas"] >= found["replicas"]["6000"])
    overloaded = min(found["points"], key=lambda point: point["replicas"])
    assert overloaded["share"] == 1.0 and not overloaded["kept"]
    assert re.search(
        r"1 would give 100.0 %, but requests pile up \([\d.]+ of 8.00 requests/s answered\)", found["answers"][0]
    )


def test_the_page_of_a_plan(capsys, tmp_path):
    page, table = tmp_path / "plan.html", tmp_path / "plan.csv"
    flags = (
        f"--slo ttft:60ms --kv-tokens 512,64000 --attainment 0.8 --max-replicas 4 --json {tmp_path}/plan.json".split()
    )
    assert main(["plan", *LOAD, *flags, "--html", str(page), "--csv", str(table)]) == 0
    plan, text = json.loads((tmp_path / "plan.json").read_text())["plan"], page.read_text()
    for said in (*plan["answers"], *plan["assumed"]):
        assert str(escape(said)) in text
    assert text.count('<td class="yes">') + text.count('<td class="no">') == len(plan["points"])
    assert plan["replicas"]["512"] is None and "<b>4 × 512 tokens</b>" in text and "Every fleet that was tried" in text
    shown = {
        point["tokens"]: point["report"]["requests"]
        for point in plan["points"]
        if point["replicas"] == (plan["replicas"][str(point["tokens"])] or 4)
    }
    assert len(table.read_text().splitlines()) == 1 + shown[512] + shown[64_000]


def test_the_models_own_cache_half_of_it_and_twice(capfd, model):
    gpu = ("--model", model(LLAMA_8B), "--gpu-memory", "24GiB", "--weights", "15GiB", "-tp", "2")
    assert main(["plan", *gpu, *LOAD, "--slo", "ttft:5s", "--json", "-"]) == 0
    found = json.loads(capfd.readouterr().out)
    own = found["kv_space"]["auto"]["tokens_kept"]
    assert list(found["plan"]["replicas"]) == [str(own // 2), str(own), str(2 * own)]
    assert any("2 GiB are for neither weights nor cache" in said for said in found["plan"]["assumed"])
    assert "1 replica of" in found["plan"]["answers"][0] and "(2 GPUs)" in found["plan"]["answers"][0]


def test_a_load_no_fleet_can_answer_in_time(capsys):
    assert main(["plan", *LOAD, "--slo", "ttft:1ms", "--kv-tokens", "8000", "--max-replicas", "2"]) == 1
    assert (
        "With 8,000 tokens each, not even 2 replicas keep TTFT 1.0 ms for 0.9 of the requests: 0.0 % there"
        in " ".join(capsys.readouterr().out.split())
    )


def test_requests_longer_than_a_replica_takes_are_named(capsys):
    assert main(["plan", *LOAD, "--slo", "ttft:1s", "--kv-tokens", "512", "--max-replicas", "1"]) == 1
    assert "requests are longer than a replica takes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("flags", "why"), [
    ([*LOAD], "a load is planned for an SLO: say what would be good enough"),
    (["--slo", "ttft:1s", "--model", "MODEL", *LOAD], "its KV cache must be known: give --gpu-memory 80GiB"),
    (["--slo", "ttft:1s", "--kv-tokens", "16"], "a KV cache of 16 tokens is none: at least 32"),
    (["--slo", "ttft:fast"], "an SLO reads ttft:500ms"),
    (["--slo", "ttft:1s", "--profile", "gpu-9b"], "--profile: no profile 'gpu-9b'"),
    (["--model", "MODEL", "--html", "plan.html"], "--html and --csv show how a fleet does"),
    ([], "there is nothing to plan: --model FOLDER"),
    (["--model", "/nowhere"], "there is no such folder"),
    (["--model", "MODEL", "--gpu-memory", "80GiB"], "give --weights 16GiB, --parameters 8B, or --kv-cache-memory-bytes"),
    (["--model", "MODEL", "--gpu-memory", "16GiB", "--weights", "15GiB"], "leave no room for a cache in 92% of 16 GiB"),
    (["--layers", "80"], "a model in numbers also needs --kv-heads and --head-dim"),
    (["--model", "MODEL", "--head-dim", "128"], "leave --model out, or them"),
    (["--model", "MODEL", "-tp", "3"], "8 KV heads can't be shared out over 3 GPUs"),
    (["--model", "MODEL", "--kv-cache-dtype", "turboquant_k8v4"], "known are auto"),
    (["--pools"], "--pools needs a model: --model FOLDER, or --layers 80"),
    (["--link", "100Gbit/s"], "--link is of --pools: add it"),
    (["--rate", "5"], "--rate is of --pools: add it"),
    (["--pools", *NUMBERS, "--rate", "4"], "the pools of a load also need --prompt-tokens, --output-tokens, --slo"),
    (["--pools", *NUMBERS, "--slo", "ttft:1s"], "also need --rate, --prompt-tokens, --output-tokens"),
    (["--pools", *NUMBERS, "--dataset-name", "chat"], "--pools takes its load as numbers"),
    (["--pools", *NUMBERS, "--request-rate", "4"], "--pools takes its load as numbers"),
    (["--pools", *NUMBERS, "--csv", "plan.csv"], "--json FILE has all figures"),
    (["--pools", *NUMBERS, "--chunk-size", "100"], "--chunk-size 100 is no multiple of the block size, 16"),
    (["--pools", *NUMBERS, "--prompt-tokens", "200000"], "are 200,000 tokens, and the longest request has 131,072"),
    (["--pools", *NUMBERS, *POOLS_LOAD[:-1], "e2el:10s"], "--slo e2el: the arithmetic of pools has"),
    (["--pools", *NUMBERS, *POOLS_LOAD, "--attainment", "1"], "--attainment 1: pools are sized for a share"),
    (["--pools", *NUMBERS, "--profile", "gpu-9b"], "--profile: no profile 'gpu-9b'"),
    (["--pools", *NUMBERS, "-tp", "2", "-dcp", "2"], "leave --decode-context-parallel-size out"),
    (["--pools", *NUMBERS, *POOLS_LOAD, "--gpu-memory", "80GB"], "give --weights 16GiB, --parameters 8B"),
    (["--pools", *NUMBERS, *POOLS_LOAD, "--gpu-memory", "80GB", "--parameters", "70B"], "leave no room for a cache"),
])  # fmt: skip
def test_bad_use_is_refused_with_what_would_be_right(capsys, model, flags, why):
    folder = model(LLAMA_8B)
    assert main(["plan", *(folder if flag == "MODEL" else flag for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("loadgen plan: ") and why in error and error.count("\n") == 1


SIZE, SHARE = "like 512MiB or 5G", "not a share above 0 and up to 1: it reads 0.9 for 90 %"


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--gpu-memory", "80", "has no unit: 80GiB, or 80B for bytes?"),
        ("--gpu-memory", "99999TiB", f"is more than any machine has; write a size {SIZE}"),
        ("--weights", "0.0001KiB", f"is less than a byte; write a size {SIZE}"),
        ("--parameters", "99999T", "is more than any model has: it reads 70B (billions) or 350M"),
        ("--gpu-memory-utilization", "1.2", SHARE),
        ("--attainment", "0", SHARE),
        ("--layers", "-80x", "is not a whole number from 1 to 10,000"),
        ("--head-dim", 30 * "9", "is not a whole number from 1 to 100,000"),
        ("--block-size", "5000", "is not a whole number from 1 to 4,096"),
        ("--max-model-len", "0", "is not a whole number from 1 to 1,000,000,000"),
        ("--kv-tokens", "64,-1", "is not a whole number from 1 to 1,000,000,000"),
        ("--link", "9999999TB/s", "is more than any link has: it reads 100Gbit/s (bits) or 25GB/s (bytes)"),
        ("--chunk-size", "0", "is not a whole number from 1 to 1,000,000"),
        ("--rate", "-1", "is not above zero and finite"),
    ],
)
def test_bad_values_of_flags(capsys, flag, value, said):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--model", "m", flag, value])
    told = capsys.readouterr().err
    assert caught.value.code == 2 and re.match(rf"loadgen plan: flag (\S+/)?{flag}: ", told)
    assert said in told and value.rpartition(",")[2] in told and told.count("\n") == 1


def test_not_one_block_fits(capsys):
    shape = ("--layers", "10000", "--kv-heads", "10000", "--head-dim", "1000")
    memory = "--kv-cache-memory-bytes"
    for given, which in (((memory, "1GiB"), f"{memory} 1073741824B"), ((), "1 GiB, as no memory is given")):
        assert main(["plan", *shape, *given]) == 2
        assert f"loadgen plan: {which}: not one block fits, which takes" in capsys.readouterr().err
