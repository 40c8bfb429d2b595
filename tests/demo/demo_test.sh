#!/bin/bash
# The main job on a small model: its exit code, and the object of its last line.
set -euo pipefail
output=$("$1" --model tiny --json --slot-bytes 65536 --bucket-bytes 64KiB --wait 60) || {
  echo "$output"
  echo "the demo failed" >&2
  exit 1
}
echo "$output"
pattern='^\{"versions":\[1,2,3\],"engines":3,"tensors":46,"bytes":[0-9]+,"verified":true,'
pattern+='"update_seconds":\[[0-9.e-]+,[0-9.e-]+,[0-9.e-]+\]\}$'
tail -n 1 <<<"$output" | grep -Eq "$pattern"
