"""The specification of a persistent decode kernel, as a simulator in plain Python.

One launch decodes until every request is done, in six stages, deterministic and in virtual time.
Block policies and float32 arithmetic are the engine's, of `speculative`. The kernel does not exist
yet, so no device code is checked against this specification.
"""
