"""``python -m mlx_paged.doctor``: the JSON report, with Python's standard library alone.

For an installation in which not even the command line starts.
"""

import sys

from mlx_paged.doctor.report import examine

if __name__ == "__main__":
    report = examine()
    print(report.dumps())
    sys.exit(report.exit_status)
