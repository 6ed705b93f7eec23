"""doctor: finds problems of this machine or installation, and says how to solve them.

The process that reports imports neither MLX nor the extension. All that needs them runs in a child
(`jobs`), so a build for another MLX, or a kernel that crashes, becomes a finding.
"""
