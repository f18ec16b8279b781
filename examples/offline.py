"""Generate and chat with a compiled model, or with any model that can be compiled.

python examples/offline.py .cache/smollm2
"""

import sys

from octavo import LLM, SamplingParams

llm = LLM(sys.argv[1])
params = SamplingParams(temperature=0.0, max_tokens=32)

for output in llm.generate(["The capital of France is", "2, 4, 8, 16,"], params, use_tqdm=False):
    print(repr(output.prompt + output.outputs[0].text))

[answer] = llm.chat([{"role": "user", "content": "Say hello."}], params, use_tqdm=False)
print(answer.outputs[0].text)
