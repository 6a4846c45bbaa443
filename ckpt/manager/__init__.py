"""The object a training loop holds."""
