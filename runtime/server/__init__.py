"""The HTTP server: OpenAI's API over AsyncLLM. Needs the packages of ``octavo[serve]``."""
