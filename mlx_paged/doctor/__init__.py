"""What is wrong with this machine or installation, and what to do about it.

The process that reports imports neither MLX nor the extension. All that needs them runs in a child
(`jobs`), so a build for another MLX, or a kernel that crashes, becomes a finding.
"""
