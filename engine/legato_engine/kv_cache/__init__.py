"""KV pages, batch rows, adapter slots and the prefix cache."""
