"""The service process: it speaks gRPC, runs one engine process, and never imports torch."""

import os
import sys

from legato_engine.ipc import latency_policy

# grpc reads these variables when it is first imported, before options are parsed, and never again.
# The engine process is forked while the server runs and executes at once: grpc's fork handlers have
# nothing to protect there, and complain.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# grpc's core writes no JSON to standard error; the service logs its failures itself.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
if latency_policy.resolve(latency_policy.setting_in(sys.argv[1:])).poller_reads:
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
