"""The service process: gRPC in front, one engine process behind, no torch."""

import os

# Both are read when grpc is first imported.
# The engine process is started while the server runs, by a fork that executes at once: grpc's fork
# handlers have nothing to protect there, and complain.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# What grpc's core would write to standard error is no JSON; failures are logged by who meets them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
