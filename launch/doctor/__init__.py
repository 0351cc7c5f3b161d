"""`raycache doctor`: whether a service can run, before it is launched."""
