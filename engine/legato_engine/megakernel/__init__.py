"""The specification of the persistent decode kernel: what CUDA is compared with.

One launch decodes until every request is done. Here it runs in plain Python, deterministic and in
virtual time: the same descriptors, the same six stages in the same order, the same float32.
"""
