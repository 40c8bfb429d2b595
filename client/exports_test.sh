#!/bin/sh
# librefit.so exports refit_* and nothing else, and everything that refit.h declares.
#   exports_test.sh LIBRARY HEADER
set -eu
exported=$(nm -D --defined-only "$1" | awk '{print $NF}' | sort)
foreign=$(echo "$exported" | grep -v '^refit_' || true)
if [ -n "$foreign" ]; then
  echo "exported, but not refit_*: $foreign"
  exit 1
fi
declared=$(grep -oE '\brefit_[a-z_]+\(' "$2" | tr -d '(' | sort -u)
for name in $declared; do
  echo "$exported" | grep -qx "$name" || { echo "declared, but not exported: $name"; exit 1; }
done
echo "$(echo "$exported" | wc -l) functions exported"
