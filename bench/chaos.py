"""One engine of four turns slow, in virtual time, while lower classes ask for more than there is.

    python -m bench.chaos [--window SECONDS] [--seed N] [--free SHARE] [--saturation RATE]

Premium asks for 6 % of saturation, standard for 16 %, free for all of it. One engine takes twice as long for each step
from the second window to the end of the fourth. The same requests are played without the fault as well, since such a
load has the control of overload hold a step or two on a good day: what is normal is what they find then.

By window, with the fault and without: the share of premium's requests that kept its limits, what free got of its
answers within limits a second, and how many steps the control of overload held at the window's end.
`windows_to_normal`: the number, from the fault's end on, of the first window in which premium kept 95 % of its limits,
free got at least NORMAL of what it gets without the fault, and at whose end no more steps were held than without it;
none if there is no such window.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from loadgen.simulate import Fleet
from policies import Admission, Classes, Rules
from replicas.simulated.engine import Engine
from replicas.simulated.profile import Profile, StepDurations, load_profile

from .overload_load import CLASSES, REPLICAS, met, turns

LOAD = {"premium": 0.06, "standard": 0.16, "free": 1.0}
SLOW_FROM, SLOW_TO, WINDOWS = 1, 4, 7
FACTOR = 2.0
KEPT, NORMAL = 0.95, 0.9


class Slow(StepDurations):
    """Of an engine at half its speed."""

    __slots__ = ()

    def seconds(self, tokens: int, pairs: float, sequences: int, context: int, step: int = 0) -> float:
        return FACTOR * super().seconds(tokens, pairs, sequences, context, step)


def _turn(engine: Engine, durations: type[StepDurations], profile: Profile) -> None:
    engine.durations = durations(profile)


def chaos(
    full: float, seed: int, window: float = 30.0, control: bool = True, free: float = LOAD["free"]
) -> dict[str, Any]:
    """By window, from the first on."""
    windows, steps = _played(full, seed, window, control, free, True)
    normal, normal_steps = _played(full, seed, window, control, free, False)
    slow = windows[SLOW_FROM:SLOW_TO]
    back = [is_normal(one, other) for one, other in zip(windows[SLOW_TO:], normal[SLOW_TO:], strict=True)]
    return {
        "windows_to_normal": back.index(True) + 1 if True in back else None,
        "premium_kept_while_slow": sum(one["premium_kept"] for one in slow) / len(slow),
        "steps": steps,
        "windows": windows,
        "without_fault": {"steps": normal_steps, "windows": normal},
    }


Step = tuple[float, str, str, bool]  # when, which, of which class, and whether it was taken or undone


def _played(
    full: float, seed: int, window: float, control: bool, free: float, fault: bool
) -> tuple[list[dict[str, Any]], list[Step]]:
    end, profile = WINDOWS * window, load_profile("gpu-8b")
    rules = Rules(control_window=window if control else None)
    fleet = Fleet([profile] * REPLICAS, "least_time", seed, admission=lambda _: Admission(Classes(CLASSES), rules))
    for kind, one in enumerate(CLASSES, 20):
        for when, turn in turns((LOAD | {"free": free})[one.name] * full, 0.0, end, kind, seed, one.name):
            fleet.at(when, fleet.send, turn)
    for when, durations in ((SLOW_FROM, Slow), (SLOW_TO, StepDurations)) if fault else ():
        fleet.at(when * window, _turn, fleet.replicas[0].engine, durations, profile)
    records = fleet.run().records
    steps = [(when, change.step, change.qos, change.taken) for when, change in fleet.gates[0].changes]
    found = []
    for number in range(WINDOWS):
        begin, until = number * window, (number + 1) * window
        mine = {one.name: [r for r in records if r.turn.qos == one.name and begin <= r.sent < until] for one in CLASSES}
        premium = mine["premium"]
        found.append(
            {
                "premium_kept": sum(map(met, premium)) / max(1, len(premium)),
                "free_good": sum(map(met, mine["free"])) / window,
                "slow": fault and SLOW_FROM <= number < SLOW_TO,
                "held": sum([1 if taken else -1 for when, _, _, taken in steps if when <= until]),
            }
        )
    return found, steps


def is_normal(window: dict[str, Any], without: dict[str, Any]) -> bool:
    """Whether a window after the fault is as it would be without it."""
    return (
        window["premium_kept"] >= KEPT
        and window["free_good"] >= NORMAL * without["free_good"]
        and window["held"] <= without["held"]
    )


def table(found: dict[str, Any]) -> str:
    lines = [f"{'window':<8}{'premium kept':>14}{'free good/s':>13}{'steps held':>12}{'without the fault':>25}"]
    for number, (one, other) in enumerate(zip(found["windows"], found["without_fault"]["windows"], strict=True)):
        normal = f"{other['premium_kept']:.1%}{other['free_good']:>8.1f}{other['held']:>4}"
        slow = "  one engine at half" if one["slow"] else ""
        lines.append(
            f"{number:<8}{one['premium_kept']:>14.1%}{one['free_good']:>13.1f}{one['held']:>12}{normal:>25}{slow}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--free", type=float, default=LOAD["free"], help="what it asks for, as a share of saturation")
    parser.add_argument("--saturation", type=float, default=73.4, help="requests a second, as bench.overload finds it")
    args = parser.parse_args()
    full = args.saturation
    for control in (False, True):
        found = chaos(full, args.seed, args.window, control, args.free)
        print("with the control of overload" if control else "without", table(found), sep="\n")
        print(f"premium_kept_while_slow: {found['premium_kept_while_slow']:.3f}")
        print(f"windows_to_normal: {found['windows_to_normal']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
