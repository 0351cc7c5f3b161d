"""What follows from settings and model: number formats, page counts, pipeline stages and memory use."""
