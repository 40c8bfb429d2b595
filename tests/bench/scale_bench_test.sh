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
epoch opened, connected
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
