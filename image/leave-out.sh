#!/bin/sh
# Removes the jars that match the patterns of a list from a directory; a pattern that matches nothing is an error, so
# that the list cannot outlive a version of Spark.
#
#   leave-out.sh LIST DIRECTORY
set -eu
grep -v '^#' "$1" | while read -r pattern; do
  found=$(find "$2" -name "$pattern.jar" -print -quit)
  [ -n "$found" ] || { echo "$1: $pattern matches no jar" >&2; exit 1; }
  find "$2" -name "$pattern.jar" -delete
done
