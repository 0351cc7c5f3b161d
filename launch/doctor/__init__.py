"""`raycache doctor`: checks whether a service could run, without launching it."""
