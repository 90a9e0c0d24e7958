"""Published weights: what can be pulled, where it is kept, how it gets there."""
