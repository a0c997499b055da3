"""Native bodies for the processor: C without libtorch, loaded by ctypes."""
