"""``python -m mlx_paged``: the command line of `mlx-paged`."""

if __name__ == "__main__":
    from mlx_paged.cli.main import main

    main()
