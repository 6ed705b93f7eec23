"""`mlx-paged bench kernels`: every native primitive against what the machine can do."""
