"""The serving half: opens an artifact and turns prompts into tokens.

Read in this order: llm (what a user calls), engine (the step), scheduler and policies (who runs),
block_manager and prefix_cache (where its K and V live, and who shares them), batch and executor
(one call of the compiled program), sampler.
"""
