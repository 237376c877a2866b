#!/bin/sh
# Removes the jars that match the patterns of a list from a directory. A pattern without a match is an error, so the list
# cannot outlive a version of Spark.
#
#   leave-out.sh LIST DIRECTORY
set -eu
grep -v '^#' "$1" | while read -r pattern; do
  found=$(cd "$2" && find . -path "./$pattern.jar" -print -quit)
  [ -n "$found" ] || { echo "$1: $pattern matches no jar" >&2; exit 1; }
  (cd "$2" && find . -path "./$pattern.jar" -delete)
done
find "$2" -mindepth 1 -type d -empty -delete
