"""What a model directory holds: config.json, weights and how they are quantised."""
