import sys

import pytest

from replicas.event_source import EventSource
from replicas.launch import profile
from replicas.launch.command import Model, Ports, ProfileError

PORTS = Ports.run(20000, 1)


def test_the_shipped_profile_makes_a_command_line():
    sim = profile.load("sim")
    argv, env = sim.command("127.0.0.1", PORTS, Model(None, None))
    assert argv == [
        sys.executable, "-m", "replicas.simulated", "--host", "127.0.0.1", "--port", "20000", "--profile", "gpu-8b",
        "--events-port", "20001", "--replay-port", "20002",
    ]  # fmt: skip
    assert env["PYTHONPATH"]
    assert sim.events("127.0.0.1", PORTS) == EventSource("tcp://127.0.0.1:20001", "tcp://127.0.0.1:20002", "")


def test_a_timing_profile_is_one_of_simulated_engines(tmp_path):
    """As `loadgen calibrate` writes it."""
    file = tmp_path / "measured.yaml"
    file.write_text("block_size: 32\nstep: {base: 2.5}\n")
    argv, _ = profile.load(str(file)).command("127.0.0.1", PORTS, Model(None, None))
    assert argv[argv.index("--profile") + 1] == str(file) and "--block-size" not in argv


def test_every_field_reaches_the_command_line(tmp_path):
    text = """
      engine: sim
      timing: cpu-tiny
      speedup: 2.5
      num_blocks: 512
      block_size: 32
      kv_events: false
      cached_tokens: false
      lora: [sql, chat]
      seed: 7
      extra_args: [--verbose]
      env: {OMP_NUM_THREADS: "1"}
    """
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    mine = profile.load(str(file))
    argv, env = mine.command("127.0.0.1", PORTS, Model(tmp_path, "demo"))
    line = " ".join(argv)
    for part in [
        "--profile cpu-tiny", "--speedup 2.5", "--num-blocks 512", "--block-size 32", "--no-events",
        "--no-cached-tokens", "--lora sql --lora chat", "--seed 7", "--verbose", f"--model {tmp_path}",
        "--served-model-name demo",
    ]:  # fmt: skip
        assert part in line
    assert "--events-port" not in line and mine.events("127.0.0.1", PORTS) is None
    assert env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    "text, said",
    [
        ("engine: sim\nspedup: 3", "'spedup' is an unknown setting. Did you mean 'speedup'?"),
        ("engine: sim\nzzz: 3", "'zzz' is an unknown setting. Known: "),
        ("engine: sim\nspeedup:", "speedup: it has no value; write one, or leave it out"),
        ("engine: sim\nspeedup: 0", "speedup: Input should be greater than 0, got 0"),
        ("engine: sim\nnum_blocks: many", "num_blocks: Input should be a valid integer"),
        ("engine: llama.cpp", "engine: it is 'llama.cpp'; must be one of: sim, vllm"),
        ("speedup: 2", "engine: it is missing; must be one of: sim, vllm, as in `engine: vllm`"),
        ("- a", "a profile is a mapping"),
        ("engine: [", "line 1 is not YAML"),
        ("engine: sim\nspeedup: 2020-13-45", "line 2 is not YAML: month must be"),
        ("engine: " + 3000 * "[", "line 1 is not YAML: it is nested too deeply"),
        ("", "a profile is a mapping"),
    ],
)
def test_what_is_wrong_is_refused_with_the_place(text, said):
    with pytest.raises(ProfileError) as caught:
        profile.parse(text, "my.yaml")
    assert str(caught.value).startswith("my.yaml: ") and said in str(caught.value)


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(ProfileError, match="one of 8-gpu, cpu, .*sim, .*or the path of a YAML file"):
        profile.load("smi")
    with pytest.raises(ProfileError, match="No such file"):
        profile.load("/nowhere/x.yaml")


def test_every_shipped_profile_loads():
    assert "sim" in profile.names()
    for name in profile.names():
        assert profile.load(name).description
