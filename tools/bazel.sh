# The scripts here source this file, so that all run the distribution's Bazel in the same way.

# Bazel needs a home; cron jobs and containers often name none.
export HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
export USER=${USER:-$(id -un)}

# run_bazel CONFIG COMMAND ARGUMENT...: CONFIG is a name of .bazelrc, or empty. Each configuration has an output base of
# its own, so that nothing is built anew when configurations take turns.
run_bazel() {
  local config=$1 command=$2
  shift 2
  local startup=() flags=()
  if [[ -n $config ]]; then
    local checkout
    checkout=$(pwd | md5sum | cut -c1-12)
    startup=(--output_base="${REFITD_OUTPUT_BASES:-${XDG_CACHE_HOME:-$HOME/.cache}/refitd}/$checkout-$config")
    # A configuration says how to build; `query` does not know it.
    if [[ $command != query ]]; then flags=(--config="$config"); fi
  fi
  /usr/bin/bazel "${startup[@]}" "$command" "${flags[@]}" "$@"
}
