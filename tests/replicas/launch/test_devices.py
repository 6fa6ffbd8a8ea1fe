import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.launch import devices
from replicas.launch.command import ProfileError

TWO = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d1f2c3a-0000-1111-2222-333344445555)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-6d1f2c3a-0000-1111-2222-333344445555)
"""
EIGHT = [str(n) for n in range(8)]


def test_devices_are_those_that_the_environment_names_else_the_machines(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.find() == [], "no driver"
    program = tmp_path / "nvidia-smi"
    for text, code, found in [(TWO, 0, ["0", "1"]), ("No devices found.", 0, []), ("it has failed", 9, [])]:
        program.write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 3\n/bin/cat {tmp_path}/said\nexit {code}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        (tmp_path / "said").write_text(text)
        assert devices.find() == found
    for visible, found in [("3, 1", ["3", "1"]), ("", []), ("-1", []), ("MIG-7", ["MIG-7"])]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert devices.find() == found


@pytest.mark.parametrize(
    "found, each, count, share, used, given",
    [
        (EIGHT, 4, 2, 1, (), [["0", "1", "2", "3"], ["4", "5", "6", "7"]]),
        (EIGHT, 1, 3, 1, (), [["0"], ["1"], ["2"]]),
        (EIGHT, 4, 1, 1, ("0", "1", "2", "3"), [["4", "5", "6", "7"]]),
        (EIGHT, 1, 2, 1, ("0", "2"), [["1"], ["3"]]),
        (["0", "1"], 1, 4, 2, (), [["0"], ["1"], ["0"], ["1"]]),
        (["0", "1"], 1, 1, 2, ("0", "1", "0"), [["1"]]),
        (["0", "1"], 1, 2, 2, ("1",), [["0"], ["0"]]),
    ],
)
def test_neighbours_go_together_and_those_that_share_go_where_the_fewest_are(found, each, count, share, used, given):
    assert devices.assign(found, each, count, share, used) == given


@pytest.mark.parametrize(
    "found, each, count, share, used, said",
    [
        ([], 1, 2, 1, (), "2 replicas of 1 GPUs need 2, this machine shows none: check `nvidia-smi -L`"),
        (["0", "1", "2"], 2, 2, 1, (), r"need 4, this machine shows 3 \(0, 1, 2\), 3 free: launch fewer"),
        (["0", "1"], 4, 1, 1, (), "lower the parallel sizes"),
        (EIGHT, 4, 2, 1, ("0", "1", "2", "3"), "this machine shows 8 .*, 4 free: launch fewer"),
        (["0", "1"], 1, 5, 2, (), "or let them share with gpu_memory_utilization: 0.30"),
        (["0", "1"], 1, 1, 1, ("0", "1"), "0 free: .* or let them share with gpu_memory_utilization: 0.45"),
        (["0"], 1, 1, 2, ("0", "0"), "0 free"),
    ],
)
def test_too_few_are_refused_with_what_to_do(found, each, count, share, used, said):
    with pytest.raises(ProfileError, match=said):
        devices.assign(found, each, count, share, used)


@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_every_replica_has_its_number_and_none_is_given_too_often(have, each, count, share):
    found = [str(n) for n in range(have)]
    try:
        given = devices.assign(found, each, count, share)
    except ProfileError:
        assert each * count > have and (each > 1 or count > share * have)
        return
    assert len(given) == count and all(len(ids) == len(set(ids)) == each for ids in given)
    used = [one for ids in given for one in ids]
    assert set(used) <= set(found)
    assert max(map(used.count, used)) <= (share if each == 1 and count > have else 1)


def test_what_an_environment_shows():
    assert devices.shown_by(devices.environment(["0", "MIG-1"])) == ("0", "MIG-1")
    assert devices.shown_by({"OMP_NUM_THREADS": "2"}) == ()
