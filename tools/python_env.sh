# The scripts here source this file, which makes environments of Python packages from PyPI.

# python_env REQUIREMENTS [PYTHON]: prints the folder of an environment with exactly the packages that the file names, each
# checked by its hash. It is made on the first call, by /usr/bin/python3 or the interpreter named, and kept in the cache
# until the file or the interpreter changes. Needs python3-venv of the distribution (`tools/setup wheel`).
python_env() {
  local requirements=$1 python=${2:-/usr/bin/python3} name digest folder
  name=$(basename "$requirements" .txt)
  digest=$({ "$python" -VV; echo "$python"; cat "$requirements"; } | sha256sum | cut -c1-12)
  folder=${XDG_CACHE_HOME:-$HOME/.cache}/refitd/$name-$digest
  mkdir -p "$(dirname "$folder")"
  (
    flock 9
    if [[ ! -e $folder/complete ]]; then
      rm -rf "$folder"
      "$python" -m venv "$folder"
      "$folder/bin/pip" install -q --disable-pip-version-check --no-deps --require-hashes -r "$requirements"
      touch "$folder/complete"
    fi
  ) 9> "$folder.lock" >&2 || return 1
  echo "$folder"
}
