#!/bin/sh
# librefit.so exports what the headers declare, and nothing else.
#   exports_test.sh LIBRARY HEADER...
set -eu
library=$1
shift
exported=$(nm -D --defined-only "$library" | awk '{print $NF}' | sort)
declared=$(cat "$@" | grep -oE '^[a-z].*\brefit_[a-z_]+\(' | grep -v typedef | grep -oE 'refit_[a-z_]+\($' | tr -d '(' | sort)
if [ "$exported" != "$declared" ]; then
  printf '%s\n' "$exported" >exported
  printf '%s\n' "$declared" >declared
  echo "exported (<) and declared (>):"
  diff exported declared
fi
echo "$(echo "$exported" | wc -l) functions exported"
