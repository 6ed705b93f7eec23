"""``python -m mlx_paged.doctor``: the JSON report, using only Python's standard library.

For installations whose command line does not start.
"""

import sys

from mlx_paged.doctor.report import examine

if __name__ == "__main__":
    report = examine()
    print(report.dumps())
    sys.exit(report.exit_status)
