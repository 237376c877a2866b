#!/usr/bin/env bash
# A Kubernetes API to install the chart into, built with Go (10 minutes of two cores) into a directory.
#
#   kubernetes.sh VERSION DIRECTORY
set -euo pipefail
version=$1 directory=$(realpath --canonicalize-missing "$2")
scratch=$(mktemp --directory)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

# The module names its parts as directories of its own repository; from outside they are modules of the same version.
go mod init scratch 2>/dev/null
manifest=$(go mod download -json "k8s.io/kubernetes@v$version" | sed -n 's/.*"GoMod": "\(.*\)",/\1/p')
sed -nE 's/^\s*(k8s\.io\/[a-z-]+) => \.\/staging.*/\1/p' "$manifest" | while read -r part; do
  go mod edit -replace "$part=$part@v0.${version#*.}"
done
go mod edit -require "k8s.io/kubernetes@v$version"
programs=(kube-apiserver kube-controller-manager kube-scheduler kubectl)
printf '//go:build tools\n\npackage scratch\n\n' > tools.go
printf 'import _ "k8s.io/kubernetes/cmd/%s"\n' "${programs[@]}" >> tools.go
go mod tidy
part=k8s.io/component-base/version
go build -p 2 -o "$directory/" \
  -ldflags "-s -w -X $part.gitVersion=v$version -X $part.gitMajor=${version%%.*} -X $part.gitMinor=$(cut -d. -f2 <<< "$version")" \
  "${programs[@]/#/k8s.io/kubernetes/cmd/}"
# The CRDs that the chart's monitors and rules are of.
operator=$(go mod download -json github.com/prometheus-operator/prometheus-operator@v0.85.0 | sed -n 's/.*"Dir": "\(.*\)",/\1/p')
mkdir -p "$directory/crds"
for kind in podmonitors servicemonitors prometheusrules; do
  cp --no-preserve=mode "$operator/example/prometheus-operator-crd/monitoring.coreos.com_$kind.yaml" "$directory/crds/"
done
