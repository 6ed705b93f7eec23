"""Imports mlx-vlm for tests, without its side effect of silencing child processes."""

from mlx_paged.multimodal.mlx_vlm import import_mlx_vlm

mlx_vlm = import_mlx_vlm()
