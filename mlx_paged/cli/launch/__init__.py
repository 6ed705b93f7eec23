"""`mlx-paged launch`: starts a coding agent on a local server."""
