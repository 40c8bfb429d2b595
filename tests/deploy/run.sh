#!/bin/bash
# Runs a test of this folder; its imports are this folder and tests/python.
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="tests/deploy:tests/python" exec /usr/bin/python3 "$@"
