#!/bin/bash
# Runs the tests of a module of this folder with the distribution's Python, against what Bazel built: run.sh MODULE
set -euo pipefail
export REFIT_LIBRARY=$PWD/client/librefit.so REFIT_HEADER=$PWD/client/refit.h
export REFITD_BINARY=$PWD/daemon/refitd REFITCTL_BINARY=$PWD/daemon/refitctl/refitctl
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD/client/python:$PWD/client/python/tests
status=0
/usr/bin/python3 -m pytest -p no:cacheprovider -rs -W error::ResourceWarning "client/python/tests/$1.py" || status=$?
# 5: there is no test, since the whole module needs torch, which is skipped above with its reason.
if ((status == 5)) && ! /usr/bin/python3 -c 'import torch' 2>/dev/null; then exit 0; fi
exit "$status"
