"""Programs that show Legato at work."""
