#!/bin/bash
# The benchmark of large groups runs, commits every update and prints every row. No figure of it is judged.
set -euo pipefail

printed=$("$1" --quick)
while read -r row; do
  if ! grep -F "| $row |" <<<"$printed" | grep -q '[0-9] ('; then
    printf 'no figure of "%s" in:\n%s\n' "$row" "$printed"
    exit 1
  fi
done <<'END'
join of a daemon
attach
RegisterLayout
Begin
Begin, assembling the update
Refit call
plan hand-out
node's program built
communicator opened, connected
Ready
bucket
part's header agreed to
part's end
Ack
replicas compared
refit's end on a node
read-back's end on a node
Commit
Commit, decided
joined daemon: RegisterLayout
joined daemon: Prepare
joined daemon: part's header
END

# --json prints one object a line, with the fields that every benchmark has, and nothing else.
"$1" --quick --json --data refit | python3 -c '
import json, sys
rows = [json.loads(line) for line in sys.stdin]
assert "refit, 2 instances: Refit call" in [row["case"] for row in rows], rows
for row in rows:
    assert row["bench"] == "scale" and row["unit"] == "ms" and row["value"] >= 0, row
    assert row["goal"] > 0 and isinstance(row["reached"], bool) and row["events"] > 0, row
'
