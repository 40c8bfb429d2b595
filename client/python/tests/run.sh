#!/bin/bash
# Runs a test module of this folder with the distribution's Python, against what Bazel built: run.sh MODULE
set -euo pipefail
export REFIT_LIBRARY=$PWD/client/librefit.so REFIT_HEADER=$PWD/client/refit.h
export REFITD_BINARY=$PWD/daemon/refitd REFITCTL_BINARY=$PWD/daemon/refitctl/refitctl
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD/client/python:$PWD/client/python/tests
exec /usr/bin/python3 -m unittest -v "$1"
