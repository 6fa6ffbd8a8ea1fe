"""The assignment of GPUs (or MIG slices) to engines. Only `find` does I/O: it runs the driver's tool."""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Sequence

from replicas.launch.command import ProfileError

_GPU = re.compile(r"GPU (\d+):")
_MIG = re.compile(r"\s+MIG .*\(UUID:\s*(MIG-[^)\s]+)\)")
SECONDS = 20.0  # the driver may have to be loaded first: 2 to 10 s without persistence mode


def listed(text: str) -> list[str]:
    """Return the device ids in the output of `nvidia-smi -L`: a GPU's index, or the UUIDs of its MIG slices."""
    found: list[str] = []
    whole = False  # the last one found is a GPU without MIG slices so far
    for line in text.splitlines():
        if gpu := _GPU.match(line):
            found.append(gpu[1])
            whole = True
        elif mig := _MIG.match(line):
            if whole:
                found.pop()
                whole = False
            found.append(mig[1])
    return found


def find() -> list[str]:
    """Return the devices that this process may use: CUDA_VISIBLE_DEVICES if it is set, else all in this machine."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [] if given.strip() == "-1" else [part.strip() for part in given.split(",") if part.strip()]
    try:
        shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed(shown.stdout)


def assign(devices: list[str], each: int, count: int, share: int = 1, used: Sequence[str] = ()) -> list[list[str]]:
    """Return the devices for each of `count` new engines. Raises ProfileError if there are too few.

    `devices`: of the machine. `each`: how many an engine needs. `share`: how many engines fit into the memory of one
    device. `used`: devices of existing engines; a device with several engines occurs several times.
    Devices with neighbouring numbers go to one engine, as links between GPUs are best there.
    """
    if each > 1 and any(device.startswith("MIG-") for device in devices):
        raise ProfileError(
            f"a replica of {each} devices cannot use MIG slices, CUDA shows one of them to a process: set the parallel "
            "sizes to 1, or turn MIG off (`nvidia-smi -mig 0`)"
        )
    free = [device for device in devices if device not in used]
    if each * count <= len(free):
        return [free[i * each : (i + 1) * each] for i in range(count)]
    if each == 1 and devices and count + len(used) <= share * len(devices):
        holds = Counter({device: used.count(device) for device in devices})
        return [[_take_emptiest(holds)] for _ in range(count)]
    have = f"this machine shows {len(devices)} ({', '.join(devices)})" if devices else "this machine shows none"
    if len(free) < len(devices):
        have += f", {len(devices) - len(free)} in use"
    remedy = (
        f"launch {len(free) // each}"
        if len(free) >= each
        else "lower the parallel sizes"
        if not used
        else "stop what runs there"
    )
    if each == 1 and devices:
        most = 0.9 / -(-(count + len(used)) // len(devices))
        remedy += f", or let them share with gpu_memory_utilization: {most:.2f}"
    if not devices:
        remedy = "check `nvidia-smi -L` and CUDA_VISIBLE_DEVICES, or use `device: cpu`"
    raise ProfileError(f"{count} replicas of {each} GPUs need {each * count}, {have}: {remedy}")


def _take_emptiest(holds: Counter[str]) -> str:
    device = min(holds, key=holds.__getitem__)  # the first of several
    holds[device] += 1
    return device


def environment(devices: list[str]) -> dict[str, str]:
    """Return the environment variables that show an engine only these devices, numbered as by nvidia-smi."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def shown_by(environment: dict[str, str]) -> tuple[str, ...]:
    """Return the devices that an `environment` shows to an engine."""
    return tuple(filter(None, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")))
