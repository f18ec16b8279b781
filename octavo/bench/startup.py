"""Process start to first token: measured in a process of its own, phase by phase."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from octavo.bench.results import Startup
from octavo.ir.errors import OctavoError


def measure_startup(artifact: Path, input_len: int = 32, **options: Any) -> Startup:
    """Start a process that loads an artifact and gives one token; ``options`` are those of LLM."""
    command = [sys.executable, "-m", "octavo.bench.first_token", str(artifact), str(input_len)]
    start = time.time()
    done = subprocess.run(
        [*command, str(start), json.dumps(options)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OctavoError(f"the process that measures the start failed: {reason}")
    return Startup(json.loads(done.stdout.splitlines()[-1]))
