"""In place of the examples' train.py: the same training on the CPU, while a recording is played.

Without a GPU there would be no metrics, so the agent that `gpumem-otel run` put into this rank is
replaced by one whose memory is that of `$RECORDING`. Its metrics after the training go to
`$OUT/rank-<rank>.json`. Without a number of steps the ranks only meet.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import urllib.request
from pathlib import Path

import torch.distributed as dist
from support.deploy_files import EXAMPLES

import gpumem_otel
from gpumem_otel.api import lifecycle
from gpumem_otel.base.clock import SystemClock
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.source import ReplaySource
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.serve import discovery
from gpumem_otel.settings.options import resolve


def main(arguments: list[str]) -> None:
    environ = os.environ
    assert lifecycle.current() is not None
    gpumem_otel.uninstall()
    recording = load_recording(environ["RECORDING"], name="test")
    agent = Agent(resolve(environ), source=ReplaySource(recording, SystemClock()))
    lifecycle.adopt(agent)
    assert agent.wait_listening(60)
    if arguments:
        runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
    else:
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
    (listed,) = (
        one.port
        for one in discovery.targets(environ["GPUMEM_OTEL_RUN_DIR"])
        if one.pid == os.getpid()
    )
    with urllib.request.urlopen(f"http://127.0.0.1:{listed}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    seen = {"pid": os.getpid(), "port": listed, "metrics": lines}
    (Path(environ["OUT"]) / f"rank-{environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1:])
