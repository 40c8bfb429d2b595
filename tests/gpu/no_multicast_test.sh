#!/usr/bin/env bash
# no_multicast_test.sh BINARY...: none names a call of the driver that makes NVLink multicast objects. The driver's calls are
# found by name at run time, so that a name is what a call needs.
set -euo pipefail
for binary in "$@"; do
  if ! grep -aq cuMemCreate "$binary" && grep -aq cuInit "$binary"; then
    echo "$binary: this test looks for names, and finds none that it should have" >&2
    exit 1
  fi
  if grep -aoE 'cuMulticast[A-Za-z]*' "$binary"; then
    echo "$binary names it" >&2
    exit 1
  fi
done
