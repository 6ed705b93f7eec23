"""torch on one thread, which runs transformers' models in tests.

Small models spend several times as long on barriers between torch's threads as on computation, and
even more if other processes use the cores.
"""

from __future__ import annotations

import importlib.util
from typing import Any

#: Reason why transformers' models cannot run; None if they can.
MISSING = (
    None
    if importlib.util.find_spec("torch") is not None
    else "transformers' models need torch: pip install 'mlx-paged[oracle]'"
)


def oracle_torch() -> Any:
    """Returns the module; imported on first use, because that takes seconds."""
    import torch

    torch.set_num_threads(1)
    return torch
