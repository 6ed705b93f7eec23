"""``python -m mlx_paged.doctor``: the JSON report, with Python's standard library alone.

For an installation in which not even the command line starts.
"""

import sys

from mlx_paged.doctor.examine import examine
from mlx_paged.doctor.report import dumps

if __name__ == "__main__":
    examination = examine()
    print(dumps(examination))
    sys.exit(examination.exit_status)
