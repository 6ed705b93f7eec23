"""`mlx-paged serve`: validates options, and starts engines and a server."""
