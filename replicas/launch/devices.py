"""The assignment of GPUs (or MIG slices) to engines. Only `find` does I/O: it runs the driver's tool."""

import os
import re
import subprocess
from collections.abc import Sequence

from replicas.launch.command import ProfileError

_GPU = re.compile(r"^GPU (\d+):", re.MULTILINE)
SECONDS = 20.0  # the driver may have to be loaded first: 2 to 10 s without persistence mode


def find() -> list[str]:
    """Return the devices that this process may use: CUDA_VISIBLE_DEVICES if it is set, else all GPUs in this machine.

    MIG slices are used only if CUDA_VISIBLE_DEVICES names them.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [] if given.strip() == "-1" else [part.strip() for part in given.split(",") if part.strip()]
    try:
        shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return _GPU.findall(shown.stdout)


def assign(devices: list[str], each: int, count: int, share: int = 1, used: Sequence[str] = ()) -> list[list[str]]:
    """Return the devices for each of `count` new engines. Raises ProfileError if there are too few.

    `devices`: of the machine. `each`: how many an engine needs. `share`: how many engines fit into the memory of one
    device. `used`: devices of existing engines; a device with several engines occurs several times.
    Devices with neighbouring numbers go to one engine, as links between GPUs are best there.
    """
    free = [device for device in devices if device not in used]
    if each * count <= len(free):
        return [free[i * each : (i + 1) * each] for i in range(count)]
    if each == 1 and devices and count + len(used) <= share * len(devices):
        taken = list(used)
        for _ in range(count):
            taken.append(min(devices, key=taken.count))  # the first of those with fewest engines
        return [[device] for device in taken[len(used) :]]
    if not devices:
        have, remedy = "none", "check `nvidia-smi -L` and CUDA_VISIBLE_DEVICES, or use `device: cpu`"
    else:
        have = f"{len(devices)} ({', '.join(devices)}), {len(free)} free"
        remedy = "launch fewer, stop what runs there, or lower the parallel sizes"
        if each == 1:
            most = 0.9 / -(-(count + len(used)) // len(devices))
            remedy += f", or let them share with gpu_memory_utilization: {most:.2f}"
    raise ProfileError(f"{count} replicas of {each} GPUs need {each * count}, this machine shows {have}: {remedy}")


def environment(devices: list[str]) -> dict[str, str]:
    """Return the environment variables with which an engine sees only these devices.

    Devices are numbered in the order of the PCI bus, as nvidia-smi numbers them.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def shown_by(environment: dict[str, str]) -> tuple[str, ...]:
    """Return the devices that an engine with these environment variables sees."""
    return tuple(filter(None, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")))
