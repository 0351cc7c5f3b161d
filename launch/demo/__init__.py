"""`python -m launch.demo`: a real model on local Ray actors, asked two questions about one long text."""
