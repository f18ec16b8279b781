"""The process that octavo.bench.startup starts: loads an artifact and gives one token.

Arguments are the artifact, the prompt's length, the time at which the process was started, and the
keywords of LLM as JSON; printed is a JSON object of seconds by phase. Nothing that is slow to
import stands at the top, or it would not be seen in its phase.
"""

from __future__ import annotations

import itertools
import json
import sys
import time


def main() -> None:
    """Note the time between the phases."""
    artifact, input_len, start, options = sys.argv[1:]
    marks = [float(start), time.time()]

    from octavo.bench.timeline import run
    from octavo.bench.workload import uniform
    from octavo.runtime.llm import LLM

    marks.append(time.time())
    llm = LLM(artifact, **json.loads(options))
    marks.append(time.time())
    run(llm.engine, uniform(1, int(input_len), 1, llm.vocab_size))
    marks.append(time.time())

    started, imported, loaded, answered = (b - a for a, b in itertools.pairwise(marks))
    phases = {"start Python": started, "import": imported}
    phases |= {f"load: {name}": seconds for name, seconds in llm.load_times.items()}
    phases["load: rest"] = loaded - sum(llm.load_times.values())
    print(json.dumps({**phases, "first token": answered}))


if __name__ == "__main__":
    main()
