"""Training side of Legato: everything that makes the legato-tiny checkpoint."""
