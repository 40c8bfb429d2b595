#!/bin/bash
# Plans of published models: exit codes, what is printed, and one-line errors.
set -uo pipefail
plan_models=$PWD/$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0

# expect CODE PATTERN ARGUMENT...: exits with CODE; one line of stderr has PATTERN (empty: anything goes)
expect() {
  local code=$1 pattern=$2
  shift 2
  local got=0
  "$plan_models" "$@" >"$folder/out" 2>"$folder/err" || got=$?
  if ((got != code)); then
    echo "plan_models $*: exit code $got, not $code" >&2
    failures=$((failures + 1))
  fi
  if [[ -n $pattern ]] && ! { grep -Eq "^plan_models: .*$pattern" "$folder/err" && (($(wc -l <"$folder/err") == 1)); }; then
    echo "plan_models $*: stderr is not one line with '$pattern':" >&2
    cat "$folder/err" >&2
    failures=$((failures + 1))
  fi
}

# shows PATTERN: the last command's stdout has it
shows() {
  if ! grep -Eq "$1" "$folder/out"; then
    echo "stdout has no '$1':" >&2
    cat "$folder/out" >&2
    failures=$((failures + 1))
  fi
}

# 4 trainers and 4 engines share a node; then 2 trainer nodes, 2 instances of one node each.
tiny=(--model qwen3-0.6b --trainer world=4,tp=2 --engine tp=4)
expect 0 '' explain "${tiny[@]}"
shows 'worst link: trainer [0-3] supplies [0-9.]+ MiB'
shows ', 0 B of them over the wire'
wide=(--model qwen3-0.6b --trainer world=16,tp=2 --engine tp=8,instances=2)
expect 0 '' explain "${wide[@]}" -o json
shows '"wireBytes": "[1-9][0-9]+"'
expect 0 '' explain "${wide[@]}" --pushed model.norm.weight --rows 1
shows 'lower bound [0-9.]+ [GM]iB'
shows 'and 1 more'
expect 0 '' explain --model qwen3-0.6b --trainer fsdp=8 --engine tp=8 --colocated
expect 0 '' estimate "${wide[@]}" --link-rates rank-out=10G,node-out=1M
shows 'limited by: node [01] sends'
expect 0 '' estimate "${wide[@]}" --link-rates node-out=1G -o json
shows '"limit": "node [01] sends"'
expect 2 'node-up=1' estimate "${wide[@]}" --link-rates node-up=1
expect 2 'node-out=fast' estimate "${wide[@]}" --link-rates node-out=fast
expect 2 '' estimate "${wide[@]}"
expect 2 ''
expect 2 'pq=2' explain --model qwen3-0.6b --trainer pq=2 --engine tp=1
expect 2 'tp=0' explain --model qwen3-0.6b --trainer tp=0 --engine tp=1
expect 2 "tp=2'" explain --model qwen3-0.6b --trainer tp=2,tp=2 --engine tp=1
expect 2 'ep=3' explain --model qwen3-0.6b --trainer world=1 --engine tp=2,ep=3
expect 2 'gpt-5' explain --model gpt-5 --trainer world=1 --engine tp=1
expect 2 'divisible' explain --model qwen3-0.6b --trainer world=3,tp=3 --engine tp=1
expect 2 '65536 ranks' explain --model qwen3-0.6b --trainer world=1 --engine tp=1000000

exit $((failures > 0))
