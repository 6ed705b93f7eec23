"""Adapters of all layers in every family: as models with changed weights."""

from __future__ import annotations

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import pytest
from support.adapters import check_adapters_of_all_layers
from support.family_configs import CONFIGS, config_of
from support.parity import family_model
from support.reference import ON_GPU

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.wrap import convert_to_paged

# Not here: families that need a package of their own, or a kernel of Metal.
ELSEWHERE = {"olmo", "bitnet", "muse_spark"}


@pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")
@pytest.mark.one_in(15)
@pytest.mark.parametrize("family", sorted({*CONFIGS} - ELSEWHERE))
def test_adapters_of_all_layers(family: str) -> None:
    def make() -> PagedModel:
        mx.random.seed(0)
        return convert_to_paged(family_model(config_of(family)), family, block_size=16)

    try:
        make()
    except UnsupportedModelError as error:
        pytest.skip(f"not served: {error}")
    check_adapters_of_all_layers(make)
