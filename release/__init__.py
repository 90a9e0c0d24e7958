"""Builds, checks and publishes the distributions; docs/releases.md has the policy."""
