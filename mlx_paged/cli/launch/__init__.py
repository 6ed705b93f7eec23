"""`mlx-paged launch`: starts a coding agent on a server of this machine."""
