#!/usr/bin/env bash
# Build the real servers that `pytest -m servers` runs: prometheus, promtool, otelcol.
#
#     tools/servers/build.sh [FOLDER]
#
# FOLDER is ${GPUMEM_CACHE:-$HOME/.cache/gpumem-otel}/servers/bin by default. What is there and
# current is kept, so a second run takes a second; a run that was cut off goes on where it was.
# Needs Go, as go.mod says, and the Go module proxy. From nothing: 10 minutes of CPU time, 5 to 7
# minutes on two cores; Go's own caches make a change of one pin cheap.
set -euo pipefail
cd "$(dirname "$0")"

cache="${GPUMEM_CACHE:-$HOME/.cache/gpumem-otel}/servers"
bin="${1:-$cache/bin}"
mkdir -p "$bin" "$cache"
bin="$(cd "$bin" && pwd)"

command -v go >/dev/null || {
    echo "build.sh: Go is missing; install the version that $PWD/go.mod names" >&2
    exit 1
}
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-buildvcs=false

# Service discoveries of clouds are half of Prometheus' build, and no test uses them.
tags=remove_all_sd,enable_kubernetes_sd

pins="$({ cat go.mod go.sum collector.yaml build.sh; go version; } | sha256sum | cut -d ' ' -f 1)"

# current NAME: whether that program is there, built from these pins.
current() { [ -x "$bin/$1" ] && [ "$(cat "$bin/.$1.pins" 2>/dev/null)" = "$pins" ]; }

# place FILE NAME: put a finished program in its place in one step.
place() {
    mv -f "$1" "$bin/$2"
    echo "$pins" >"$bin/.$2.pins"
    echo "build.sh: $2 is ready ($SECONDS s)"
}

# tool PACKAGE NAME
tool() {
    current "$2" && return
    local new
    new="$(mktemp "$bin/.new.XXXXXX")"
    go build -mod=readonly -trimpath -tags "$tags" -ldflags "-s -w" -o "$new" "$1"
    place "$new" "$2"
}

tool github.com/prometheus/prometheus/cmd/prometheus prometheus
tool github.com/prometheus/prometheus/cmd/promtool promtool

if ! current otelcol; then
    tool go.opentelemetry.io/collector/cmd/builder builder
    config="$PWD/collector.yaml"
    (cd "$cache" && "$bin/builder" --config "$config")
    place "$cache/otelcol-source/otelcol" otelcol
fi
