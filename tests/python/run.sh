#!/bin/bash
# Runs a test of this folder; its imports are this folder, the generated stubs and tools/.
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="tests/python:proto:tools" exec /usr/bin/python3 "$@"
