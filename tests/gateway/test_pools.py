"""Several kinds of engine that one gateway launches: what is refused before anything starts, and what then runs."""

import os
import signal

import pytest

from gateway import cli
from gateway.model import launches
from gateway.ops.doctor import examine
from gateway.settings import ConfigError, load
from replicas.launch.command import Ports

from .running import counted, running
from .test_models import compared, held, other_model

TEXT = "Down the rabbit hole, and what Alice found there: a table, a key and a very small door. "


@pytest.fixture
def connected(tmp_path):
    """A profile of simulated engines that pass caches on."""
    path = tmp_path / "connected.yaml"
    path.write_text("engine: sim\nkv_connector: true\nspeedup: 50\n")
    return str(path)


def planned(tmp_path, pools: str, **settings):
    """What a gateway with these pools would launch."""
    file = tmp_path / "hitherto.yaml"
    file.write_text("pools:\n" + "\n".join(f"  {line}" for line in pools.splitlines()))
    return launches(load(flags=settings, environ={}, file=file).settings)


def refused(tmp_path, pools: str, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, pools, **settings)
    return str(caught.value)


def test_each_pool_has_a_profile_a_count_and_a_role(tmp_path, connected):
    text = f"prefill: {{profile: {connected}, launch: 2, role: prefill}}\ndecode: {{profile: {connected}, launch: 3, role: decode}}"
    assert [(one.count, one.role, one.served_name) for one in planned(tmp_path, text)] == [
        (2, "prefill", "sim"),
        (3, "decode", "sim"),
    ]


@pytest.mark.parametrize("verb", ["config", "serve"])
def test_who_asks_for_the_settings_is_told_of_pools_that_cannot_work_together_as_who_starts_is(
    verb, capsys, monkeypatch
):
    monkeypatch.setattr("gateway.app.serve", launches)
    pools = "{p: {profile: sim, launch: 1, role: prefill}, d: {profile: pd-sim, launch: 1, role: decode}}"
    assert cli.main([verb, "--pools", pools]) == 2
    assert capsys.readouterr().err.startswith(
        "hitherto: flag --pools: p: its engines pass no cache on: add `kv_connector: true`"
    )


def test_the_settings_are_printed_without_the_models_of_pools(capsys):
    assert cli.main(["config", "--pools", "{a: {profile: vllm, launch: 1, model: nobody/nothing}}"]) == 0


def test_a_model_that_is_not_there_is_said_with_where_it_was_set(capsys, monkeypatch):
    monkeypatch.setattr("gateway.app.serve", launches)
    pool = "{a: {profile: sim, launch: 1%s}}"
    for environment, flags, place in (
        ({}, ["--launch", "1", "--model", "/nope"], "flag --model"),
        ({"HITHERTO_MODEL": "/nope"}, ["--pools", pool % ""], "environment HITHERTO_MODEL"),
        ({}, ["--pools", pool % ", model: /nope"], "flag --pools: a.model"),
    ):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert cli.main(["serve", *flags]) == 2
        assert capsys.readouterr().err.startswith(f"hitherto: {place}: no directory /nope: set model to the folder")


def test_a_role_may_stand_in_the_profile_and_the_pool_has_the_last_word(tmp_path):
    profile = tmp_path / "prompts.yaml"
    profile.write_text("engine: sim\nkv_connector: true\nrole: prefill\n")
    first, second = planned(
        tmp_path, f"a: {{profile: {profile}, launch: 1}}\nb: {{profile: {profile}, launch: 1, role: both}}"
    )
    assert (first.role, second.role) == ("prefill", "both")


def test_launch_and_pools_stand_beside_each_other(tmp_path):
    found = planned(tmp_path, "more: {profile: sim, launch: 1, served_model_name: other}", launch=2)
    assert [(one.count, one.served_name) for one in found] == [(2, "sim"), (1, "other")]


@pytest.mark.parametrize(
    "pools, said",
    [
        ("a: {profile: sim, lunch: 2}", "pools: a: 'lunch' is an unknown setting. Did you mean 'launch'?"),
        ("a: {profile: sim}", "pools: a.launch is missing"),
        ("a: {profile: sim, launch: yes}", "a.launch: True is not a whole number"),
        ("a: {profile: sim, launch: 0}", "a.launch: 0 is not a whole number of at least 1"),
        ("a: {profile: smi, launch: 1}", "pools: a.profile: profile 'smi'"),
        ("a: {profile: sim, launch: 1, role: prefil}", "Did you mean 'prefill'?"),
        ("a: 2", "pools: a: 2 is not a table of names and values; write {profile: ..., launch: ...}"),
        ("'a b': {profile: sim, launch: 1}", "pools: 'a b' is no name"),
    ],
)
def test_what_is_no_pool_is_refused_by_its_place(tmp_path, pools, said):
    assert said in refused(tmp_path, pools)


def test_so_does_one_of_the_pods():
    with pytest.raises(ConfigError) as caught:
        load(flags={"discover": '{selectr: "a=b", url: "http://{ip}:8000"}'}, environ={})
    assert str(caught.value) == "flag --discover: 'selectr' is an unknown setting. Did you mean 'selector'?"


def test_a_flag_says_in_one_line_what_a_file_says_in_several(connected):
    text = f"{{p: {{profile: {connected}, launch: 1, role: prefill}}, d: {{profile: {connected}, launch: 1, role: decode}}}}"
    given = load(flags={"pools": text}, environ={}).settings
    assert [one.role for one in launches(given)] == ["prefill", "decode"]
    assert load(flags={}, environ={"HITHERTO_POOLS": text}).settings.pools == given.pools
    with pytest.raises(ConfigError, match="flag --pools: line 1 is not YAML"):
        load(flags={"pools": "{p: {"}, environ={})


def test_a_slow_pool_is_launched_as_such(tmp_path):
    found = planned(tmp_path, "a: {profile: sim, launch: 2}\nb: {profile: sim, launch: 1, spill: true}")
    assert [(one.count, one.spill) for one in found] == [(2, False), (1, True)]


def test_pools_that_pass_caches_on_by_mooncake_need_no_more_than_their_profile(tmp_path):
    """The gateway knows where each engine is found by those that fetch."""
    profile, ports = tmp_path / "mooncake.yaml", Ports.run(20_000, 1)
    profile.write_text("engine: sim\nkv_connector: mooncake\n")
    pair = f"p: {{profile: {profile}, launch: 2, role: prefill}}\nd: {{profile: {profile}, launch: 1, role: decode}}"
    for one in planned(tmp_path, pair):
        assert one.profile.transfer == "mooncake" and one.profile.bootstrap(ports) == ports.http


def test_a_role_needs_a_counterpart_of_the_same_model(tmp_path, connected):
    alone = f"p: {{profile: {connected}, launch: 1, role: prefill}}"
    assert "pools: p: a replica has role=prefill and none has role=decode" in refused(tmp_path, alone)
    other = f"\nd: {{profile: {connected}, launch: 1, role: decode, served_model_name: other}}"
    said = refused(tmp_path, alone + other)
    assert "pools: p: " in said and "pools: d: " in said and "of the same model" in said
    assert planned(tmp_path, alone, replica_url="http://gpu1:8000#role=decode"), "it is adopted"


def test_engines_that_pass_no_cache_on_have_no_roles(tmp_path, connected):
    pools = f"p: {{profile: sim, launch: 1, role: prefill}}\nd: {{profile: {connected}, launch: 1, role: decode}}"
    assert refused(tmp_path, pools) == (
        "pools: p: its engines pass no cache on: add `kv_connector: true` to the profile, or take `pd-sim`"
    )
    assert planned(tmp_path, f"a: {{profile: sim, launch: 1}}\nb: {{profile: {connected}, launch: 1}}"), "without roles"


def test_roles_of_adopted_replicas_say_nothing_of_pools_that_have_none(tmp_path, connected):
    """They may be of another model, and these take whole requests in any case."""
    roles = "http://gpu1:8000#role=prefill,http://gpu2:8000#role=decode"
    plain = "a: {profile: sim, launch: 1}\nb: {profile: sim, launch: 1, served_model_name: other}"
    for adopted in (roles, "http://gpu1:8000#role=prefill"):
        assert planned(tmp_path, plain, replica_url=adopted)
    mixed = plain + "\nd: {profile: sim, launch: 1, role: decode, served_model_name: third}"
    said = refused(tmp_path, mixed, replica_url=roles)
    assert "pools: d: its engines pass no cache on" in said and "a: " not in said and "b: " not in said


def test_engines_of_two_kinds_pass_nothing_to_each_other(tmp_path, connected):
    pools = f"p: {{profile: pd-cpu, launch: 1, role: prefill}}\nd: {{profile: {connected}, launch: 1, role: decode}}"
    assert "their engines are vllm and sim" in refused(tmp_path, pools, model="sim")


def test_pools_that_say_unlike_things_of_their_caches_are_refused(tmp_path):
    connector = "engine: vllm\nkv_transfer_config: {kv_connector: NixlConnector}\n"
    for name in ("fp8", "bf16"):
        (tmp_path / f"{name}.yaml").write_text(f"{connector}kv_cache_dtype: {name}\n")
    pair = (
        "p: {{profile: {0}/fp8.yaml, launch: 1, role: prefill}}\nd: {{profile: {0}/bf16.yaml, launch: 1, role: decode}}"
    )
    said = refused(tmp_path, pair.format(tmp_path), model="sim")
    assert "pools: p and d: kv_cache_dtype is fp8 in one and bf16 in the other" in said
    for name in ("pd", "pd-mooncake"):
        pair = f"p: {{profile: {name}-prefill, launch: 1}}\nd: {{profile: {name}-decode, launch: 4}}"
        assert [one.role for one in planned(tmp_path, pair, model="sim")] == ["prefill", "decode"]
    mixed = "p: {profile: pd-prefill, launch: 1}\nd: {profile: pd-mooncake-decode, launch: 4}"
    assert "by different connectors: give both the same" in refused(tmp_path, mixed, model="sim")


@pytest.mark.parametrize("verb", ["config", "serve"])
def test_each_line_says_where_the_pools_were_set(verb, capsys, monkeypatch, tmp_path, connected):
    monkeypatch.setattr("gateway.app.serve", launches)
    file = tmp_path / "hitherto.yaml"
    alone = f"profile: {connected}, launch: 1, role: prefill"
    file.write_text(f"port: 0\npools: {{p: {{{alone}}}, d: {{{alone}, served_model_name: m}}}}\n")
    assert cli.main([verb, "--config", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, name in zip(lines, "pd", strict=True):
        assert line.startswith(f"hitherto: file {file}:2: pools: {name}: a replica has role=prefill and none")


async def test_the_doctor_says_of_pools_what_the_gateway_would(tmp_path, connected):
    alone = f"{{p: {{profile: {connected}, launch: 1, role: prefill}}}}"
    whole = f"{{p: {{profile: {connected}, launch: 1, role: prefill}}, d: {{profile: {connected}, launch: 1, role: decode}}}}"
    for pools, wrong in (
        (alone, ["flag --pools: p: a replica has role=prefill and none has role=decode"]),
        (whole, []),
    ):
        config = load(flags={"pools": pools, "port": 0, "admin_port": 0}, environ={})
        said = [one.text async for one in examine(config) if one.subject == "launch"]
        assert [one[: len(start)] for one, start in zip(said, wrong, strict=True)] == wrong


def test_two_models_under_one_name_pass_nothing_to_each_other(tmp_path, connected):
    other = other_model(tmp_path / "another")
    pools = (
        f"p: {{profile: {connected}, launch: 1, role: prefill, model: sim, served_model_name: m}}\n"
        f"d: {{profile: {connected}, launch: 1, role: decode, model: {other}, served_model_name: m}}"
    )
    said = refused(tmp_path, pools)
    assert "pools: p and d: they are started with different models" in said and "give both the same" in said


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_prompts_are_computed_in_one_pool_and_answered_by_the_other(tmp_path, connected, workers):
    config = tmp_path / "hitherto.yaml"
    config.write_text(
        f"workers: {workers}\npolicy: round_robin\npools:\n"
        f"  prefill: {{profile: {connected}, launch: 1, role: prefill}}\n"
        f"  decode: {{profile: {connected}, launch: 2, role: decode}}\n"
        "  other: {profile: sim, launch: 1, served_model_name: other}\n"
    )
    async with running("--config", str(config)) as gateway:
        replicas = (await gateway.ready_for_legs(4))["replicas"]
        roles = {one["id"]: one["role"] for one in replicas}
        assert sorted(roles.values()) == ["both", "decode", "decode", "prefill"]
        assert {one["id"] for one in (await gateway.client.get("/v1/models")).json()["data"]} == {"sim", "other"}
        for number in range(4):
            answer = await gateway.chat([{"role": "user", "content": f"{number}. " + TEXT * 40}])
            assert answer.status_code == 200 and roles[answer.headers["x-hitherto-replica"]] == "decode"
        whole = await gateway.chat([{"role": "user", "content": TEXT * 40}], model="other")
        assert whole.status_code == 200 and roles[whole.headers["x-hitherto-replica"]] == "both"
        page = (await gateway.admin.get("/metrics")).text
        assert counted(page, "hitherto_legs_total", leg="prefill", outcome="complete") == 4
        assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") == 4

        [prefiller] = [one for one in replicas if one["role"] == "prefill"]
        os.kill(prefiller["pid"], signal.SIGKILL)
        answer = await gateway.chat([{"role": "user", "content": "after that. " + TEXT * 40}])
        assert answer.status_code == 200, "a decoder computes the prompt itself while there is no prefiller"
        back = await gateway.ready(4)
        assert {one["id"]: one["role"] for one in back["replicas"]} == roles, "it has its role again"


async def test_pools_of_two_models_are_each_exact(tmp_path):
    other = other_model(tmp_path / "another")
    odd = tmp_path / "odd.yaml"
    odd.write_text("engine: sim\nspeedup: 50\nblock_size: 32\n")
    pools = f"{{a: {{profile: sim, launch: 1}}, b: {{profile: {odd}, launch: 1, model: {other}}}}}"
    for flags in ((), ("--model", "sim"), ("--model", other)):
        async with running(
            "--pools", pools if flags[1:] != (other,) else pools.replace(f", model: {other}", ""), *flags
        ) as gateway:
            await compared(gateway, 2)
            names = sorted(one["id"] for one in (await gateway.client.get("/v1/models")).json()["data"])
            if flags[1:] == (other,):
                assert names == ["another"], "--model is every pool's that has none of its own"
            else:
                assert names == ["another", "sim"]
                assert await held(gateway, "sim", TEXT * 20) % 16 == 0
            assert await held(gateway, "another", TEXT * 20) > 0
