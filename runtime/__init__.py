"""The serving half: opens an artifact and turns prompts into tokens.

Read in this order: llm (what a user calls), engine (the step), scheduler and block_manager (who
runs, and where its K and V live), batch and executor (one call of the compiled program), sampler.
"""
