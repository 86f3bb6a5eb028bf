#!/bin/sh
# Says in one line each what this machine lacks for building radixd, and exits 1 if anything.
python="${1:-python3}"
missing=0
need() {
    echo "radixd: $1" >&2
    missing=1
}
if ! command -v "$python" >/dev/null 2>&1; then
    need "no $python found: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv python3-dev)"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    need "$("$python" --version) is too old: Python 3.11 or newer is needed; name one with 'make PYTHON=...'"
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        need "this Python cannot create environments (Debian: apt-get install python3-venv)"
    "$python" -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        need "this Python has no headers for building extensions (Debian: apt-get install python3-dev)"
fi
compiler="${CXX:-c++}"
command -v "$compiler" >/dev/null 2>&1 ||
    need "no C++ compiler found as '$compiler' (Debian: apt-get install g++), or name one with CXX=..."
exit $missing
