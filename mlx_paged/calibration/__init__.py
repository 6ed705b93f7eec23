"""Calibration: proves the GPU kernels on the machine they run on, and times the alternatives.

Every kernel that a model can use runs once against MLX's own operations (`check`), and shapes that
several kernels can serve are timed (`timing`). A child process runs these jobs, so a kernel that
crashes or hangs fails one job. `cases` lists the jobs of a model, `verdicts` turns outcomes into
rejected kernels and the rows of whole steps, `cache` keeps outcomes for this machine, and
`calibrate` joins them within a time limit.
"""
