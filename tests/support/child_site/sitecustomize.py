"""Is imported by Python at its start."""

import child_start  # noqa: F401
