"""What is wrong with this machine or installation, and what to do about it.

The process that reports imports neither MLX nor the extension: everything that needs them runs in
a child (`child`), so that a build for another MLX, or a kernel that crashes, is a finding and not
the end. What is found out is read by pure functions over captured text (`hardware`, `versions`).
"""
