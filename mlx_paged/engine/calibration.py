"""Calibrates the kernels when an engine starts (`mlx_paged.calibration`)."""

from __future__ import annotations

import logging

from mlx_paged import kernels
from mlx_paged.calibration import machine
from mlx_paged.calibration.cache import Cache
from mlx_paged.calibration.calibrate import calibrate
from mlx_paged.calibration.cases import Needs
from mlx_paged.calibration.model_needs import needs_of
from mlx_paged.calibration.verdicts import Verdicts
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.platform import Platform, has_gpu_kernels

logger = logging.getLogger(__name__)


def prove_kernels(paged: PagedModel, mode: str) -> Verdicts | None:
    """Calibrates the kernels of a model before its pools are allocated, and applies the verdicts.

    Args:
        mode: See `EngineConfig.calibrate`.

    Returns:
        None if this device or this mode needs no calibration.

    Raises:
        RejectedKernelError: Nothing can replace a rejected kernel of the model.
    """
    is_wanted = machine.is_needed(paged.platform) or (mode == "force" and has_gpu_kernels())
    if mode == "off" or not is_wanted:
        return None
    needs = needs_of(paged)
    verdicts = calibrate(needs, Cache(machine.key()), anew=mode == "force")
    verdicts.require(needs.layers)
    paged.platform = Platform.current()
    for kernel, reason in sorted(verdicts.rejected.items()):
        logger.warning("calibration rejected the kernel %s: %s", kernel, reason)
    return verdicts


def follow_known_verdicts() -> None:
    """Rejects the kernels that an earlier start rejected, for code without an engine.

    Runs nothing, and leaves a process alone that has calibrated itself.
    """
    if machine.is_needed(Platform.current()) and not kernels.rejected:
        known = Verdicts.of(Cache(machine.key()).load(), Needs("float32", (), 32))
        kernels.reject_kernels(known.rejected)
