"""doctor: finds problems of this machine or installation, and suggests remedies.

The reporting process imports neither MLX nor the extension. Every check that needs them runs in a
child (`jobs`), so a build for another MLX, or a kernel that crashes, becomes a finding.
"""
