#!/bin/bash
# Runs a test of this folder with the stubs of the release before, and with the tools of tests/python.
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="tests/compat/v1_previous:tests/python" exec /usr/bin/python3 "$@"
