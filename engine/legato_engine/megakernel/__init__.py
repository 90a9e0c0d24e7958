"""The specification of a persistent decode kernel, as a simulator in plain Python.

One launch decodes until every request is done, in six stages, deterministic and in virtual time.
Its block policies and float32 arithmetic are those of `speculative`, which the engine uses. The
kernel itself does not exist yet, so no device code is checked against this specification.
"""
