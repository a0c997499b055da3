"""What every test shares: one thread, since the models are small and the suite runs in several processes."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
