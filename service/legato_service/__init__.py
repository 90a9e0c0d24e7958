"""The service process: gRPC in front, one engine process behind, no torch."""

import os

from legato_engine.ipc.busy_poll import cores_abound

# All are read when grpc is first imported, and never again.
# The engine process is started while the server runs, by a fork that executes at once: grpc's fork
# handlers have nothing to protect there, and complain.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# What grpc's core would write to standard error is no JSON; failures are logged by who meets them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Where cores abound, connections are read by the thread that waits for grpc's events. Otherwise
# threads of their own read them and wake that one: a thread more between every message and its
# handler, which a lone call waits for. On few cores they read while the handlers run, and what
# counts there is how many calls are answered.
if cores_abound():
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
