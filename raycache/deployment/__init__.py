"""What a service's settings come to for its model: number formats, pages, stages, memory."""
