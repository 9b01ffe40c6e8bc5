#!/usr/bin/env bash
# Build the real servers that `pytest -m servers` runs: prometheus, promtool, otelcol, alertmanager.
#
#     tools/servers/build.sh [FOLDER]
#
# FOLDER is ${GPUMEM_CACHE:-$HOME/.cache/gpumem-otel}/servers/bin by default. What is there and
# current is kept, program by program, so a second run takes a second and a new pin costs only
# what it pins; a run that was cut off goes on where it was.
# Needs Go, as go.mod says, and the Go module proxy. From nothing: 11 minutes of CPU time, 6 to 8
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
flags=(-mod=readonly -trimpath -tags "remove_all_sd,enable_kubernetes_sd" -ldflags "-s -w")

# pins FILE...: what a program is built from, in one word.
pins() { { cat "$@"; echo "${flags[@]}"; go version; } | sha256sum | cut -d ' ' -f 1; }

# current NAME PINS: whether that program is there, built from these pins.
current() { [ -x "$bin/$1" ] && [ "$(cat "$bin/.$1.pins" 2>/dev/null)" = "$2" ]; }

# place FILE NAME PINS: put a finished program in its place in one step.
place() {
    mv -f "$1" "$bin/$2"
    echo "$3" >"$bin/.$2.pins"
    echo "build.sh: $2 is ready ($SECONDS s)"
}

# tool FOLDER PACKAGE NAME: of the module in that folder.
tool() {
    local new wanted
    wanted="$(pins "$1/go.mod" "$1/go.sum")"
    current "$3" "$wanted" && return
    new="$(mktemp "$bin/.new.XXXXXX")"
    (cd "$1" && go build "${flags[@]}" -o "$new" "$2")
    place "$new" "$3" "$wanted"
}

tool . github.com/prometheus/prometheus/cmd/prometheus prometheus
tool . github.com/prometheus/prometheus/cmd/promtool promtool
tool alertmanager github.com/prometheus/alertmanager/cmd/alertmanager alertmanager

collector="$(pins go.mod go.sum collector.yaml)"
if ! current otelcol "$collector"; then
    tool . go.opentelemetry.io/collector/cmd/builder builder
    config="$PWD/collector.yaml"
    (cd "$cache" && "$bin/builder" --config "$config")
    place "$cache/otelcol-source/otelcol" otelcol "$collector"
fi
