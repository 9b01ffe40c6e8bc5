#!/usr/bin/env bash
# All GPUs of this machine, or its cores where there is none: torchrun.sh [STEPS]
#
# `gpumem-otel sd --watch 15 -o /etc/prometheus/targets/jobs.json` gives its ranks to a Prometheus on
# this machine.
set -euo pipefail
cd "$(dirname "$0")"

export OTEL_SERVICE_NAME=llm-train
export GPUMEM_OTEL_SERVE=1 # 127.0.0.1, port 9464 + local rank
# Alloy on this node, unless it is set already
export PYROSCOPE_SERVER_ADDRESS="${PYROSCOPE_SERVER_ADDRESS:-http://127.0.0.1:9999}"
# --standalone: a port of its own for each run, and an id, which is shown as the run
exec gpumem-otel run -- torchrun --standalone --nproc-per-node auto train.py "$@"
