"""torch, which runs transformers' models in tests, on one thread.

Small models spend several times as long on the barriers between torch's threads as on themselves,
and more where other processes use the cores.
"""

from __future__ import annotations

import importlib.util
from typing import Any

#: Why transformers' models cannot be run; None: they can.
MISSING = (
    None
    if importlib.util.find_spec("torch") is not None
    else "transformers' models need torch: pip install 'mlx-paged[oracle]'"
)


def oracle_torch() -> Any:
    """The module; imported by the first caller, as that takes seconds."""
    import torch

    torch.set_num_threads(1)
    return torch
