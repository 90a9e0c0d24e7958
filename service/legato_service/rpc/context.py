"""The type of the context of an RPC."""

from __future__ import annotations

from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
