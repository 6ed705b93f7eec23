"""`mlx-paged serve`: options become engines and a server."""
