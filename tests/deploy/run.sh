#!/bin/bash
# Runs a test of this folder; its imports are this folder.
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="tests/deploy" exec /usr/bin/python3 "$@"
