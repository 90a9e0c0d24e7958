"""How often objects of a confidence are right: measured on a labelled folder, and fitted."""
