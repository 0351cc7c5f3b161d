"""Where a prompt leaves those seen before, and why: the costs that a cache cannot avoid but a client can."""
