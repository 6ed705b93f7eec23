"""Each deviation of mlx-lm that loading mends is still one, and docs/models.md lists it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.oracle_torch import MISSING
from support.reference_configs import REFERENCES
from support.reference_models import TOLERANCE, differences

# isort: split
import mlx_lm

from mlx_paged.model import deviations, mlx_lm_config, mlx_lm_weights
from mlx_paged.model.deviations import DEVIATIONS, MLX_LM, TRANSFORMERS, Deviation
from mlx_paged.model.families import PROVEN


@pytest.mark.one_in(17)
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda deviation: deviation.shown_by)
def test_it_still_deviates(
    deviation: Deviation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(other for other in DEVIATIONS if other is not deviation)
    monkeypatch.setattr(deviations, "DEVIATIONS", others)
    if deviation.mend is deviations._elsewhere:
        [module] = deviation.modules
        monkeypatch.delitem(mlx_lm_weights._RENAMED, module, raising=False)
        fields = mlx_lm_config._FIELDS.get(module)
        if fields is not None:
            window = {"sliding_window_size": REFERENCES[module].config["sliding_window"] - 1}
            monkeypatch.setitem(mlx_lm_config._FIELDS, module, lambda s: {**fields(s), **window})
    found = differences(REFERENCES[deviation.shown_by], tmp_path)
    assert max(found) > TOLERANCE, (
        f"mlx-lm {mlx_lm.__version__} does as transformers does: {deviation.what!r} can go"
    )


def test_the_version_is_the_one_compared() -> None:
    """A newer one is compared again by running these tests with it, and written down here."""
    assert mlx_lm.__version__ == MLX_LM


def test_the_page_lists_them() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
    table = page.split("<!-- deviations: written")[1].split("<!-- deviations: end")[0]
    assert f"mlx-lm {MLX_LM}, transformers {TRANSFORMERS}." in table
    for deviation in DEVIATIONS:
        assert f"| {', '.join(deviation.modules)} | {deviation.what} |" in table
        assert {*deviation.modules} <= {*PROVEN, "every module"}
