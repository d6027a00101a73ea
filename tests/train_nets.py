"""Small networks to train in tests, named as a user names his own: `train_nets:small`."""

import os
import signal
import time
from pathlib import Path

from torch import Tensor, nn

PARENT = os.getppid()


def small() -> nn.Sequential:
    """A network with a trunk to cache, batch norms and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, 1, 1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Conv2d(12, 12, 3, 1, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(12, 5),
    )


def pixels() -> nn.Module:
    """A network whose maps end as single pixels, under a batch norm."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5))


class Gate(nn.Module):
    """Let so many inputs pass, then wait until a file is gone: so a test finds a run in the middle of a step.

    The environment variable TRAIN_GATE names the file, which holds the number of inputs. Beside it, "NAME.reached" tells that
    the run waits, and "NAME.asked" that it knows of a first Ctrl-C.
    """

    passed = 0

    def forward(self, x: Tensor) -> Tensor:
        gate = Path(os.environ.get("TRAIN_GATE", "/nonexistent"))
        self.passed += 1
        while gate.exists() and self.passed > int(gate.read_text()) and os.getppid() == PARENT:
            gate.with_name(f"{gate.name}.reached").touch()
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                gate.with_name(f"{gate.name}.asked").touch()
            time.sleep(0.01)
        return x


def gated() -> nn.Module:
    return nn.Sequential(Gate(), *small())
