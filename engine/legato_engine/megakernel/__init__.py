"""The specification of a persistent decode kernel, as a simulator in plain Python.

One launch decodes until every request is done, deterministic and in virtual time. The kernel does
not exist yet, so no device code is checked against this specification.
"""
