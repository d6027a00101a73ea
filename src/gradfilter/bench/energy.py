"""Energy, where the machine counts it: RAPL of PCs and servers, power rails of Jetson boards."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NONE = "Energy: no counter on this machine."
TOTAL_RAILS = ("VDD_IN", "POM_5V_IN")
"""Rails of Jetson boards that feed all others."""


class Counter(ABC):
    """A way to tell the energy that the machine takes."""

    name: str

    @abstractmethod
    def measure(self, run: Callable[[], Any]) -> float:
        """Return the joules that the machine takes in `run()`, whatever else it does meanwhile included."""


@dataclass(frozen=True)
class Rapl(Counter):
    """Counters of microjoules that start again at zero behind the largest number they hold.

    Attributes:
        zones: Folders of sysfs, each with `energy_uj` and `max_energy_range_uj`.
    """

    zones: Sequence[Path]

    @property
    def name(self) -> str:  # type: ignore[override]
        """What is counted."""
        return "RAPL (" + ", ".join((zone / "name").read_text(encoding="ascii").strip() for zone in self.zones) + ")"

    def measure(self, run: Callable[[], Any]) -> float:
        """Return the joules of all zones; a run is far shorter than the minute and more that a counter takes to wrap."""
        before = [read_number(zone / "energy_uj") for zone in self.zones]
        run()
        after = [read_number(zone / "energy_uj") for zone in self.zones]
        total = 0.0
        for zone, first, last in zip(self.zones, before, after, strict=True):
            total += last - first if last >= first else last - first + read_number(zone / "max_energy_range_uj")
        return total / 1e6


@dataclass(frozen=True)
class Rails(Counter):
    """Sensors of the power right now, looked at again and again.

    Attributes:
        rails: By name, the files whose product is the power in microwatts: millivolts and milliamperes; or one, of milliwatts.
        pause: Seconds between two looks.
    """

    rails: dict[str, tuple[Path, ...]]
    pause: float = 0.01

    @property
    def name(self) -> str:  # type: ignore[override]
        """What is measured."""
        return f"power rails ({', '.join(self.rails)})"

    def find_watts(self) -> float:
        """Return the power of all rails now."""
        return sum(
            read_number(files[0]) * read_number(files[1]) / 1e6 if len(files) == 2 else read_number(files[0]) / 1e3
            for files in self.rails.values()
        )

    def measure(self, run: Callable[[], Any]) -> float:
        """Return the mean power over `run()` times its length."""
        done, seen = threading.Event(), [self.find_watts()]

        def watch() -> None:
            while not done.wait(self.pause):
                seen.append(self.find_watts())

        watcher = threading.Thread(target=watch, daemon=True)
        start = time.perf_counter()
        watcher.start()
        try:
            run()
        finally:
            seconds = time.perf_counter() - start
            done.set()
            watcher.join()
        return seconds * sum(seen) / len(seen)


def read_number(file: Path) -> float:
    """Return the number in a file of sysfs."""
    return float(file.read_text(encoding="ascii"))


def find_counter(system: Path = Path("/sys")) -> tuple[Counter | None, str]:
    """Return the machine's counter of energy, if there is one that can be read, and a sentence about it."""
    counter = find_rapl(system) or find_rails(system)
    if counter is None:
        return None, NONE
    try:
        counter.measure(lambda: None)
    except (OSError, ValueError) as error:
        return None, f"Energy: {counter.name} is here but cannot be read ({error}); often only root may."
    return counter, f"Energy: {counter.name}, of the whole machine while steps run one after the other."


def find_rapl(system: Path) -> Rapl | None:
    """Return the counters of all packages and, which these leave out, of memory."""
    names = {file.parent: file.read_text(encoding="ascii").strip() for file in system.glob("class/powercap/intel-rapl:*/name")}
    zones = [zone for zone in sorted(names) if names[zone].startswith("package") or names[zone] == "dram"]
    return Rapl(zones) if zones else None


def find_rails(system: Path) -> Rails | None:
    """Return the rail that feeds all others, or else all rails."""
    rails: dict[str, tuple[Path, ...]] = {}
    for current in sorted(system.glob("bus/i2c/drivers/ina3221*/*/hwmon/hwmon*/curr[0-9]_input")):
        number, folder = current.name[4], current.parent
        rails[find_label(folder / f"in{number}_label", folder.name + number)] = (folder / f"in{number}_input", current)
    for power in sorted(system.glob("bus/i2c/drivers/ina3221*/*/iio:device*/in_power[0-9]_input")):
        number, folder = power.name[8], power.parent
        rails[find_label(folder / f"rail_name_{number}", folder.name + number)] = (power,)
    total = {name: files for name, files in rails.items() if name in TOTAL_RAILS}
    return Rails(total or rails) if rails else None


def find_label(file: Path, otherwise: str) -> str:
    """Return what a rail is called."""
    return file.read_text(encoding="ascii").strip() if file.exists() else otherwise
