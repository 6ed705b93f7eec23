"""`mlx-paged bench kernels`: every native primitive against the machine's bandwidth."""
