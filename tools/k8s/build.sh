#!/usr/bin/env bash
# Build the programs of Kubernetes that tests/servers/test_helm*.py run: etcd, kube-apiserver, helm
# and prometheus-operator, with the operator's CRDs beside them.
#
#     tools/k8s/build.sh [FOLDER]
#
# FOLDER is ${GPUMEM_CACHE:-$HOME/.cache/gpumem-otel}/k8s/bin by default. What is there and current
# is kept, so a second run takes a second; a run that was cut off goes on where it was. Needs Go, as
# go.mod says, and the Go module proxy. All are of one module, so that they share Kubernetes'
# libraries. From nothing: 15 minutes of CPU time, 8 minutes on two cores that are free; with Go's own
# caches a changed pin or flag takes a minute.
set -euo pipefail
cd "$(dirname "$0")"

bin="${1:-${GPUMEM_CACHE:-$HOME/.cache/gpumem-otel}/k8s/bin}"
mkdir -p "$bin"
bin="$(cd "$bin" && pwd)"

command -v go >/dev/null || {
    echo "build.sh: Go is missing; install the version that $PWD/go.mod names" >&2
    exit 1
}
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-buildvcs=false

pins="$({ cat go.mod go.sum build.sh; go version; } | sha256sum | cut -d ' ' -f 1)"

# current NAME: whether that program or folder is there, made from these pins.
current() { [ -e "$bin/$1" ] && [ "$(cat "$bin/.$1.pins" 2>/dev/null)" = "$pins" ]; }

# ready NAME: it is in its place now.
ready() {
    echo "$pins" >"$bin/.$1.pins"
    echo "build.sh: $1 is ready ($SECONDS s)"
}

# tool PACKAGE NAME [FLAGS]: a program, with flags for the linker.
tool() {
    current "$2" && return
    local new
    new="$(mktemp "$bin/.new.XXXXXX")"
    go build -mod=readonly -trimpath -ldflags "-s -w ${3:-}" -o "$new" "$1"
    mv -f "$new" "$bin/$2"
    ready "$2"
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

if ! current crds; then
    source="$(go list -mod=readonly -m -f '{{.Dir}}' github.com/prometheus-operator/prometheus-operator)"
    rm -rf "$bin/crds"
    mkdir "$bin/crds"
    cp "$source"/example/prometheus-operator-crd/*.yaml "$bin/crds/"
    ready crds
fi
