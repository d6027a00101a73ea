"""Set-up for all tests."""

import torch

# Tests run in several processes: one thread each, or they wait for each other's cores.
torch.set_num_threads(1)
