#!/usr/bin/env bash
# Build the real servers that `pytest -m servers` runs: prometheus, promtool, otelcol, alertmanager.
#
#     tools/servers/build.sh [FOLDER]
#
# FOLDER is ${GPUMEM_CACHE:-$HOME/.cache/gpumem-otel}/servers/bin by default. What is there and
# current is kept, program by program, so a second run takes a second and a new pin costs only
# what it pins; a run that was cut off goes on where it was.
# Needs Go, as go.mod says, and the Go module proxy. docs/internals/checked.md has what it costs from nothing.
set -euo pipefail
cd "$(dirname "$0")"

cache="${GPUMEM_CACHE:-$HOME/.cache/gpumem-otel}/servers"
bin="${1:-$cache/bin}"
mkdir -p "$bin" "$cache"
bin="$(cd "$bin" && pwd)"

source ../building.sh
exclusive "$bin"

# Service discoveries of clouds are half of Prometheus' build, and no test uses them.
flags=(-tags "remove_all_sd,enable_kubernetes_sd" -ldflags "-s -w")

# pins FILE...: what a program is built from, in one word.
pins() { { cat "$@"; echo "$gcflags ${flags[*]}"; go version; } | sha256sum | cut -d ' ' -f 1; }

# tool FOLDER PACKAGE NAME: of the module in that folder.
tool() {
    local new wanted
    wanted="$(pins "$1/go.mod" "$1/go.sum")"
    current "$3" "$wanted" && return
    new="$(mktemp "$bin/.new.XXXXXX")"
    (cd "$1" && build "$new" "$2" "${flags[@]}")
    place "$new" "$3" "$wanted"
}

tool . github.com/prometheus/prometheus/cmd/prometheus prometheus
tool . github.com/prometheus/prometheus/cmd/promtool promtool
tool alertmanager github.com/prometheus/alertmanager/cmd/alertmanager alertmanager

collector="$(pins go.mod go.sum collector.yaml)"
if ! current otelcol "$collector"; then
    tool . go.opentelemetry.io/collector/cmd/builder builder
    config="$PWD/collector.yaml"
    (cd "$cache" && "$bin/builder" --config "$config" --gcflags "all=$gcflags")
    place "$cache/otelcol-source/otelcol" otelcol "$collector"
fi
