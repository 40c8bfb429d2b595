#!/bin/bash
# In a folder that tools/bundle_fuzz made. Prints a table; exit 1 if a target found something.
#   run.sh fuzz [--cores N] [--runs N] [--seconds N] [TARGET]...   every target until it had N executions (10,000,000)
#                                                  or the time is over (540 s); logs, corpora, findings in out/
#   run.sh wire [OPTION]...    wire_benchmark      run.sh nodes [OPTION]...    nodes_bench with refitd
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cores=$(nproc) runs=10000000 seconds=540
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
what=${1:-}
shift || true
case $what in
  wire) exec "$here/bin/wire_benchmark" "$@" ;;
  nodes) exec "$here/bin/nodes_bench" --refitd "$here/bin/refitd" "$@" ;;
  fuzz) ;;
  *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
while [[ ${1:-} == --* ]]; do
  case $1 in
    --cores) cores=$2 ;;
    --runs) runs=$2 ;;
    --seconds) seconds=$2 ;;
    *) echo "run.sh: $1?" >&2; exit 2 ;;
  esac
  shift 2
done
targets=("$@")
if (($# == 0)); then mapfile -t targets < <(ls "$here/corpus"); fi

# Each target is cut into as many jobs as there are cores. Cores take jobs of all targets in turn, so that those left
# over by a fast target help a slow one.
findings_in() { find "$1" -name 'crash-*' -o -name 'timeout-*' -o -name 'oom-*' -o -name 'leak-*'; }
job() {
  local name=$1 number=$2 left=$((end - $(date +%s))) work dictionary=()
  if ((left <= 0)) || [[ -n $(findings_in "$here/out/$name") ]]; then return; fi
  work=$here/out/$name/$number
  mkdir -p "$work/corpus"
  if [[ -f $here/fuzz/$name.dict ]]; then dictionary=(-dict="$here/fuzz/$name.dict"); fi
  "$here/fuzz/$name" -timeout=60 -rss_limit_mb=4096 -max_len=4096 -print_funcs=0 -print_final_stats=1 \
    "${dictionary[@]}" -runs=$((runs / cores + 1)) -max_total_time="$left" -artifact_prefix="$work/" \
    "$work/corpus" "$here/corpus/$name" > "$work/log" 2>&1 || echo "$name: job $number failed, see $work" >&2
}
export -f job findings_in
rm -rf "$here/out"
for name in "${targets[@]}"; do mkdir -p "$here/out/$name"; done
begin=$(date +%s)
end=$((begin + seconds))
export here runs cores end
for ((number = 1; number <= cores; ++number)); do
  for name in "${targets[@]}"; do printf '%s\0%s\0' "$name" "$number"; done
done | xargs -0 -n 2 -P "$cores" bash -c 'job "$@"' job

failed=0
printf '%-20s %14s %8s %9s  %s\n' target executions jobs findings coverage
for name in "${targets[@]}"; do
  mapfile -t logs < <(find "$here/out/$name" -name log)
  executions=$(cat /dev/null "${logs[@]}" | awk '/number_of_executed_units/ { sum += $2 } END { printf "%d", sum }')
  findings=$(findings_in "$here/out/$name" | wc -l)
  coverage=$(cat /dev/null "${logs[@]}" | { grep -aoE 'cov: [0-9]+' || true; } |
    awk '$2 > most { most = $2 } END { print most + 0 }')
  printf '%-20s %14s %8s %9s  %s\n' "$name" "$executions" "${#logs[@]}" "$findings" "$coverage"
  if ((findings > 0)); then failed=1; fi
done
echo "$cores cores, $(($(date +%s) - begin)) s, at most $runs executions each; $(uname -sm)," \
  "$(grep -m 1 'model name' /proc/cpuinfo | cut -d: -f2-)"
exit "$failed"
