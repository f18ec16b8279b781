"""The twenty prompts that SmolLM2 is held to: languages, code, emoji, chat, and a long one."""

from __future__ import annotations

_CHAT = (
    "<|im_start|>system\n{system}<|im_end|>\n"
    "<|im_start|>user\n{user}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
_HELPFUL = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def _chat(user: str, system: str = _HELPFUL) -> str:
    return _CHAT.format(system=system, user=user)


def _long_prompt() -> str:
    """About 1,500 tokens of a ledger that does not repeat itself."""
    goods = ("tea", "copper wire", "blue ink", "salt", "maps", "violin strings", "rope", "glass")
    ports = ("Lisbon", "Bergen", "Genoa", "Riga", "Cork", "Odessa", "Split")
    lines = [
        f"Entry {i}: the ship brought {17 * i % 97 + 3} crates of {goods[i * 5 % 8]} "
        f"from {ports[i * 3 % 7]}."
        for i in range(1, 76)
    ]
    return "The harbour master's ledger.\n" + "\n".join(lines) + "\nIn summary,"


PROMPTS: dict[str, str] = {
    "capital": _chat("What is the capital of France?"),
    "empty-system": _chat("Name three colours.", system=""),
    "story": "Once upon a time, in a village by the sea, there lived a",
    "science": "Photosynthesis is the process by which",
    "one-token": "The",
    "python": 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "c-code": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "json": '{"name": "Ada", "born": 1815, "works": [',
    "sql": "-- customers who bought more than five items\nSELECT",
    "math": _chat("If I have 17 apples and give away 5, how many are left? Explain."),
    "chinese": "中国的首都是北京。北京是一座",
    "chinese-chat": _chat("请用中文介绍一下长城。"),
    "emoji": "My favourite emojis are 🎉🚀🐙 and 👩‍👩‍👧‍👦 because",
    "french": "La tour Eiffel est située à Paris et elle",
    "german-umlauts": "Über die Brücke fährt ein großer Bär, der",
    "russian": "Москва является столицей России, и",
    "whitespace": "   \n\n\t  A list:\n  1. milk\n  2.",
    "punctuation": '?!... --- "\'" ;;; (((',
    "letter": "Dear Sir or Madam,\n\nI am writing to complain about",
    "long": _long_prompt(),
}
