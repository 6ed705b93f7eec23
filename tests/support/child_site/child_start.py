"""Makes interpreters that tests start do so in less time: `python_path` and conftest.py name it.

torch is hidden; transformers would import it. So is trio, which clients over HTTP would import and
not use: an eighth of such a start. Hypothesis loads no plugins: the only one is trio's.
"""

from __future__ import annotations

import os
import sys

import transformers_table  # noqa: F401

for name in ("torch", "trio"):
    sys.modules[name] = None  # type: ignore[assignment]
os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # trio has one, and would be imported for it
