#!/bin/bash
# refitctl's exit codes and one-line errors where no daemon is needed.
set -uo pipefail
refitctl=$PWD/$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset REFITD_SOCKET REFITD_GROUP REFITD_INSTANCE
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
expect 3 "$none" --socket "$none" ready --group g --instance i
expect 5 "$none" --socket "$none" --timeout 0.2 ready --group g --instance i --wait
expect 2 '' ready --group g
REFITD_INSTANCE=i expect 3 "$none" --socket "$none" ready --group g
expect 3 '127.0.0.1:1' --address 127.0.0.1:1 --insecure status
expect 1 'takes certificates' --address 127.0.0.1:1 status
expect 1 'tls_key is empty' --address 127.0.0.1:1 --tls-certificate /nowhere status
expect 1 "$folder: neither model.safetensors" --socket "$none" push "$folder" --group g
expect 1 "$folder: neither model.safetensors" --socket "$none" engine --group g --checkpoint "$folder" --instance i
expect 1 "$folder/none" validate "$folder/none"
echo 'nonsense: 1' >"$folder/bad.textproto"
expect 1 'bad.textproto.*nonsense' validate "$folder/bad.textproto"
echo '' >"$folder/good.textproto"
expect 0 '' validate "$folder/good.textproto"
# A path through a file ended with 3, as if no daemon had answered.
expect 1 'good.textproto/x' validate "$folder/good.textproto/x"

# Names of a hostile index reached the terminal raw.
mkdir "$folder/hostile"
printf '{"weight_map": {"w\\u001b[2J\\u202e": "../x"}}' >"$folder/hostile/model.safetensors.index.json"
expect 1 'w.u001b.2J.u202e' --socket "$none" push "$folder/hostile" --group g

cat >"$folder/rules.textproto" <<'END'
tls { certificate: "/x/tls.crt" key: "/x/tls.key" roots: "/x/ca.crt" }
allowed_uids: 7
rule { who: "spiffe://prod/trainer/*" role: TRAINER group: "llama-*" }
END
expect 1 'rule.0..who is .me.' validate <(echo 'rule { who: "me" role: ENGINE group: "*" }')
can() { echo --do "$1" --group "$2" --config "$folder/rules.textproto" --as; }
t=spiffe://prod/trainer/t
expect 0 '' can $(can trainer llama-8b) $t
expect 1 '' can $(can trainer qwen) $t
expect 1 '' can $(can trainer llama-8b) spiffe://prod/engine
expect 1 '' can $(can trainer llama-8b) $t --owner spiffe://prod/trainer/u
expect 0 '' can $(can operator-write llama-8b) $t --owner $t
expect 0 '' can $(can engine any) uid:7,gid:1
expect 1 '' can $(can engine any) uid:8
expect 1 "'boss'" can $(can boss any) uid:8
expect 1 "'me'" can $(can engine any) me
expect 3 "$none" --socket "$none" can --as uid:8 --do engine --group g

# shows PATTERN: the last command's stdout has it
shows() {
  if ! grep -Eq "$1" "$folder/out"; then
    echo "stdout has no '$1':" >&2
    cat "$folder/out" >&2
    failures=$((failures + 1))
  fi
}

expect 0 '' validate "$folder/rules.textproto"
shows 'rule.0.: spiffe://prod/trainer/. may be trainer of groups whose names begin with .llama-.'
shows 'allowed_uids: uid:7 may be trainer, engine'
expect 1 '' can $(can trainer llama-8b) $t --owner spiffe://prod/trainer/u
shows '^no: .* which another identity owns'

exit $((failures > 0))
