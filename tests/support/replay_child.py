"""A recording played as a job: the process behind `support.replayed_job`.

    python replay_child.py FILE SPEED

Played once, so that its last state stays. Its environment holds its settings; it prints its address
and runs until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.source import ReplaySource
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.settings.options import resolve


def main(path: str, speed: float) -> None:
    source = ReplaySource(load_recording(path), SystemClock(), speed=speed, loop=False)
    config = resolve(os.environ, serve=True, port=0)
    agent = Agent(config, source=source, environ=dict(os.environ))
    with contextlib.suppress(KeyboardInterrupt):
        try:
            agent.start()
            assert agent.wait_listening(30)
            host, port = agent.address
            sys.stdout.write(f"{host}:{port}\n")
            sys.stdout.flush()
            signal.pause()
        finally:
            agent.stop(5.0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
