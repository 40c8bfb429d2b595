# Run by tests/package/test in a new Debian 12 that has the package's file in /tmp.
set -uo pipefail
mount -t proc proc /proc
passed=0 failed=0
# holds NAME COMMAND...: the command succeeds.
holds() {
  local name=$1
  shift
  if "$@" > /tmp/log 2>&1; then
    echo "ok      $name"
    ((++passed))
  else
    echo "FAILED  $name"
    tail -n 15 /tmp/log
    ((++failed))
  fi
}
no() { ! "$@"; }
equal() { [[ $1 == "$2" ]] || { echo "'$1' is not '$2'" && false; }; }
version_of() { "$1" --version | sed -n '1s/.* //p'; }
# Every library is the package's own or of the C and C++ runtime.
libraries() {
  local others
  others=$(ldd /usr/bin/refitd /usr/bin/refitctl | sed -E '/^\/|linux-vdso|ld-linux|\/usr\/bin\/\.\.\/lib\/refitd\/|lib(c|m|stdc\+\+|gcc_s|z|resolv|dl|rt|pthread)\.so/d')
  equal "$others" ""
}
gone() {
  local path
  for path; do [[ ! -e $path ]] || { echo "$path is there" && return 1; }; done
}
# The daemon as its own user, with the configuration of the package.
serve() {
  setpriv --reuid refitd --regid refitd --init-groups refitd --config /etc/refitd/refitd.textproto > /tmp/refitd.log 2>&1 &
  daemon=$!
  timeout 60 bash -c 'until refitctl --timeout 1 status > /dev/null 2>&1; do sleep 0.1; done'
}
move() {
  refitctl engine --group policy --instance a --checkpoint /tmp/checkpoint > /tmp/engine.log 2>&1 &
  refitctl push /tmp/checkpoint --group policy --create --wait-instances 1
}
drain() { kill -TERM "$daemon" && wait "$daemon"; }

apt-get update -qq > /tmp/log 2>&1 || { cat /tmp/log && exit 1; }
holds "the package installs, with what it depends on" apt-get install -qq -y --no-install-recommends /tmp/refitd.deb man-db
holds "its version is that of its programs" equal "$(dpkg-query -Wf '${Version}' refitd)" "$(version_of refitd)"
holds "refitctl is of the same version" equal "$(version_of refitctl)" "$(version_of refitd)"
holds "no library is another package's" libraries
holds "the files are those of the package" dpkg --verify refitd
holds "the user exists" getent passwd refitd
holds "the sockets' folder is the user's" equal "$(stat -c '%U:%G %a' /run/refitd)" "refitd:refitd 755"
holds "the service is not enabled" equal "$(systemctl is-enabled refitd)" disabled
holds "the unit is understood" systemd-analyze verify /usr/lib/systemd/system/refitd.service
holds "the configuration is valid" refitd --config /etc/refitd/refitd.textproto --validate
holds "the daemon serves as its user" serve
holds "a checkpoint reaches an engine" move
holds "the daemon drains at SIGTERM" drain
holds "whatis knows the daemon" whatis refitd
holds "whatis knows the tool" whatis refitctl
for page in refitd refitctl; do holds "the man page of $page has no error" no grep -q . <(man --warnings -E UTF-8 "$page" 2>&1 > /dev/null); done
echo "# edited" >> /etc/refitd/refitd.textproto
holds "the package installs again" dpkg -i /tmp/refitd.deb
holds "an edited configuration is kept" grep -qx "# edited" /etc/refitd/refitd.textproto
holds "the package is removed" dpkg -r refitd
holds "the programs are gone" gone /usr/bin/refitd /usr/bin/refitctl
holds "the configuration stays" test -e /etc/refitd/refitd.textproto
holds "the package is purged" dpkg -P refitd
holds "nothing is left but the user" gone /etc/refitd /run/refitd /usr/lib/refitd /usr/share/doc/refitd /var/log/refitd
echo "$passed passed, $failed failed"
((passed > 0 && failed == 0))
