"""mlx-vlm for tests, imported so that it does not silence what they start."""

from mlx_paged.multimodal.mlx_vlm import import_mlx_vlm

mlx_vlm = import_mlx_vlm()
