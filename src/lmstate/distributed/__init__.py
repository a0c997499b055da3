"""A model over several processes: each holds a part of the weights and of the state. See docs/devices.md."""
