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
expect 2 "takes no option '--bogus'" status --bogus=3
expect 2 "refitctl takes no command 'statu'; did you mean 'status'" statu
expect 2 "refitctl group takes no command 'delet'; did you mean 'delete'" group delet g
expect 2 "refitctl push takes no option '--grup'; did you mean '--group'" push "$folder" --grup g
expect 2 "refitctl status takes no argument 'surprise'" status surprise
expect 2 '' push --group g
expect 2 '' push "$folder" --group g --mode pigeon
expect 2 '' push "$folder" --group g --instances 2 # without --create
expect 2 'needs --socket' --address 127.0.0.1:1 push "$folder" --group g
expect 2 '--rank 2 is not below --world-size 2' engine --group g --checkpoint "$folder" --instance i --rank 2 --world-size 2
expect 3 "$none" --socket "$none" status
expect 3 "$none" --socket "$none" groups
expect 3 "$none" --socket "$none" members
expect 3 "$none" --socket "$none" watch --until-idle
expect 3 "$none" --socket "$none" top --once
expect 2 'status -o json' --socket "$none" -o json top
expect 3 "$none" --socket "$none" smoke
expect 2 'needs --coordinator' smoke --daemon "$none"
expect 2 'needs --group and --coordinator' smoke --join
expect 2 'needs --socket' --address 127.0.0.1:1 smoke
expect 3 "$none" --socket "$none" ready --group g --instance i
# A daemon that is slow to take a connection was said not to answer.
coproc mute {
  python3 -c 'import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()' "$folder/mute.sock"
}
read -r -t 60 _ <&"${mute[0]}"
expect 5 'no answer in time .--timeout.' --socket "$folder/mute.sock" --timeout 300ms status
exec {mute[1]}>&- # its end
expect 5 "$none: no answer in time .--timeout." --socket "$none" --timeout 200ms ready --group g --instance i --wait
expect 5 "$none" --socket "$none" --timeout 0.2 ready --group g --instance i --wait # seconds, without a unit
for wrong in 10x ms '' nan 1e3 -- ; do expect 2 'timeout' "--timeout=$wrong" status; done
expect 2 '0s is not 1ms to 24h' --timeout 0s status
expect 2 '25h is not 1ms to 24h' --timeout 25h status
expect 2 '5 is not 20ms to 1m' watch --interval 5 # milliseconds, without a unit
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

# A bundle is written where no daemon answers, too; it has no key, and replaces no file.
printf 'SECRET-KEY' >"$folder/tls.key"
cat >"$folder/tls.textproto" <<END
tls { certificate: "$folder/tls.crt" key: "$folder/tls.key" roots: "$folder/ca.crt" }
END
bundle() { echo --socket "$none" support-bundle -f "$folder/bundle.tar" --config "$folder/tls.textproto" "$@"; }
expect 0 '' $(bundle --metrics 127.0.0.1:1)
shows '^status.json: no daemon answers'
shows '^metrics.txt: 127.0.0.1:1: '
names=$(tar -tf "$folder/bundle.tar" | tr '\n' ' ')
[[ $names == 'versions.txt config.textproto missing.txt ' ]] || { echo "bundle: $names" >&2; failures=$((failures + 1)); }
[[ $(tar -xOf "$folder/bundle.tar" config.textproto) == *"key: \"$folder/tls.key\""* ]] || failures=$((failures + 1))
[[ $(stat -c %a "$folder/bundle.tar") == 600 ]] || failures=$((failures + 1))
if grep -q SECRET-KEY "$folder/bundle.tar"; then failures=$((failures + 1)); fi
expect 1 'bundle.tar' $(bundle)
expect 3 "$none" --socket "$none" trace g

# Help shows types, units and defaults, under headings.
expect 0 '' --help
for heading in Look Change Try Configure Connection; do shows "^$heading:"; done
shows 'timeout DURATION=10s'
expect 0 '' push --help
shows 'wait DURATION=1m'
shows 'instances INT:1 to 65536=1'
shows 'version INT:1 or more  '

# Completion knows the commands, the options of each, and those of refitctl itself.
expect 2 'SHELL' completion tcsh
for shell in zsh fish; do
  expect 0 '' completion $shell
  shows 'members'
  if command -v $shell >/dev/null && ! $shell -n "$folder/out"; then failures=$((failures + 1)); fi
done
expect 0 '' completion bash
# completes EXPECTED WORD...: what bash offers for the last word
completes() {
  local want=$1 got
  shift
  got=$(bash -c 'source "$1"; shift; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _refitctl; echo "${COMPREPLY[@]}"' - "$folder/completion" "$@")
  if [[ $got != "$want" ]]; then
    echo "completion of '$*': '$got', not '$want'" >&2
    failures=$((failures + 1))
  fi
}
cp "$folder/out" "$folder/completion"
completes 'groups group' refitctl gro
completes 'replace' refitctl group rep
completes '--bucket-bytes --broadcast' refitctl -o json push --b
completes '--timeout' refitctl status --ti

exit $((failures > 0))
