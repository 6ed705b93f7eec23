"""All checks that mutants of metal/ must fail, as one module."""

from support.metal_attention_checks import *  # noqa: F403
from support.metal_layer_checks import *  # noqa: F403
