"""Servers placed by Ray Serve, and their addresses for Envoy. Only `application` imports Ray."""
