#!/bin/sh
# Java asks for the user's name before anything else (UnixLoginModule), and any user may be given to a container. One
# that /etc/passwd does not have gets an entry in a copy of it, since the file system is read-only.
set -eu
if ! getent passwd "$(id -u)" >/dev/null; then
  copy=$(mktemp -d /tmp/passwd.XXXXXX)
  cp /etc/passwd /etc/group "$copy"
  echo "bridge-$(id -u):x:$(id -u):$(id -g):delay bridge:/tmp:/bin/false" >>"$copy/passwd"
  export LD_PRELOAD=libnss_wrapper.so NSS_WRAPPER_PASSWD="$copy/passwd" NSS_WRAPPER_GROUP="$copy/group"
fi
# The same process: signals reach the bridge.
exec delay-bridge "$@"
