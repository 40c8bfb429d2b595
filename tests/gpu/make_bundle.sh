#!/usr/bin/env bash
# make_bundle.sh OUT.tar.xz FILE...: what a GPU host needs to run tests/gpu/test and tests/gpu/bench, with every library
# that the binaries load except glibc's. Names decide: *_pb2*.py are stubs, other .py files and files named test, bench or
# README.md go to the top, the rest are binaries. Called by the Bazel rule :bundle.
set -euo pipefail

out=$1
shift
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
top=$root/refitd-gpu
mkdir -p "$top"/{bin,libexec,lib,python}

wrap() {
  cat > "$top/bin/$1" <<'END'
#!/bin/sh
case $0 in
  */*) here=${0%/*}/.. ;;
  *) here=.. ;;
esac
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$here/libexec/${0##*/}" "$@"
END
  chmod 755 "$top/bin/$1"
}

for file in "$@"; do
  name=${file##*/}
  case $name in
    *_pb2.py | *_pb2_grpc.py)
      # The stubs are imported as refitd.v1, so they go below the import root.
      mkdir -p "$top/python/refitd/v1"
      cp "$file" "$top/python/refitd/v1/"
      ;;
    test | bench | README.md | *.py) install -m "$([[ $name == *.* ]] && echo 644 || echo 755)" "$file" "$top/$name" ;;
    *)
      strip --strip-all -o "$top/libexec/$name" "$file"
      chmod 755 "$top/libexec/$name"
      wrap "$name"
      if ldd "$file" | grep 'not found' >&2; then exit 1; fi
      ldd "$file" | awk '$3 ~ /^\// { print $3 }' >> "$root/libraries"
      ;;
  esac
done

# glibc comes from the host, since all of its parts must fit the host's loader.
sort -u "$root/libraries" | while read -r library; do
  case ${library##*/} in
    libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | libresolv.so.* | libutil.so.* | libnsl.so.*) ;;
    *) cp -L "$library" "$top/lib/" ;;
  esac
done
chmod -R u+w "$top"
tar -C "$root" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cf - refitd-gpu | xz -6 -T2 > "$out"
