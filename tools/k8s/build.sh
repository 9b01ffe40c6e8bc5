#!/usr/bin/env bash
# Build the programs of Kubernetes that tests/servers/test_helm*.py run: etcd, kube-apiserver, helm
# and prometheus-operator, with the operator's CRDs beside them.
#
#     tools/k8s/build.sh [FOLDER]
#
# FOLDER is ${GPUMEM_CACHE:-$HOME/.cache/gpumem-otel}/k8s/bin by default. What is there and current
# is kept, so a second run takes a second; a run that was cut off goes on where it was. Needs Go, as
# go.mod says, and the Go module proxy. All are of one module, so that they share Kubernetes'
# libraries. docs/internals/checked.md has what it costs from nothing.
set -euo pipefail
cd "$(dirname "$0")"

bin="${1:-${GPUMEM_CACHE:-$HOME/.cache/gpumem-otel}/k8s/bin}"
mkdir -p "$bin"
bin="$(cd "$bin" && pwd)"

source ../building.sh
exclusive "$bin"

pins="$({ cat go.mod go.sum build.sh ../building.sh; go version; } | sha256sum | cut -d ' ' -f 1)"

# tool PACKAGE NAME [FLAGS]: a program, with flags for the linker.
tool() {
    current "$2" "$pins" && return
    local new
    new="$(mktemp "$bin/.new.XXXXXX")"
    build "$new" "$1" -ldflags "-s -w ${3:-}"
    place "$new" "$2" "$pins"
}

# version MODULE: the one that go.mod pins.
version() { go list -mod=readonly -m -f '{{.Version}}' "$1"; }

# Kubernetes' own version: without it the server is v0.0.0, and helm renders for 1.20.
release="$(version k8s.io/kubernetes)"
major=1
minor="$(cut -d . -f 2 <<<"$release")"

util=helm.sh/helm/v3/pkg
tool helm.sh/helm/v3/cmd/helm helm \
    "-X $util/chartutil.k8sVersionMajor=$major -X $util/chartutil.k8sVersionMinor=$minor
     -X $util/lint/rules.k8sVersionMajor=$major -X $util/lint/rules.k8sVersionMinor=$minor"
tool go.etcd.io/etcd/server/v3 etcd

base=k8s.io/component-base/version
tool k8s.io/kubernetes/cmd/kube-apiserver kube-apiserver \
    "-X $base.gitVersion=$release -X $base.gitMajor=$major -X $base.gitMinor=$minor"

tool github.com/prometheus-operator/prometheus-operator/cmd/operator operator

if ! current crds "$pins"; then
    source="$(go list -mod=readonly -m -f '{{.Dir}}' github.com/prometheus-operator/prometheus-operator)"
    new="$(mktemp -d "$bin/.new.XXXXXX")"
    chmod 755 "$new"
    cp "$source"/example/prometheus-operator-crd/*.yaml "$new/"
    place "$new" crds "$pins"
fi
