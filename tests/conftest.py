"""Set-up for all tests."""

import os

import torch
from hypothesis import settings

# Tests run in several processes: one thread each, or they wait for each other's cores.
torch.set_num_threads(1)

# In CI the same examples every time: a change fails for what it changed. At home, new ones every time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
