"""A published model, SmolLM2-135M-Instruct, beside transformers on the same weights.

`make tools` fetches the weights. `smollm2.json` has the answers of transformers; `python -m
tests.published.reference` writes it, and a slow test compares it with transformers again.
"""
