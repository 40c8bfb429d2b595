#!/bin/bash
# refitctl's exit codes and one-line errors where no daemon is needed.
set -uo pipefail
refitctl=$PWD/$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset REFITD_SOCKET
failures=0

# expect CODE PATTERN ARGUMENT...: exits with CODE; one line of stderr has PATTERN (empty: anything goes)
expect() {
  local code=$1 pattern=$2
  shift 2
  local got=0
  "$refitctl" "$@" >"$folder/out" 2>"$folder/err" || got=$?
  if ((got != code)); then
    echo "refitctl $*: exit code $got, not $code" >&2
    failures=$((failures + 1))
  fi
  if [[ -n $pattern ]] && ! { grep -Eq "^refitctl: .*$pattern" "$folder/err" && (($(wc -l <"$folder/err") == 1)); }; then
    echo "refitctl $*: stderr is not one line with '$pattern':" >&2
    cat "$folder/err" >&2
    failures=$((failures + 1))
  fi
}

none=$folder/none.sock
expect 0 '' --help
expect 0 '' --version
expect 2 '' # no command
expect 2 '' status --bogus
expect 2 '' push --group g
expect 2 '' push "$folder" --group g --mode pigeon
expect 2 '' push "$folder" --group g --instances 2 # without --create
expect 2 'needs --socket' --address 127.0.0.1:1 push "$folder" --group g
expect 2 '--rank 2 is not below --world-size 2' engine --group g --checkpoint "$folder" --instance i --rank 2 --world-size 2
expect 3 "$none" --socket "$none" status
expect 3 "$none" --socket "$none" groups
expect 3 "$none" --socket "$none" members
expect 3 "$none" --socket "$none" watch --until-idle
expect 3 '127.0.0.1:1' --address 127.0.0.1:1 status
expect 1 "$folder: neither model.safetensors" --socket "$none" push "$folder" --group g
expect 1 "$folder: neither model.safetensors" --socket "$none" engine --group g --checkpoint "$folder" --instance i
expect 1 "$folder/none" validate "$folder/none"
echo 'nonsense: 1' >"$folder/bad.textproto"
expect 1 'bad.textproto.*nonsense' validate "$folder/bad.textproto"
echo '' >"$folder/good.textproto"
expect 0 '' validate "$folder/good.textproto"

exit $((failures > 0))
