#!/bin/bash
# In a folder that tools/bundle_fuzz made. Prints a table; exit 1 if a target found something.
#   run.sh fuzz [--processes N] [--runs N] [--seconds N] [TARGET]...   every target until it had N executions (10,000,000)
#       or the time is over (540 s), N processes at a time (one for each core); logs, corpora, findings in $OUT (out/)
#   run.sh wire [OPTION]...    wire_benchmark      run.sh nodes [OPTION]...    nodes_bench with refitd
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
processes=$(nproc) runs=10000000 seconds=540
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
what=${1:-}
shift || true
case $what in
  wire) exec "$here/bin/wire_benchmark" "$@" ;;
  nodes) exec "$here/bin/nodes_bench" --refitd "$here/bin/refitd" "$@" ;;
  fuzz) ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
while [[ ${1:-} == --* ]]; do
  case $1 in
    --processes) processes=$2 ;;
    --runs) runs=$2 ;;
    --seconds) seconds=$2 ;;
    *) echo "run.sh: $1?" >&2; exit 2 ;;
  esac
  shift 2
done
targets=("$@")
if (($# == 0)); then mapfile -t targets < <(ls "$here/corpus"); fi

out=${OUT:-$here/out}
# Each target is cut into as many jobs as there are processes. Processes take jobs of all targets in turn, so that those
# left over by a fast target help a slow one. The first job of a target looks for leaks and keeps the stacks of all
# allocations; the others spend that time, and libFuzzer's for weighing inputs by rarity, on executions.
findings_in() { find "$1" -name 'crash-*' -o -name 'timeout-*' -o -name 'oom-*' -o -name 'leak-*'; }
job() {
  local name=$1 number=$2 left=$((end - $(date +%s))) work fast=()
  if ((left <= 0)) || [[ -n $(findings_in "$out/$name") ]]; then return; fi
  work=$out/$name/$number
  mkdir -p "$work"
  if ((number > 1)); then
    export ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=1:malloc_context_size=0
    fast=(-detect_leaks=0 -entropic=0)
  fi
  if [[ -f $here/fuzz/$name.dict ]]; then fast+=(-dict="$here/fuzz/$name.dict"); fi
  "$here/fuzz/$name" -timeout=60 -rss_limit_mb=4096 -max_len=4096 -print_funcs=0 -print_final_stats=1 \
    "${fast[@]}" -runs=$((runs / processes + 1)) -max_total_time="$left" -artifact_prefix="$work/" \
    "$out/$name/corpus" "$here/corpus/$name" > "$work/log" 2>&1 || {
      echo "$name: job $number failed, see $work" >&2
      tail -n 40 "$work/log" >&2
    }
}
export -f job findings_in
for name in "${targets[@]}"; do
  rm -rf "${out:?}/$name"
  mkdir -p "$out/$name/corpus"
done
begin=$(date +%s)
end=$((begin + seconds))
export here out runs processes end
for ((number = 1; number <= processes; ++number)); do
  for name in "${targets[@]}"; do printf '%s\0%s\0' "$name" "$number"; done
done | xargs -0 -n 2 -P "$processes" bash -c 'job "$@"' job

failed=0
printf '%-20s %14s %8s %9s  %s\n' target executions jobs findings coverage
for name in "${targets[@]}"; do
  mapfile -t logs < <(find "$out/$name" -name log)
  executions=$(cat /dev/null "${logs[@]}" | awk '/number_of_executed_units/ { sum += $2 } END { printf "%d", sum }')
  findings=$(findings_in "$out/$name" | wc -l)
  coverage=$(cat /dev/null "${logs[@]}" | { grep -aoE 'cov: [0-9]+' || true; } |
    awk '$2 > most { most = $2 } END { print most + 0 }')
  printf '%-20s %14s %8s %9s  %s\n' "$name" "$executions" "${#logs[@]}" "$findings" "$coverage"
  if ((findings > 0)); then failed=1; fi
done
echo "$processes processes on $(nproc) cores, $(($(date +%s) - begin)) s, at most $runs executions each; $(uname -sm)," \
  "$(grep -m 1 'model name' /proc/cpuinfo | cut -d: -f2-)"
exit "$failed"
