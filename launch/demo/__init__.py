"""A real model on local Ray actors, asked two questions about one long text: `python -m launch.demo`."""
