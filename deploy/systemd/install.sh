#!/bin/bash
# Installs refitd, refitctl, the service and its files on this machine, or below DESTDIR.
# usage: [DESTDIR=FOLDER] deploy/systemd/install.sh [FOLDER_OF_BINARIES]
#        FOLDER_OF_BINARIES: where daemon/refitd and daemon/refitctl/refitctl are (default: bazel-bin)
# A configuration that is there already is kept. Starts and enables nothing.
set -euo pipefail

if [[ ${1:-} == -* ]] || (($# > 1)); then
  sed -n '2,5s/^# //p' "$0"
  [[ ${1:-} == -h || ${1:-} == --help ]] && exit 0
  exit 2
fi
source=$(cd "$(dirname "$0")/../.." && pwd)
binaries=${1:-$source/bazel-bin}
destination=${DESTDIR:-}

for binary in daemon/refitd daemon/refitctl/refitctl; do
  if [[ ! -x $binaries/$binary ]]; then
    echo "install.sh: no $binaries/$binary (bazel build //daemon:refitd //daemon/refitctl)" >&2
    exit 1
  fi
done

# put MODE FROM TO: installs the file FROM as TO, with MODE.
put() { install -D -m "$1" "$2" "$destination$3"; }

put 755 "$binaries/daemon/refitd" /usr/bin/refitd
put 755 "$binaries/daemon/refitctl/refitctl" /usr/bin/refitctl
put 644 "$source/deploy/systemd/refitd.service" /usr/lib/systemd/system/refitd.service
put 644 "$source/deploy/systemd/sysusers.conf" /usr/lib/sysusers.d/refitd.conf
put 644 "$source/deploy/systemd/tmpfiles.conf" /usr/lib/tmpfiles.d/refitd.conf
for example in gpu.conf cluster.conf cluster.textproto logrotate.conf; do
  put 644 "$source/deploy/systemd/$example" "/usr/share/doc/refitd/examples/$example"
done
for example in refitd.textproto prometheus/{alerts,scrape}.yml grafana/refitd.json; do
  put 644 "$source/deploy/$example" "/usr/share/doc/refitd/examples/${example##*/}"
done
for page in {access,networks,operations,refitctl,runbook,security,sizing,troubleshooting,upgrade}.md reference/{commands,log,metrics,settings}.md; do
  put 644 "$source/docs/$page" "/usr/share/doc/refitd/$page"
done
if [[ ! -e $destination/etc/refitd/refitd.textproto ]]; then
  put 644 "$source/deploy/refitd.textproto" /etc/refitd/refitd.textproto
fi

# Below DESTDIR this is left to a package's own scripts, which run on the machine that the package is for.
if [[ -z $destination ]]; then
  systemd-sysusers /usr/lib/sysusers.d/refitd.conf
  systemd-tmpfiles --create /usr/lib/tmpfiles.d/refitd.conf
  systemctl daemon-reload
  echo "installed; next: systemctl enable --now refitd"
fi
