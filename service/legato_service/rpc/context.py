"""The context of an RPC as this service's handlers know it."""

from __future__ import annotations

from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
