#!/bin/sh
# Checks that this machine has what a build needs before anything is downloaded. If not, says in one
# line what is missing and which command installs it.
#   scripts/check_tools.sh PYTHON
python=${1:-python3}
missing=

lacks() {
  missing="$missing${missing:+, }$1"
}

if ! command -v "$python" > /dev/null; then
  lacks "Python 3.11 or newer"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
  lacks "Python 3.11 or newer ($python is older; choose another with PYTHON=...)"
else
  "$python" -c 'import ensurepip, venv' 2> /dev/null || lacks "Python's venv module"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    lacks "Python's headers"
fi

# The first of those that CMake tries.
compiler=
for name in ${CXX:-c++ g++ clang++}; do
  if command -v "$name" > /dev/null; then
    compiler=$name
    break
  fi
done
if [ -z "$compiler" ]; then
  lacks "a C++20 compiler"
elif ! echo '#include <concepts>' | "$compiler" -std=c++20 -fsyntax-only -x c++ - 2> /dev/null; then
  lacks "a C++20 compiler ($compiler does not compile C++20)"
fi

[ -z "$missing" ] && exit 0
if [ "$(uname -s)" = Darwin ]; then
  remedy="xcode-select --install"
elif command -v apt-get > /dev/null; then
  remedy="scripts/install_apt.sh"
else
  remedy="your package manager (scripts/install_apt.sh names Debian's packages)"
fi
echo "mlx_paged cannot be built here. Missing: $missing. To install: $remedy" >&2
exit 1
