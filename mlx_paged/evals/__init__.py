"""Evaluations: lm_eval's tasks and tool calls, through the server's own API."""

from __future__ import annotations

import os

# Progress is shown by the verb. tqdm reads this when it is imported, which lm_eval does.
os.environ.setdefault("TQDM_DISABLE", "1")
