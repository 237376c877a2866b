#!/bin/sh
# Java first looks up the user's name (UnixLoginModule), and a container may run as any user. A user without an entry in
# /etc/passwd gets one in a copy of the file, since the file system is read-only.
set -eu
if ! getent passwd "$(id -u)" >/dev/null; then
  copy=$(mktemp -d /tmp/passwd.XXXXXX)
  cp /etc/passwd /etc/group "$copy"
  echo "bridge-$(id -u):x:$(id -u):$(id -g):delay bridge:/tmp:/bin/false" >>"$copy/passwd"
  export LD_PRELOAD=libnss_wrapper.so NSS_WRAPPER_PASSWD="$copy/passwd" NSS_WRAPPER_GROUP="$copy/group"
fi
# The same process: signals reach the bridge.
exec delay-bridge "$@"
