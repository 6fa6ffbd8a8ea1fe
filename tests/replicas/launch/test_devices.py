import os
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
SLICED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111-aa)
  MIG 3g.20gb     Device  1: (UUID: MIG-2222-bb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb)
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(text, code=0): such a program on PATH."""

    def install(text: str, code: int = 0):
        (tmp_path / "said").write_text(text)
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 3\n/bin/cat {tmp_path}/said\nexit {code}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


def test_whole_gpus_by_index_and_slices_instead_of_the_gpu_they_are_cut_from():
    assert devices.listed(TWO) == ["0", "1"]
    assert devices.listed(SLICED) == ["MIG-1111-aa", "MIG-2222-bb", "1"]
    assert devices.listed("No devices found.\n") == []


def test_what_the_machine_says(nvidia_smi):
    nvidia_smi(TWO)
    assert devices.find() == ["0", "1"]
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the driver.", 9)
    assert devices.find() == []


def test_the_environment_comes_before_the_machine(nvidia_smi, monkeypatch):
    nvidia_smi(TWO)
    for visible, found in [("3, 1", ["3", "1"]), ("", []), ("-1", []), ("MIG-7", ["MIG-7"])]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert devices.find() == found


def test_no_driver_no_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.find() == []
    assert os.environ["PATH"] == str(tmp_path)


def test_neighbours_go_together():
    eight = [str(n) for n in range(8)]
    assert devices.assign(eight, 4, 2) == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert devices.assign(eight, 1, 3) == [["0"], ["1"], ["2"]]
    assert devices.assign(["MIG-a", "MIG-b"], 1, 2) == [["MIG-a"], ["MIG-b"]]


def test_replicas_share_a_gpu_when_their_memory_fits():
    assert devices.assign(["0", "1"], 1, 4, share=2) == [["0"], ["1"], ["0"], ["1"]]
    with pytest.raises(
        ProfileError, match="5 replicas of 1 GPUs need 5.*launch 2, or let them share with gpu_memory_utilization: 0.30"
    ):
        devices.assign(["0", "1"], 1, 5, share=2)


@pytest.mark.parametrize(
    "found, each, count, said",
    [
        ([], 1, 2, "2 replicas of 1 GPUs need 2, this machine shows none: check `nvidia-smi -L`"),
        (["0", "1", "2"], 2, 2, r"need 4, this machine shows 3 \(0, 1, 2\): launch 1"),
        (["0", "1"], 4, 1, "lower the parallel sizes"),
        (["MIG-a", "MIG-b"], 2, 1, "cannot use MIG slices"),
    ],
)
def test_too_few_are_refused_with_what_to_do(found, each, count, said):
    with pytest.raises(ProfileError, match=said):
        devices.assign(found, each, count)


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


def test_devices_in_use_are_left_alone():
    eight = [str(number) for number in range(8)]
    assert devices.assign(eight, 4, 1, used=["0", "1", "2", "3"]) == [["4", "5", "6", "7"]]
    assert devices.assign(eight, 1, 2, used=["0", "2"]) == [["1"], ["3"]]
    with pytest.raises(ProfileError, match="this machine shows 8 .*, 4 in use: launch 1"):
        devices.assign(eight, 4, 2, used=["0", "1", "2", "3"])
    with pytest.raises(
        ProfileError, match="2 in use: stop what runs there, or let them share with gpu_memory_utilization: 0.45"
    ):
        devices.assign(["0", "1"], 1, 1, used=["0", "1"])


def test_replicas_that_share_go_where_the_fewest_are():
    assert devices.assign(["0", "1"], 1, 1, share=2, used=["0", "1", "0"]) == [["1"]]
    assert devices.assign(["0", "1"], 1, 2, share=2, used=["1"]) == [["0"], ["0"]]
    with pytest.raises(ProfileError):
        devices.assign(["0"], 1, 1, share=2, used=["0", "0"])


def test_what_an_environment_shows():
    assert devices.shown_by(devices.environment(["0", "MIG-1"])) == ("0", "MIG-1")
    assert devices.shown_by({"OMP_NUM_THREADS": "2"}) == ()
