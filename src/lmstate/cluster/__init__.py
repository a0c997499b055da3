"""Many engines behind one front: requests go where the state that they go on from is."""
